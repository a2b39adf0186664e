"""Learning rate as a function of the step: the four shapes the diffusers examples offer."""

import math

from megaslide.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, max_steps: int) -> float:
    """Learning rate of update `step` (0 is the first) of a run of `max_steps`.

    Linear warm-up from zero over `lr_warmup_steps`; then constant, or falling to zero at
    `max_steps` linearly or along half a cosine. `constant` ignores the warm-up, as in diffusers.
    """
    peak, warmup = config.learning_rate, config.lr_warmup_steps
    if config.lr_scheduler == "constant":
        return peak
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, max_steps - warmup)
    if config.lr_scheduler == "linear":
        return peak * max(0.0, 1 - progress)
    if config.lr_scheduler == "cosine":
        return peak * max(0.0, 0.5 * (1 + math.cos(math.pi * progress)))
    return peak
