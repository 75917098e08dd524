"""What must be the same for a training to be continued, as JSON, and words for what is not. No torch here."""

import json
from pathlib import Path
from typing import Any

from prototree.errors import CheckpointError


def expect_same(folder: Path, then: str, now: str) -> None:
    """Refuses to go on in a folder that was begun with other settings or data, and says which."""
    if then == now:
        return
    if _is_older(then, now):
        raise CheckpointError(
            f"{folder} was begun by an earlier version of this program, whose settings had other names; "
            "finish it with that version, or start again with --overwrite"
        )
    raise CheckpointError(
        f"{folder} was trained with other settings or data ({_differences(then, now)}); continue it with the same, or "
        "choose another folder"
    )


def _is_older(then: str, now: str) -> bool:
    old, new = _as_values(then), _as_values(now)
    return old is not None and new is not None and "version" in new and old.get("version") != new["version"]


def _as_values(identity: str) -> dict[str, Any] | None:
    """An identity that is a JSON object."""
    try:
        return dict(json.loads(identity))
    except (TypeError, ValueError):
        return None


def _differences(then: str, now: str) -> str:
    """What differs between two identities, which may be JSON."""
    old, new = _as_values(then), _as_values(now)
    if old is None or new is None:
        return f"{then[:200]} then, {now[:200]} now"
    keys = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    return "; ".join(f"{key} {old.get(key, 'not there')!r} then, {new.get(key, 'not there')!r} now" for key in keys)
