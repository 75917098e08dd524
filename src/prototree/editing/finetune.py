"""Fine-tune an edited tree: train the head further with the prototypes where a person put them (§7).

    session.save("runs/edited")
    run = finetune("runs/edited", "runs/finetuned")

Replacing a prototype cannot bring back what the network has unlearned: where a shortcut was enough in training, it may
not separate what the new prototype shows. Here the tree and its prototypes' patches stay, and the head is trained.
"""

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import one_hot

from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.editing.session import EDITS, GIVEN_IMAGES, leaf_classes, read_edits
from prototree.errors import ConfigError
from prototree.features.cache import link_files, shared_folder
from prototree.io import make_folder, read_json, write_json
from prototree.pipeline.fit import fit
from prototree.progress import Observer
from prototree.run import CONFIG, NOTES, Run, move_notes, notes_by_patch

PARENT = "parent.json"  # in the new run: which tree it began with


def finetune(
    model: str | Path | Run,
    out: str | Path,
    *,
    data: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Run:
    """Fine-tune an edited tree as a new run: train its head further while the prototypes stay at their patches.

    Args:
        model: The edited run, or its path.
        out: Folder of the new run; one that was interrupted is resumed.
        data: Data set to train on instead of the run's own.
        settings: Settings by name, which replace those of the run.
        observer: Progress callbacks.

    Returns:
        The new run.

    Raises:
        ConfigError: The run's recipe moves prototypes, or `out` holds another run.

    Examples:
        >>> run = finetune("runs/photos-edited-1", "runs/finetuned")  # doctest: +SKIP
        >>> sorted(run.last_metrics["accuracy"])  # doctest: +SKIP
        ['greedy', 'max_path', 'soft']
    """
    run, out = Run.open(model), Path(out)
    check_can_finetune(run)
    edits, source = read_edits(run), data or run.source
    # Without test images among the validation images there is nothing to calibrate on; confidence stays as it is.
    fixed = {"calibration_fraction": 0} if edits.get("validation", {}).get("images") == GIVEN_IMAGES else {}
    config = run.config.replace({"epochs": "auto", "project_within_class": False, **fixed, **(settings or {})})
    _write_parent(out, run)
    if shared_folder(out) != shared_folder(run.folder):
        link_files(shared_folder(run.folder), out)
    finetuned = fit(source, out, preset=config, resume=True, start=initial_tree(run, edits), observer=observer)
    copy_notes(run, finetuned)
    carried = {key: edits[key] for key in ("version", "edits", "excluded") if key in edits}
    write_json(finetuned.folder / EDITS, carried | {"from": run.folder.resolve().name, "finetuned": True})
    return finetuned


def can_finetune(run: Run) -> bool:
    """Tell whether the run's recipe keeps prototypes at their patches while it trains the head."""
    return (run.folder / CONFIG).exists() and run.config.recipe.can_finetune


def check_can_finetune(run: Run) -> None:
    """Refuse a run whose recipe moves prototypes."""
    if not can_finetune(run):
        raise ConfigError(
            "expected a run of a recipe that keeps prototypes in place, such as 'distill'; "
            f"{run.folder.name} has another"
        )


def initial_tree(run: Run, edits: dict[str, Any]) -> ProtoTree:
    """Load the edited tree, each leaf with the class that it is meant to stand for."""
    tree = run.tree()
    classes = leaf_classes(edits, tree)
    if classes is not None:
        tree.leaf_logits.data = one_hot(torch.tensor(classes), tree.n_classes).to(tree.leaf_logits)
    return tree


def copy_notes(run: Run, finetuned: Run) -> None:
    """Copy notes to the nodes with the same patches, since pruning may have removed nodes."""
    tree = finetuned.tree()
    write_json(finetuned.folder / NOTES, notes_by_patch(move_notes(run.notes, run.tree(), tree, _patches), tree))


def _patches(tree: ProtoTree) -> list[Hashable]:
    return [(source.image, source.crop, source.patch) if source is not None else None for source in tree.sources]


def _write_parent(out: Path, run: Run) -> None:
    """Note which tree the new run began with; a folder is only resumed if it began with the same one."""
    path, parent = out / PARENT, {"from": run.folder.resolve().name, "tree": checkpoint.fingerprint(run.tree())}
    if (out / CONFIG).exists() and (not path.exists() or read_json(path) != parent):
        raise ConfigError(f"{out} already holds another run; choose another folder")
    make_folder(out)
    write_json(path, parent)
