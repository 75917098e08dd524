"""A run is a folder: its configuration, its tree after each stage, metrics, notes, and the data it was made with."""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree import archive
from prototree.config import Config, read_config
from prototree.core import checkpoint
from prototree.core.model import ProtoTree
from prototree.data import ImageData, data_exists, open_data
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.evaluation.schema import METRICS, METRICS_VERSION, read_metrics
from prototree.io import read_json, write_json

log = logging.getLogger(__name__)

__all__ = ["ASSETS", "CONFIG", "ERRORS", "METRICS", "METRICS_VERSION", "NOTES", "RESULTS", "Run"]

CONFIG, NOTES, ERRORS, ASSETS = "config.toml", "notes.json", "errors.json", "assets"
RESULTS = "results.md"  # the last file that a run writes


def run_or_tree_at(given: "str | Path | Run | ProtoTree") -> "Run | ProtoTree":
    """A run or a tree as it is; of a path the run there, or the tree where there is only that."""
    if isinstance(given, Run | ProtoTree):
        return given
    if not isinstance(given, str | Path):
        raise ConfigError(f"expected a run, the path of one, or a tree, got {type(given).__name__}")
    folder = archive.located(given)
    if not folder.exists():
        raise CheckpointError(f"expected the folder of a run or a .prototree file, but {given} does not exist")
    if not any((folder / name).exists() for name in (CONFIG, checkpoint.TREE)) and not checkpoint.last_stage(folder):
        raise CheckpointError(f"expected a run in {given}, but there is neither {CONFIG} nor a tree; train one first")
    return Run(folder) if (folder / CONFIG).exists() else checkpoint.load(folder)


