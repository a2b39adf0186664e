"""Where a pretrained transformer lies: in a pipeline's folder on this machine, or on the hub.

Whatever a user may mistake for such a folder (a single file, a LoRA, the pipeline without its
transformer, a gated repository without a login) is refused here, before anything is allocated, by a
message that names the file and the fix.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaslide.errors import InputError
from megaslide.hub import download
from megaslide.weights import CONFIG_NAME, read_json, weight_files

PIPELINE = "model_index.json"
SCHEDULER = Path("scheduler") / "scheduler_config.json"
_SINGLE_FILES = (".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
_ADAPTERS = ("pytorch_lora_weights.safetensors", "adapter_config.json")
_LAYOUT_FIX = "give a folder in the diffusers layout, as save_pretrained writes it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A transformer's folder, and what the pipeline around it says about its training."""

    folder: Path
    """Holds config.json and the weights."""
    config: Mapping[str, Any]
    """config.json."""
    scheduler: Mapping[str, Any] | None = None
    """The pipeline's scheduler_config.json, if it has one."""
    pipeline: Mapping[str, Any] | None = None
    """The pipeline's model_index.json, if it has one."""

    @property
    def class_name(self) -> str:
        return str(self.config["_class_name"])


def find_source(
    name_or_path: str, *, subfolder: str = "transformer", revision: str | None = None
) -> Source:
    """Find a transformer and check that its folder is whole.

    Args:
        name_or_path: a pipeline's folder, the transformer's own folder, or an id on the hub
            (`owner/name`), which is downloaded unless it is in the cache already.
        subfolder: where in the pipeline the transformer is; `transformer_2` is the second expert
            of models that have two.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: nothing there, something else there, or missing files.
    """
    root = Path(name_or_path).expanduser()
    if not root.exists():
        root = download(name_or_path, (f"{subfolder}/*", str(SCHEDULER), PIPELINE), revision)
    folder = _transformer_folder(root, subfolder)
    config = read_json(folder / CONFIG_NAME, _LAYOUT_FIX)
    if not isinstance(config.get("_class_name"), str):
        raise InputError(f"{folder / CONFIG_NAME}: names no _class_name", _LAYOUT_FIX)
    weight_files(folder)
    return Source(
        folder=folder,
        config=config,
        scheduler=_optional(folder.parent / SCHEDULER),
        pipeline=_optional(folder.parent / PIPELINE),
    )


def _transformer_folder(root: Path, subfolder: str) -> Path:
    if root.is_file():
        what = "a single file" if root.suffix in _SINGLE_FILES else "a file"
        raise InputError(
            f"{root}: {what}, not a folder",
            "convert it once: from_single_file(FILE) of its diffusers class, then save_pretrained",
        )
    inner = root / subfolder
    for folder in (inner, root):
        if adapters := [name for name in _ADAPTERS if (folder / name).exists()]:
            raise InputError(
                f"{folder / adapters[0]}: a LoRA, which is a change to a model and not a model",
                "give the base model's folder, or fuse the LoRA into it and save that",
            )
    if (inner / CONFIG_NAME).is_file():
        return inner
    if (root / CONFIG_NAME).is_file() and not inner.exists():
        return root
    found = sorted(path.parent.name for path in root.glob(f"*/{CONFIG_NAME}"))
    raise InputError(
        f"{inner / CONFIG_NAME}: no such file",
        f"set model.subfolder to one of {found}" if found else _LAYOUT_FIX,
    )


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path, "copy the file again") if path.is_file() else None
