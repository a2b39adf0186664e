"""What an AdamW update works on: the state of a region, the settings, the numbers they give.

Every backend gets the same scalars, computed here once in double, so that none can differ by how
it rounds a product of hyper-parameters.

Shapes: n elements of one contiguous region, b = ceil(n / BLOCK8) blocks of 8-bit moments.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megaslide.ops.adamw.codes import num_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSettings:
    """Hyper-parameters of one update, in torch.optim.AdamW's words."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWState:
    """Views of one region of n elements: contiguous CPU tensors of rank 1."""

    weight: Tensor
    """`[n]` float32, the master itself, or bfloat16, the master rounded half up."""
    residual: Tensor | None = None
    """`[n]` int16, what a bf16 weight lacks of its master; see `reference.join_master`."""
    master: Tensor | None = None
    """`[n]` float32. A bf16 weight comes with either a residual or a master."""
    exp_avg: Tensor
    """`[n]` float32, or uint8 codes (see `codes`) where the scales are given."""
    exp_avg_sq: Tensor
    """`[n]` float32, or uint8 codes of its square root."""
    exp_avg_scale: Tensor | None = None
    """`[b]` float32; given for both moments or for none."""
    exp_avg_sq_scale: Tensor | None = None
    """`[b]` float32."""
    ema: Tensor | None = None
    """`[n]` float32 moving average of the master, updated in the same pass."""

    def check(self, grad: Tensor) -> None:
        """Raise ValueError unless the tensors, with this gradient, belong together."""
        if self.weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"weight is {self.weight.dtype}; must be float32 or bfloat16")
        halves = (self.residual is not None) + (self.master is not None)
        if halves != (self.weight.dtype == torch.bfloat16):
            raise ValueError(
                f"weight {self.weight.dtype} with residual={self.residual is not None}, "
                f"master={self.master is not None}; float32 takes neither, bfloat16 exactly one"
            )
        coded = self.exp_avg_scale is not None
        if coded != (self.exp_avg_sq_scale is not None):
            raise ValueError(
                f"exp_avg_scale={coded}, exp_avg_sq_scale={not coded}; give both or neither"
            )
        n, either = self.weight.numel(), (torch.float32, torch.bfloat16)
        moment = torch.uint8 if coded else torch.float32
        _check("weight", self.weight, either, n)
        _check("residual", self.residual, (torch.int16,), n)
        _check("master", self.master, (torch.float32,), n)
        _check("exp_avg", self.exp_avg, (moment,), n)
        _check("exp_avg_sq", self.exp_avg_sq, (moment,), n)
        _check("exp_avg_scale", self.exp_avg_scale, (torch.float32,), num_blocks(n))
        _check("exp_avg_sq_scale", self.exp_avg_sq_scale, (torch.float32,), num_blocks(n))
        _check("ema", self.ema, (torch.float32,), n)
        _check("grad", grad, either, n)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """The scalars of one update; each is rounded to float32 where it meets an element."""

    grad_scale: float
    decay: float
    """Factor on the master: decoupled weight decay."""
    exp_avg_weight: float
    beta2: float
    exp_avg_sq_weight: float
    root_correction: float
    """Divisor of sqrt(exp_avg_sq): its bias correction."""
    eps: float
    step_size: float
    """Factor on exp_avg / denominator; negative, with the bias correction of exp_avg."""
    ema_weight: float
    step: int

    @classmethod
    def of(
        cls, s: AdamWSettings, *, step: int, grad_scale: float, ema_decay: float
    ) -> "Coefficients":
        return cls(
            grad_scale=grad_scale,
            decay=1 - s.lr * s.weight_decay,
            exp_avg_weight=1 - s.beta1,
            beta2=s.beta2,
            exp_avg_sq_weight=1 - s.beta2,
            root_correction=(1 - s.beta2**step) ** 0.5,
            eps=s.eps,
            step_size=-(s.lr / (1 - s.beta1**step)),
            ema_weight=1 - ema_decay,
            step=step,
        )


def _check(name: str, x: Tensor | None, dtypes: tuple[torch.dtype, ...], size: int) -> None:
    if x is None:
        return
    if x.dtype in dtypes and x.shape == (size,) and x.is_contiguous() and x.device.type == "cpu":
        return
    wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise ValueError(
        f"{name} is {x.dtype} {list(x.shape)}, strides {list(x.stride())}, on {x.device}; "
        f"must be {wanted} [{size}], contiguous, on the cpu"
    )
