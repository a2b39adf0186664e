"""Streaming: a model's state lives in host memory, its blocks visit the device."""

from megaslide.streaming.model import NonFiniteGradient, StepResult, StreamedModel, stream
from megaslide.streaming.transfer import TransferHooks

__all__ = ["NonFiniteGradient", "StepResult", "StreamedModel", "TransferHooks", "stream"]
