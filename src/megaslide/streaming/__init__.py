"""Streaming: a model's state lives in host memory, its blocks visit the device."""

from megaslide.streaming.filling import reset_parameters
from megaslide.streaming.model import NonFiniteGradientError, StepResult, StreamedModel, stream
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.records import planned_state_bytes
from megaslide.streaming.transfer import TransferHooks

__all__ = [
    "NonFiniteGradientError",
    "StepResult",
    "StreamOptions",
    "StreamedModel",
    "TransferHooks",
    "planned_state_bytes",
    "reset_parameters",
    "stream",
]
