"""Parts of a model's repository on the hub, downloaded unless they are in the cache already.

Transformers, autoencoders and text encoders are fetched by those who need them, each without the
others. Whatever can go wrong on the way is one message with the fix.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from megaslide.errors import InputError

logger = logging.getLogger(__name__)


def download(name: str, wanted: Sequence[str], revision: str | None) -> Path:
    """The local copy of the files of a repository that match one of the patterns `wanted`.

    Args:
        name: what the user gave and is no folder here: `owner/name`, or a misspelt path.
        wanted: patterns such as `vae/*`.
        revision: branch, tag or commit.

    Raises:
        InputError: no such repository or revision, no access to it, or no network.
        ImportError: huggingface_hub is not installed.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise InputError(f"{name}: no such folder", "give a folder, or an id of the hub owner/name")
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise ImportError("the hub needs diffusers: pip install 'megaslide[train]'") from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(wanted)))
    except errors.GatedRepoError:
        fix = "accept its terms on its page, then run `hf auth login`"
        raise InputError(f"{name}: a gated repository that you have no access to", fix) from None
    except errors.RepositoryNotFoundError:
        problem = f"{name}: no such folder here, and no such repository on the hub"
        raise InputError(
            problem, "check the spelling; a private one needs `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        fix = "set `revision` to a branch, tag or commit that it has"
        raise InputError(f"{name}: has no revision {revision!r}", fix) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        logger.debug("the hub could not be reached: %s", error)
        problem = f"{name}: no such folder here, and the hub cannot be reached"
        raise InputError(problem, "download it where there is a network, give its folder") from None