@dataclass(frozen=True)
class Run:
    """Run: the folder of one training with all its results, or a packed tree.

    Attributes:
        folder: The folder.

    Examples:
        >>> run = Run.open("runs/photos")
        >>> run.tree().class_names
        ('bluebird', 'cardinal', 'greenfinch')
        >>> sorted(run.last_metrics["accuracy"])
        ['greedy', 'max_path', 'soft']
    """

    folder: Path

    @classmethod
    def open(cls, folder: "str | Path | Run") -> "Run":
        """Open a run.

        Args:
            folder: The folder of a run, a `.prototree` file, `user/name` on the model hub, or a run.

        Returns:
            The run.

        Raises:
            CheckpointError: There is no run.
        """
        run = folder if isinstance(folder, Run) else cls(archive.located(folder))
        if not (run.folder / CONFIG).exists():
            raise CheckpointError(f"expected a run in {run.folder}, but there is no {CONFIG}; train one first")
        return run

    @property
    def is_packed(self) -> bool:
        """Whether it comes from a file that `pack` made, which cannot be changed."""
        return (self.folder / archive.MANIFEST).exists()

    @property
    def display_name(self) -> str:
        """Its name in messages; for a packed tree not the folder that it was unpacked to."""
        return f"the packed tree {self.folder.name}" if self.is_packed else str(self.folder)

    def check_writable(self) -> "Run":
        """Raise a `ConfigError` if the run is packed and so cannot be changed; return the run."""
        if self.is_packed:
            raise ConfigError(
                f"{self.folder.name} is a packed tree, which can be used but not changed; use the "
                "folder of the run it was packed from"
            )
        return self

    def tree(self, stage: str | None = None) -> ProtoTree:
        """Load a tree.

        Args:
            stage: trained, pruned or projected; by default the last one.

        Returns:
            The tree, in evaluation mode.
        """
        if stage is None and checkpoint.last_stage(self.folder) is None:
            raise CheckpointError(
                f"expected a trained tree in {self.display_name}, but its training is not finished; continue it with "
                "its command and --resume"
            )
        return checkpoint.load(self.folder / (stage or ""))

    @property
    def config(self) -> Config:
        """The settings it was made with; the defaults if the folder does not say."""
        path = self.folder / CONFIG
        return read_config(path) if path.exists() else Config()

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; empty before the first evaluation.

        Those of a packed tree lack `source`: the path of its data belongs to another machine.
        """
        metrics = read_metrics(self.folder)
        return {key: value for key, value in metrics.items() if key != "source"} if self.is_packed else metrics

    @property
    def last_metrics(self) -> Mapping[str, Any]:
        """The metrics of the last stage that was evaluated; empty before."""
        stages = self.metrics.get("stages", {})
        metrics: Mapping[str, Any] = next((stages[stage] for stage in checkpoint.STAGES if stage in stages), {})
        return metrics

    @property
    def source(self) -> str:
        """The path or name from which the run's data was opened."""
        source = self.metrics.get("source")
        if source is None:
            raise DataError(f"{self.display_name} does not say which data it was made with; name it with --data")
        return str(source)

    @property
    def notes(self) -> dict[int, str]:
        """The user's words about patches, by the row of the prototype: the content of notes.json.

        The file has patches by their names, such as 7, or 7L and 7R of a node that compares two.
        """
        path = self.folder / NOTES
        try:
            content = read_json(path, by_hand=True) if path.exists() else {}
            n_nodes = self._n_nodes() if content else 0
            return {_row(patch, n_nodes): str(text) for patch, text in content.items()}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}); expected texts by patches such as 7L") from error

    def _n_nodes(self) -> int:
        tree = self.folder / (checkpoint.last_stage(self.folder) or "") / checkpoint.TREE
        return len(read_json(tree)["topology"]["left"])

    def prototype_quality(self, tree: ProtoTree) -> Mapping[str, Any]:
        """Return what `evaluate --prototypes` found, if it was for exactly this tree; else nothing."""
        quality = self.metrics.get("prototype_quality", {})
        return quality if quality.get("tree") == checkpoint.fingerprint(tree) else {}

    def update_metrics(self, **values: Any) -> None:
        """Add values to metrics.json."""
        write_json(self.folder / METRICS, {**self.metrics, **values})

    def data(self, source: str | Path | None = None) -> ImageData:
        """Open the data that the run was made with, or other data with the same classes.

        Args:
            source: Other data than the run's own.

        Returns:
            The data set.

        Raises:
            DataError: The data is not here, or has other classes than the tree.
        """
        source, config = source or self.source, self.config
        fold = config.fold if str(source) == self.metrics.get("source") else ""  # other data is not divided
        data = open_data(source, test_fraction=config.test_fraction, strict=config.fail_on_bad_images, fold=fold)
        if data.class_names != self.tree().class_names:
            raise DataError(f"expected the classes of the run in {source}, got others; name the data it was made with")
        return data

    def data_or_none(self) -> ImageData | None:
        """Open the data that the run was made with; None if it is not on this machine."""
        if "source" not in self.metrics:
            return None
        try:
            return self.data()
        except DataError as error:
            log.warning("going on without the training data: %s", error)
            return None

    @property
    def has_data(self) -> bool:
        """Whether the run's data can be opened on this machine; its photos are not checked."""
        return "source" in self.metrics and data_exists(self.source)


def _row(patch: str, n_nodes: int) -> int:
    """Look up the row of a patch; that of a left one begins after all right ones."""
    node = int(patch.removesuffix("L").removesuffix("R")) - 1
    return node + n_nodes if patch.endswith("L") else node


def move_notes(
    notes: Mapping[int, str], before: ProtoTree, after: ProtoTree, identify: Callable[[ProtoTree], Sequence[Hashable]]
) -> dict[int, str]:
    """Give the notes of a tree to another with other nodes, where side and prototypes of a node are the same."""

    def keys(tree: ProtoTree) -> list[Hashable]:
        own, n_nodes = identify(tree), tree.topology.n_nodes
        return [(row // n_nodes, *own[row % n_nodes :: n_nodes]) for row in range(tree.n_prototypes)]

    named = {key: notes[row] for row, key in enumerate(keys(before)) if row in notes}
    return {row: named[key] for row, key in enumerate(keys(after)) if key in named}


def notes_by_patch(notes: Mapping[int, str], tree: ProtoTree) -> dict[str, str]:
    """Name the patches of notes, as notes.json has them; in the order of the questions."""
    rows = sorted((row for row in notes if 0 <= row < tree.n_prototypes), key=tree.node_of)
    return {tree.patch_name(row): notes[row] for row in rows}
