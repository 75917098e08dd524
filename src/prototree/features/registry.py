"""Where cached maps lie, and who uses them.

Runs that lie beside each other share one folder of maps, whose names say what they hold. Each run notes which it uses
(`maps.json`), so that `clean` knows what nobody else needs. Runs of earlier versions have a folder `cache` of their
own.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from prototree.files import read_json, write_json
from prototree.locks import waited_for
from prototree.training import distributed

OWN_CACHE = "cache"  # of a run that an earlier version made, or that was lent maps
USED = "maps.json"


def shared_folder(run: Path) -> Path:
    """Where the maps of a run and of those beside it lie; in the run itself where nothing may be written beside it."""
    shared = folder_beside(run)
    return shared if os.access(shared if shared.exists() else shared.parent, os.W_OK) else run / OWN_CACHE


def folder_beside(run: Path) -> Path:
    """The folder of maps beside a run, whether or not anything may be written there."""
    return run.resolve().parent / "prototree-maps"


def maps_used(run: Path) -> list[str]:
    """The files of the shared folder that a run has noted."""
    path = run / USED
    return [str(name) for name in read_json(path).get("maps", [])] if path.exists() else []


def link_maps(source: Path, run: Path) -> None:
    """Lends a run the maps of a folder; a name says what a file holds, so that only a fitting one is used."""
    own = run / OWN_CACHE
    for pattern in ("*.f16", "*.json"):  # the description last: a file without one is not used
        for file in sorted(source.glob(pattern)):
            own.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # it is there already, or on another disk
                os.link(file, own / file.name)


def note_use(run: Path, name: str) -> None:
    """Notes that a run uses a file of the shared folder."""
    if distributed.is_first() and name not in (used := maps_used(run)):
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / USED, {"maps": [*used, name]})


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Waits for other programs that are busy with the same file, where the system can tell.

    Where nothing may be written none is busy, and no lock could be made.
    """
    if not distributed.is_first() or (path.parent.exists() and not os.access(path.parent, os.W_OK)):
        yield
        return
    with waited_for(path.with_suffix(".lock")):
        yield
