"""A run is a folder: its configuration, its tree after each stage, metrics, notes, and the data it was made with."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree.config import Config, read_config
from prototree.core import archive, checkpoint
from prototree.core.model import ProtoTree
from prototree.data import ImageData, is_here, open_data
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.evaluation.schema import METRICS, METRICS_VERSION, read_metrics
from prototree.files import read_json, write_json
from prototree.training import distributed

log = logging.getLogger(__name__)

__all__ = ["CONFIG", "ERRORS", "METRICS", "METRICS_VERSION", "NOTES", "PICTURES", "RESULTS", "Run"]

CONFIG, NOTES, ERRORS, PICTURES = "config.toml", "notes.json", "errors.json", "prototypes"
RESULTS = "results.md"  # the last file that a run writes


def run_or_tree_at(given: "str | Path | Run | ProtoTree") -> "Run | ProtoTree":
    """A run or a tree as it is; of a path the run there, or the tree where there is only that."""
    if isinstance(given, Run | ProtoTree):
        return given
    if not isinstance(given, str | Path):
        raise ConfigError(f"expected a run, the path of one, or a tree, got {type(given).__name__}")
    folder = checkpoint.located(given)
    return Run(folder) if (folder / CONFIG).exists() else checkpoint.load(folder)


@dataclass(frozen=True)
class Run:
    """The folder of one training with all its results, or a packed tree.

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
        """The run in a folder, in a file that `pack` made or, as `user/name`, on the model hub; or an error."""
        run = folder if isinstance(folder, Run) else cls(checkpoint.located(folder))
        if not (run.folder / CONFIG).exists():
            raise CheckpointError(f"expected a run in {run.folder}, but there is no {CONFIG}; train one first")
        return run

    @property
    def is_packed(self) -> bool:
        """Whether it comes from a file that `pack` made, which cannot be changed."""
        return (self.folder / archive.MARK).exists()

    @property
    def called(self) -> str:
        """Its name in messages; for a packed tree not the folder that it was unpacked to."""
        return f"the packed tree {self.folder.name}" if self.is_packed else str(self.folder)

    def expect_changeable(self) -> "Run":
        """Raises an error if the run is packed and so cannot be changed."""
        if self.is_packed:
            raise ConfigError(
                f"{self.folder.name} is a packed tree, which can be asked and looked at but not changed; use the "
                "folder of the run it was packed from"
            )
        return self

    def tree(self, stage: str | None = None) -> ProtoTree:
        """The tree after a stage; by default after the last one."""
        if stage is None and checkpoint.last_stage(self.folder) is None:
            raise CheckpointError(f"expected a run with a trained tree in {self.called}, found none; train one first")
        return checkpoint.load(self.folder / (stage or ""))

    @property
    def config(self) -> Config:
        """The settings it was made with; the defaults if the folder does not say."""
        path = self.folder / CONFIG
        return read_config(path) if path.exists() else Config()

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; empty before the first evaluation.

        A packed tree has no data here, whatever its maker wrote: no folder of this machine is opened by its word.
        """
        found = read_metrics(self.folder)
        return {key: value for key, value in found.items() if key != "source"} if self.is_packed else found

    @property
    def last_metrics(self) -> Mapping[str, Any]:
        """The metrics of the last stage that was evaluated; empty before."""
        stages = self.metrics.get("stages", {})
        found: Mapping[str, Any] = next((stages[stage] for stage in checkpoint.STAGES if stage in stages), {})
        return found

    @property
    def source(self) -> str:
        """The path or name from which the run's data was opened."""
        source = self.metrics.get("source")
        if source is None:
            raise DataError(f"{self.called} does not say which data it was made with; name it with --data")
        return str(source)

    @property
    def notes(self) -> dict[int, str]:
        """The user's words about prototypes, by node: the content of notes.json."""
        try:
            content = read_json(path, by_hand=True) if (path := self.folder / NOTES).exists() else {}
            return {int(node): str(text) for node, text in content.items()}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}); expected node numbers and texts") from error

    def part_figures(self, tree: ProtoTree) -> Mapping[str, Any]:
        """What `evaluate --parts` found, if it was for exactly this tree; else empty."""
        found = self.metrics.get("parts", {})
        return found if found.get("tree") == checkpoint.fingerprint(tree) else {}

    def note(self, **values: Any) -> None:
        """Adds to metrics.json."""
        if distributed.is_first():
            write_json(self.folder / METRICS, {**self.metrics, **values})

    def data(self, source: str | Path | None = None) -> ImageData:
        """The data that the run was made with, or other data with the same classes."""
        source = source or self.source
        return self._with_own_classes(self._open_data(source), source)

    def data_if_here(self) -> ImageData | None:
        """The data that the run was made with, or None if it is not on this machine."""
        if "source" not in self.metrics:
            return None
        try:
            return self.data()
        except DataError as error:
            log.warning("going on without the training data: %s", error)
            return None

    @property
    def data_is_here(self) -> bool:
        """Whether the run's data can be opened on this machine; its photos are not checked."""
        return "source" in self.metrics and is_here(self.source)

    def _open_data(self, source: str | Path) -> ImageData:
        config = self.config
        fold = config.fold if str(source) == self.metrics.get("source") else ""  # other data is not divided
        with distributed.one_after_the_other():  # the first may have to draw or to scan it
            return open_data(source, test_fraction=config.test_fraction, strict=config.strict, fold=fold)

    def _with_own_classes(self, data: ImageData, source: str | Path) -> ImageData:
        if data.class_names != self.tree().class_names:
            raise DataError(
                f"expected the classes of the run in {source}, got others; choose the data it was made with"
            )
        return data
