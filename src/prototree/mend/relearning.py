"""A mended tree learns on: the head is trained again with the prototypes where a person put them (§7).

    session.save("runs/mended")
    run = relearn("runs/mended", "runs/relearned")

Replacing a prototype cannot bring back what the network has unlearned: where a shortcut was enough in training, it may
not tell apart what the new prototype shows. Here the tree and its prototypes' patches stay, and the head learns with
them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prototree.errors import ConfigError
from prototree.files import read_json, write_json
from prototree.mend.session import MENDING, NOTES
from prototree.pipeline.fit import existing_run, fit
from prototree.pipeline.stages import Observer, Run
from prototree.training.batches import link_caches
from prototree.tree.model import PrototypeSource


def relearn(
    folder: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """A new run in which the network has learned with the tree of a mended one. An interrupted one is continued."""
    run, out = existing_run(folder), Path(out)
    check_recipe(run)
    source = data or run.source
    values = asdict(run.config) | {"epochs": 0, "start": str(run.folder), "constrain_classes": False}
    _expect_free(out, str(run.folder))
    _link_caches(run, out)
    learned = fit(source, out, settings=values | dict(settings or {}), resume=True, observer=observer)
    _carry_over(run, learned)
    return learned


def learns_on(run: Run) -> bool:
    """Only prototypes that are patches while the head learns can stay where they were put."""
    return (run.folder / "config.toml").exists() and run.config.recipe == "warm"


def check_recipe(run: Run) -> None:
    """Refuses what `learns_on` does not allow."""
    if not learns_on(run):
        raise ConfigError(f"expected a run of the recipe 'warm', but {run.folder.name} is none: there prototypes move")


def _expect_free(out: Path, start: str) -> None:
    config = Run(out).config if (out / "config.toml").exists() else None
    if config is not None and config.start != start:
        raise ConfigError(f"{out} already holds another run; choose another folder")


def _link_caches(run: Run, out: Path) -> None:
    """The trunk's maps of the run and of the one beside it that it was mended from."""
    mended_from = run.folder.resolve().with_name(Path(str(_mending(run).get("from", ""))).name or run.folder.name)
    link_caches([run.folder / "cache", mended_from / "cache"], out / "cache")


def _carry_over(run: Run, learned: Run) -> None:
    """Notes and bans; nodes are known by their patches, should pruning have taken one away."""
    notes = {_place(source): run.notes[node] for node, source in enumerate(run.tree().sources) if node in run.notes}
    sources = enumerate(learned.tree().sources)
    found = {str(node): notes[_place(source)] for node, source in sources if _place(source) in notes}
    write_json(learned.folder / NOTES, found)
    mending = {key: value for key, value in _mending(run).items() if key in ("version", "edits", "banned")}
    content = mending | {"from": run.folder.resolve().name, "relearned": True}
    write_json(learned.folder / MENDING, content)


def _place(source: PrototypeSource | None) -> tuple[str, str, tuple[int, int]] | None:
    return (source.image, source.view, source.patch) if source is not None else None


def _mending(run: Run) -> dict[str, Any]:
    path = run.folder / MENDING
    return read_json(path) if path.exists() else {}
