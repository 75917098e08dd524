"""Trees that are named `user/name` and live on the model hub: fetched once, kept in the hub client's own cache.

Only files that a run consists of are fetched, none of which holds code, and only as many bytes as a tree may have.
"""

import logging
import os
import re
from pathlib import Path

from prototree.core.archive import MARK
from prototree.core.shared_files import MAX_FILES, is_shared
from prototree.errors import CheckpointError

log = logging.getLogger(__name__)

MAX_BYTES = 4 * 2**30
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


def is_hub_name(name: str | Path) -> bool:
    """Whether this can only be the name of a model on the hub: `user/name`, where no folder `user` is here."""
    path = Path(name)
    return NAME.fullmatch(path.as_posix()) is not None and not path.exists() and not path.parent.exists()


def endpoint() -> str | None:
    """Where the hub is; None for the usual one. `HF_ENDPOINT` names another, as for the client itself."""
    return os.environ.get("HF_ENDPOINT") or None


def fetch(name: str | Path) -> Path:
    """The folder of a run, fetched where it is not in the cache; without a network the one that was fetched last."""
    from huggingface_hub import HfApi, snapshot_download

    name, api = Path(name).as_posix(), HfApi(endpoint=endpoint(), library_name="prototree")
    try:
        info = api.model_info(name, files_metadata=True)
    except Exception as error:  # the client raises many kinds, all of which mean the same to the user
        try:
            kept = Path(snapshot_download(name, local_files_only=True))
            if not (kept / MARK).exists():
                raise FileNotFoundError(MARK)
        except Exception:
            raise CheckpointError(
                f"there is no folder {name} here, and no model {name} could be fetched from the hub ({_say(error)}); "
                "check the name, and log in with `hf auth login` if it is private"
            ) from error
        log.warning("the hub cannot be reached (%s); using %s as it was fetched last", _say(error), name)
        return kept
    wanted = [one for one in info.siblings or [] if is_shared(one.rfilename)]
    total = sum(one.size or 0 for one in wanted)
    for needed in ("projected/tree.json", MARK):  # the mark says that it may name no folder of this machine
        if not any(one.rfilename == needed for one in wanted):
            raise CheckpointError(f"{name} on the hub is no prototype tree: it has no {needed}; choose another")
    if total > MAX_BYTES or len(wanted) > MAX_FILES:
        raise CheckpointError(f"{name} on the hub has {len(wanted)} files of {total >> 20} MiB; expected a single tree")
    try:
        return Path(snapshot_download(name, allow_patterns=[one.rfilename for one in wanted], endpoint=endpoint()))
    except Exception as error:
        raise CheckpointError(f"{name} could not be fetched from the hub ({_say(error)}); try again") from error


def _say(error: Exception) -> str:
    """Its first two lines: the client's advice behind them is for its own callers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:200] or type(error).__name__
