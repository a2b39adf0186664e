"""Streaming: a model's state lives in host memory, its blocks visit the device."""

from megaslide.streaming.filling import reset_parameters
from megaslide.streaming.model import NonFiniteGradientError, StepResult, StreamedModel, stream
from megaslide.streaming.options import StreamOptions
from megaslide.streaming.transfer import TransferHooks

__all__ = [
    "NonFiniteGradientError",
    "StepResult",
    "StreamOptions",
    "StreamedModel",
    "TransferHooks",
    "reset_parameters",
    "stream",
]
