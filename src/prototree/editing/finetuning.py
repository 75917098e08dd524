"""An edited tree is retrained: the head is trained again with the prototypes where a person put them (§7).

    session.save("runs/edited")
    run = finetune("runs/edited", "runs/finetuned")

Replacing a prototype cannot bring back what the network has unlearned: where a shortcut was enough in training, it may
not tell apart what the new prototype shows. Here the tree and its prototypes' patches stay, and the head learns with
them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.editing.session import EDITS, OWN_FOLDER, meant_classes
from prototree.errors import ConfigError
from prototree.features.registry import OWN_CACHE, link_maps, shared_folder
from prototree.files import make_folder, read_json, write_json
from prototree.pipeline.fit import train_run
from prototree.progress import Observer
from prototree.run import CONFIG, NOTES, Run

PARENT = "parent.json"  # in the new run: which tree it began with


def finetune(
    folder: str | Path,
    out: str | Path,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """Trains the network further with the tree of an edited run, as a new run. Continues one that was interrupted.

    Examples:
        >>> run = finetune("runs/photos-edited-1", "runs/finetuned")  # doctest: +SKIP
        >>> sorted(run.last_metrics["accuracy"])  # doctest: +SKIP
        ['greedy', 'max_path', 'soft']
    """
    run, out = Run.open(folder), Path(out)
    check_recipe(run)
    source = data or run.source
    config = run.config.changed({"epochs": 0, "project_within_class": False, **_own_folder(run), **(settings or {})})
    _expect_free(out, run)
    _link_caches(run, out)
    learned = train_run(config, source, out, resume=True, start=_as_meant(run), observer=observer)
    _carry_over(run, learned)
    return learned


def can_finetune(run: Run) -> bool:
    """Only prototypes that are patches while the head learns can stay where they were put."""
    return (run.folder / CONFIG).exists() and run.config.recipe.continues_trees


def check_recipe(run: Run) -> None:
    """Refuses what `can_finetune` does not allow."""
    if not can_finetune(run):
        raise ConfigError(
            "expected a run of a recipe that keeps prototypes in place, such as 'distill'; "
            f"{run.folder.name} has another"
        )


def _expect_free(out: Path, run: Run) -> None:
    """A folder with a run is only continued if it began with the same tree."""
    begun, start = out / PARENT, {"from": run.folder.resolve().name, "tree": checkpoint.fingerprint(run.tree())}
    if (out / CONFIG).exists() and (not begun.exists() or read_json(begun) != start):
        raise ConfigError(f"{out} already holds another run; choose another folder")
    make_folder(out)
    write_json(begun, start)


def _link_caches(run: Run, out: Path) -> None:
    """The maps of the run and of the one beside it that it was edited from, where they are not shared anyway."""
    edited_from = run.folder.resolve().with_name(Path(str(_editing(run).get("from", ""))).name or run.folder.name)
    elsewhere = [] if shared_folder(out) == shared_folder(run.folder) else [shared_folder(run.folder)]
    for folder in (run.folder / OWN_CACHE, edited_from / OWN_CACHE, *elsewhere):
        link_maps(folder, out)


def _carry_over(run: Run, learned: Run) -> None:
    """Notes and exclusions; nodes are known by their patches, should pruning have taken one away."""
    notes = {patches: run.notes[node] for node, patches in enumerate(_patches(run.tree())) if node in run.notes}
    nodes = enumerate(_patches(learned.tree()))
    write_json(learned.folder / NOTES, {str(node): notes[patches] for node, patches in nodes if patches in notes})
    editing = {key: value for key, value in _editing(run).items() if key in ("version", "edits", "excluded")}
    content = editing | {"from": run.folder.resolve().name, "finetuned": True}
    write_json(learned.folder / EDITS, content)


def _patches(tree: ProtoTree) -> list[tuple[tuple[str, str, tuple[int, int]] | None, ...]]:
    """Of each node, where its prototypes come from: one, or one for each side."""
    places = [(source.image, source.view, source.patch) if source is not None else None for source in tree.sources]
    return [tuple(places[node :: tree.topology.n_nodes]) for node in range(tree.topology.n_nodes)]


def _as_meant(run: Run) -> ProtoTree:
    """The edited tree, each leaf with the class that it is to stand for."""
    tree = run.tree()
    meant = meant_classes(_editing(run), tree)
    if meant is not None:
        tree.leaf_logits.data = one_hot(torch.tensor(meant), tree.n_classes).to(tree.leaf_logits)
    return tree


def _own_folder(run: Run) -> dict[str, Any]:
    """Where feedback came from another folder, no test photo is used, and confidence stays as editing has fitted it."""
    return {"hold_out": 0} if _editing(run).get("feedback", {}).get("photos") == OWN_FOLDER else {}


def _editing(run: Run) -> dict[str, Any]:
    path = run.folder / EDITS
    return read_json(path) if path.exists() else {}
