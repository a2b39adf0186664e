"""Where a pretrained transformer lies: in a pipeline's folder on this machine, or on the hub.

Whatever a user may mistake for such a folder (a single file, a LoRA, the pipeline without its
transformer, a gated repository without a login) is refused here, before anything is allocated, by a
message that names the file and the fix.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaslide.errors import InputError
from megaslide.weights import CONFIG_NAME, read_json, weight_files

logger = logging.getLogger(__name__)

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
        root = _download(name_or_path, subfolder, revision)
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


def _download(name: str, subfolder: str, revision: str | None) -> Path:
    """The local copy of a repository on the hub: the transformer and what describes it."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise InputError(f"{name}: no such folder", "give a folder, or an id of the hub owner/name")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise ImportError("the hub needs diffusers: pip install 'megaslide[train]'") from error
    wanted = [f"{subfolder}/*", str(SCHEDULER), PIPELINE]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except errors.GatedRepoError:
        fix = "accept its terms on its page, then run `hf auth login`"
        raise InputError(f"{name}: a gated repository that you have no access to", fix) from None
    except errors.RepositoryNotFoundError:
        problem = f"{name}: no such folder here, and no such repository on the hub"
        raise InputError(
            problem, "check the spelling; a private one needs `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{name}: has no revision {revision!r}", "set model.revision") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        logger.debug("the hub could not be reached: %s", error)
        problem = f"{name}: no such folder here, and the hub cannot be reached"
        raise InputError(problem, "download it where there is a network, give its folder") from None
