"""The real class of a pretrained transformer, built without memory for its parameters.

Parameters are on the meta device, in the dtypes in which diffusers would load them, so that a
store can be laid out from them and then filled straight from the files. What the class computes at
construction (rotary tables) is real. The result streams, loads and saves like any other model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megaslide.config import AttentionConfig
from megaslide.errors import InputError
from megaslide.models.pretrained.conversion import ENTRY, convert, read_settings
from megaslide.models.pretrained.source import Source
from megaslide.weights import CONFIG_NAME


def build_on_meta(source: Source, dtype: torch.dtype, *, backend: str = "auto") -> nn.Module:
    """The transformer of `source` in training mode, its parameters on the meta device.

    Where config.json has an `attention` entry, attention is converted as it says; the parameters
    that this adds have first values.

    Args:
        source: what to build.
        dtype: of all floating-point parameters but those that the class keeps in fp32
            (`_keep_in_fp32_modules`), as `from_pretrained(torch_dtype=...)` of diffusers has it.
        backend: implementation of the operator in converted attention.

    Raises:
        InputError: no class of diffusers, one that its config.json does not fit, or an attention
            that cannot be converted.
        ImportError: diffusers is not installed.
    """
    loader, settings = _class_of(source), read_settings(source, backend)
    values = {key: value for key, value in source.config.items() if key != ENTRY}
    try:
        with _parameters_on_meta():
            model: nn.Module = loader.from_config(values)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{source.folder / CONFIG_NAME}: {source.class_name} cannot be built from it: {error}",
            "take the file from the same place as the weights, and a diffusers that knows it",
        ) from None
    if settings is not None:
        _convert(model, settings, source)
    kept = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    _adopt_buffers(model)
    _set_dtypes(model, dtype, kept)
    return model.train()


def _convert(model: nn.Module, settings: AttentionConfig, source: Source) -> None:
    try:
        convert(model, settings)
    except InputError as error:
        raise InputError(f"{source.folder}: {error.problem}", error.fix) from None


def _class_of(source: Source) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ImportError("models need diffusers: pip install 'megaslide[train]'") from error
    loader = getattr(diffusers, source.class_name, None)
    if not (isinstance(loader, type) and issubclass(loader, diffusers.ModelMixin)):
        raise InputError(
            f"{source.folder / CONFIG_NAME}: diffusers {diffusers.__version__} has no model "
            f"{source.class_name}",
            "upgrade diffusers if the model is newer; check model.subfolder",
        )
    return loader


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters registered within lose their values at once; buffers keep theirs."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        yield
    finally:
        handle.remove()


def _adopt_buffers(model: nn.Module) -> None:
    """Turn the buffers that files hold into frozen parameters, which a store keeps and saves."""
    for module in model.modules():
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and key not in module._non_persistent_buffers_set:
                del module._buffers[key]
                frozen = nn.Parameter(buffer.to("meta"), requires_grad=False)
                module.register_parameter(key, frozen)


def _set_dtypes(model: nn.Module, dtype: torch.dtype, kept: tuple[str, ...]) -> None:
    """Give every parameter its dtype; one that several modules share stays shared."""
    replaced: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            in_fp32 = not set(kept).isdisjoint([*path.split("."), key])
            value = parameter.to(torch.float32 if in_fp32 else dtype)
            again = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[key] = replaced.setdefault(id(parameter), again)
