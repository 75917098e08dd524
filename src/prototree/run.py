"""A run is a folder: its configuration, its tree after each stage, metrics, notes, and the data it was made with."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prototree.config import Config, read_config
from prototree.data import ImageData, open_data
from prototree.errors import CheckpointError, DataError
from prototree.files import expect_version, read_json, write_json
from prototree.training import distributed
from prototree.tree import checkpoint
from prototree.tree.model import ProtoTree

log = logging.getLogger(__name__)

METRICS_VERSION = 2
"""1: the whole confusion matrix, where there are now only the pairs that occur."""

CONFIG, METRICS, NOTES, MISTAKES, PICTURES = "config.toml", "metrics.json", "notes.json", "mistakes.json", "prototypes"


@dataclass(frozen=True)
class Run:
    """A folder of results.

    >>> run = Run.open("runs/birds")
    >>> run.tree().predict(images)
    """

    folder: Path

    @classmethod
    def open(cls, folder: "str | Path | Run") -> "Run":
        """The run in a folder, or an error that says that there is none."""
        run = folder if isinstance(folder, Run) else cls(Path(folder))
        if not (run.folder / CONFIG).exists():
            raise CheckpointError(f"expected a run in {run.folder}, but there is no {CONFIG}; train one first")
        return run

    def tree(self, stage: str | None = None) -> ProtoTree:
        """The tree after a stage; by default the last one there is."""
        if stage is None and checkpoint.last_stage(self.folder) is None:
            raise CheckpointError(f"expected a run with a trained tree in {self.folder}, found none; train one first")
        return checkpoint.load(self.folder / (stage or ""))

    @property
    def config(self) -> Config:
        """What it was made with; the defaults where the folder does not say."""
        path = self.folder / CONFIG
        return read_config(path) if path.exists() else Config()

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; empty before the first evaluation."""
        return expect_version(self._read(METRICS), METRICS_VERSION, self.folder / METRICS)

    @property
    def last_metrics(self) -> Mapping[str, Any]:
        """The metrics of the last stage that was evaluated; empty before."""
        stages = self.metrics.get("stages", {})
        return next((stages[stage] for stage in checkpoint.STAGES if stage in stages), {})

    @property
    def source(self) -> str:
        """What the data that the run was made with was opened by."""
        source = self.metrics.get("source")
        if source is None:
            raise DataError(f"{self.folder} does not say which data it was made with; name it with --data")
        return str(source)

    @property
    def notes(self) -> dict[int, str]:
        """The user's words about prototypes, by node: the content of notes.json."""
        try:
            return {int(node): str(text) for node, text in self._read(NOTES).items()}
        except ValueError as error:
            path = self.folder / NOTES
            raise CheckpointError(f"{path} is damaged ({error}); expected node numbers and texts") from error

    def note(self, **values: Any) -> None:
        """Adds to metrics.json."""
        if distributed.is_first():
            write_json(self.folder / METRICS, {**self.metrics, **values})

    def data(self, source: str | Path | None = None) -> ImageData:
        """The data that the run was made with, or other data with the same classes."""
        source = source or self.source
        return self._with_own_classes(self._open_data(source), source)

    def data_if_here(self) -> ImageData | None:
        """The data that the run was made with, or None where it is not on this machine."""
        if "source" not in self.metrics:
            return None
        try:
            data = self._open_data(self.source)
        except DataError as error:
            log.warning("going on without the training data: %s", error)
            return None
        return self._with_own_classes(data, self.source)

    def _open_data(self, source: str | Path) -> ImageData:
        config = self.config
        with distributed.one_after_the_other():  # the first may have to draw or to scan it
            return open_data(source, test_share=config.test_share, strict=config.strict)

    def _with_own_classes(self, data: ImageData, source: str | Path) -> ImageData:
        if data.class_names != self.tree().class_names:
            raise DataError(
                f"expected the classes of the run in {source}, got others; choose the data it was made with"
            )
        return data

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_json(path) if path.exists() else {}
