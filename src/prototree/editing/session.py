"""Edit a run by hand: undo and redo, a history on disk, and a new run with the edited tree at the end (§7).

Prototypes and leaves come from the training images. Metrics after each edit are computed on validation images: those of
the data, a folder of one's own, or else every second test image. The other test images are used only when a run is
saved, so that the accuracy written then is not one that edits were chosen by. The run itself is never changed.
"""

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prototree import io
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.model import ProtoTree
from prototree.data.crops import FULL_IMAGE, View, evaluation_views
from prototree.data.dataset import Sample
from prototree.data.loader import ViewDataset, Views
from prototree.editing.edits import Edit, Exclude, History, from_json, read_history, to_json
from prototree.editing.workbench import EditMetrics, TreeState, Workbench
from prototree.errors import CheckpointError, ConfigError, EditError
from prototree.evaluation.metrics import ErrorCollector, evaluate_all
from prototree.features.cache import FeatureCache, StoredMaps, cache_tree_features
from prototree.features.extract import Tick
from prototree.run import CONFIG, ERRORS, METRICS, METRICS_VERSION, NOTES, Run, notes_by_patch
from prototree.training.sources import prototype_views

HISTORY, EDITS = "history.json", "edits.json"
GIVEN_IMAGES = "images given for validation"  # what validation images from another folder are called
_EDITS_VERSION = 1
_CACHED_STATES = 16  # for undoing at once; older ones are computed again


def edit(
    run: str | Path | Run,
    *,
    data: str | Path | None = None,
    validation: str | Path | None = None,
    work: str | Path | None = None,
    tick: Tick | None = None,
) -> "EditSession":
    """Open a run for editing, with the history of edits it has. The run itself is never changed.

    The session locks `work` until it is closed (`EditSession.close`) or garbage-collected.

    Args:
        run: A run, or its path.
        data: Data set to use instead of the run's own.
        validation: Data set whose images all judge the edits; by default the data's own validation images, or else
            every second test image.
        work: Folder for history and feature maps; by default `RUN-edits` beside the run.
        tick: Progress callback: how many of how many feature maps are computed.

    Returns:
        The session.

    Raises:
        EditError: Another session or server holds `work`.

    Examples:
        >>> session = edit("runs/photos")
        >>> session.revision >= 0, 0 <= session.metrics.accuracy["soft"] <= 1
        (True, True)
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    folder = run.folder.resolve()
    work = Path(work) if work is not None else folder.with_name(f"{folder.name}-edits")
    if work.resolve() == folder:
        raise EditError(f"expected a folder for the work other than the run, got {work}; the run is never changed")
    return EditSession(run, str(data or run.source), validation, work, tick)


@dataclass(frozen=True)
class Snapshot:
    """Immutable snapshot of a session, consistent under concurrent edits."""

    history: History
    state: TreeState
    previous: TreeState  # before the last edit, undo or redo


class EditSession:
    """Editing session of a run, opened by `edit`. Thread-safe; each change is complete and saved, or not made.

    Attributes:
        run: The run that is edited.
        data: Its data set.
        work: Folder with the history of edits and the feature maps.
        workbench: Finds patches to replace prototypes by, and applies edits.
        snapshot: History and tree at this moment.
        close: Function that unlocks `work`.

    Examples:
        >>> session = prototree.edit("runs/photos")
        >>> nearest = session.workbench.candidates(session.state, 0)  # patches most similar to the root's prototype
        >>> snapshot = session.apply(nearest[1].cell.as_replacement(0))
        >>> session.revision, session.save("runs/by-hand").folder.name
        (1, 'by-hand')
    """

    def __init__(self, run: Run, source: str, validation: str | Path | None, work: Path, tick: Tick | None) -> None:
        self.run, self.source, self.work, self.data, self._tree = run, source, work, run.data(source), run.tree()
        self._lock = threading.RLock()
        self._states: OrderedDict[tuple[Edit, ...], TreeState] = OrderedDict()
        io.make_folder(work)
        try:
            self.close = weakref.finalize(self, io.hold_folder(work))
            """Unlock the work folder; happens by itself when the session is garbage-collected."""
        except ConfigError as error:
            raise EditError(
                f"this run is being edited already: another session or server holds {work}; end that one, or keep the "
                "edits of this one in another folder (--edits-dir FOLDER, or edit(run, work=FOLDER))"
            ) from error
        try:
            io.remove_leftovers([*work.rglob(".*"), *work.parent.glob(".*")])  # of killed sessions
            self.workbench = self._open_workbench(validation, tick)
            history = read_history(work / HISTORY, checkpoint.fingerprint(self._tree))
            state = self._state_after(history.done)
        except BaseException:
            self.close()
            raise
        self.snapshot = Snapshot(history, state, state)

    def _open_workbench(self, given: str | Path | None, tick: Tick | None) -> Workbench:
        tree, data, config, edits = self._tree, self.data, self.run.config, read_edits(self.run)
        samples, self._test_samples = data.validation, data.held_out_test
        name = "the validation images of the data" if data.validation_split else "every second test image"
        if given is not None:
            images = self.run.data(given)
            samples, self._test_samples, name = (*images.train, *images.test), data.test, GIVEN_IMAGES
        self.validation_name, self.n_test = name, len(self._test_samples)
        self._source_views = prototype_views(config.recipe, data)  # that the run's own prototypes come from
        excluded = map(from_json, edits.get("excluded", ()))
        return Workbench(
            tree,
            data.folder,
            self._features(data.train, self._training_views, tick),
            self._features(samples, evaluation_views, tick),
            self._source_views,
            project_within_class=config.project_within_class,
            excluded=tuple(exclude for exclude in excluded if isinstance(exclude, Exclude)),
            notes={row: text for row, text in self.run.notes.items() if 0 <= row < tree.n_prototypes},
            leaf_classes=leaf_classes(edits, tree),
        )

    def _training_views(self, sample: Sample) -> tuple[View, ...]:
        views = tuple(self._source_views(sample))
        return views if FULL_IMAGE in views else (*views, FULL_IMAGE)  # leaves are fitted on full images

    def _features(self, samples: Sequence[Sample], views: Views, tick: Tick | None = None) -> StoredMaps:
        dataset = ViewDataset(samples, views, self._tree.preprocessing)
        kept = FeatureCache(self.run.folder).find(self._tree.features.backbone, dataset)
        return cache_tree_features(self._tree, dataset, self.work / "maps", tick, kept)

    @property
    def validation(self) -> StoredMaps:
        """Feature maps of the images on which edits are evaluated at once."""
        return self.workbench.validation

    @cached_property
    def test(self) -> StoredMaps | None:
        """Feature maps of the held-out test images; computed when they are first needed, on saving."""
        return self._features(self._test_samples, evaluation_views) if self._test_samples else None

    @property
    def revision(self) -> int:
        """Number of changes so far; a change that is based on another revision is refused."""
        return self.snapshot.history.revision

    @property
    def state(self) -> TreeState:
        return self.snapshot.state

    @property
    def metrics(self) -> EditMetrics:
        """Metrics of the current tree on the validation images."""
        return self.workbench.metrics(self.state)

    def apply(self, edit: Edit, revision: int | None = None) -> Snapshot:
        """Apply an edit.

        Args:
            edit: A `Replace`, `Exclude`, `Remove` or `Note` of `prototree.editing.edits`.
            revision: The revision that the node's index belongs to, if others edit too.

        Returns:
            History and tree after the edit.

        Raises:
            EditError: The edit is impossible; nothing was changed.
            ConflictError: The tree has another revision.
        """
        return self._change(lambda history: history.add(edit), revision)

    def undo(self, revision: int | None = None) -> Snapshot:
        """Undo the last edit."""
        return self._change(History.undo, revision)

    def redo(self, revision: int | None = None) -> Snapshot:
        """Apply the last undone edit again."""
        return self._change(History.redo, revision)

    def start_at(self, revision: int) -> None:
        """Count revisions from here, so that those of another run are not mistaken for this one's."""
        with self._lock:
            history = replace(self.snapshot.history, revision=max(revision, self.revision))
            self.snapshot = replace(self.snapshot, history=history)

    def compare(self) -> tuple[EditMetrics, EditMetrics]:
        """Return the metrics of the tree before editing and of the current tree."""
        return self.workbench.metrics(self.workbench.start), self.metrics

    def errors(self, *sets: StoredMaps) -> ErrorCollector:
        """Collect the wrong predictions of the current tree on the validation images, or on these feature maps."""
        collector, offset = ErrorCollector(self.state.tree), 0
        for maps in sets or (self.validation,):
            for feature_map, labels, rows in maps.batches():
                collector.update(feature_map, labels, rows + offset)
            offset += len(maps)
        return collector

    def save(self, out: str | Path | None = None, revision: int | None = None) -> Run:
        """Save the edited tree as a new run. Its folder appears when it is complete.

        Args:
            out: A folder that does not exist; by default `RUN-edited-1`, `RUN-edited-2`, … beside the run.
            revision: Refuse to save if the tree has another revision.

        Returns:
            The new run, with metrics on test images that did not judge the edits, where there are any.
        """
        with self._lock:
            self.snapshot.history.check_revision(revision)
            folder = Path(out) if out is not None else self.free_folder("edited")
            if folder.exists():
                raise EditError(f"expected a new folder to save to, but {folder} exists; choose another name")
            try:
                with io.prepared_beside(folder) as temporary:
                    self._write(temporary / "run")
                    os.rename(temporary / "run", folder)
            except OSError as error:
                raise EditError(f"{folder} could not be written ({error.strerror}); nothing was saved") from error
            io.sync_folder(folder.parent)
            return Run(folder)

    def free_folder(self, kind: str) -> Path:
        """Return a folder beside the run that does not exist yet."""
        folder = self.run.folder.resolve()
        names = (folder.with_name(f"{folder.name}-{kind}-{number}") for number in range(1, 10_000))
        return next(name for name in names if not name.exists())

    def _change(self, step: Callable[[History], History], revision: int | None) -> Snapshot:
        with self._lock:
            if not self.close.alive:
                raise EditError("this session is closed; open the run again to edit it")
            previous = self.snapshot
            previous.history.check_revision(revision)
            history = step(previous.history)
            state = self._state_after(history.done)  # refuses an impossible edit before anything is written
            history.write(self.work / HISTORY)
            self.snapshot = Snapshot(history, state, previous.state)
            return self.snapshot

    def _state_after(self, done: tuple[Edit, ...]) -> TreeState:
        """Return the state after these edits, computed from the longest cached prefix."""
        n_cached = next((n for n in range(len(done), 0, -1) if done[:n] in self._states), 0)
        state = self._states[done[:n_cached]] if n_cached else self.workbench.start
        for n in range(n_cached, len(done)):
            state = self.workbench.apply(state, done[n])
            self._states[done[: n + 1]] = state
        while len(self._states) > _CACHED_STATES:
            self._states.popitem(last=False)
        return state

    def _write(self, folder: Path) -> None:
        state, history, config = self.state, self.snapshot.history, self.run.folder / CONFIG
        sets = [maps for maps in (self.validation, self.test) if maps is not None]
        metrics = evaluate_all({"before": self.workbench.start.tree, "after": state.tree}, sets[-1].batches())
        (before, after), errors = self.compare(), self.errors(*sets).to_json()
        names = [self.workbench.name(entry.sample) for maps in sets for entry in maps.entries]
        for error in errors["images"]:
            error["image"] = names[error["index"]]
        evaluated_on = "test images that were not used for validation" if self.test else self.validation_name
        edits = {
            "version": _EDITS_VERSION,
            "from": self.run.folder.resolve().name,
            "edits": [to_json(edit) for edit in history.done],
            "excluded": [to_json(exclude) for exclude in state.excluded],
            "leaves": state.leaf_classes.tolist(),
            "validation": {"images": self.validation_name, "before": asdict(before), "after": asdict(after)},
            "evaluation": {"images": evaluated_on, **{key: values.accuracy for key, values in metrics.items()}},
        }
        content = {
            "source": self.source,
            "version": METRICS_VERSION,
            "data": {"kind": self.data.kind, "train": len(self.data.train), "test": len(sets[-1])},
            "classes": list(self.data.class_names),
            "stages": {PROJECTED: metrics["after"].to_json()},
        }
        io.make_folder(folder / PROJECTED)
        checkpoint.save(state.tree, folder / PROJECTED)
        if config.exists():
            io.write_file(folder / CONFIG, config.read_bytes())
        io.write_json(folder / NOTES, notes_by_patch(state.notes, state.tree))
        for name, values in ((ERRORS, errors), (EDITS, edits), (METRICS, content)):
            io.write_json(folder / name, values)


def read_edits(run: Run) -> dict[str, Any]:
    """Read edits.json of an edited run; empty for any other run."""
    path = run.folder / EDITS
    return io.expect_version(io.read_json(path), _EDITS_VERSION, path) if path.exists() else {}


def leaf_classes(edits: dict[str, Any], tree: ProtoTree) -> list[int] | None:
    """Return the class that each leaf is meant to stand for, from edits.json; None if it does not say."""
    leaves, n_leaves = edits.get("leaves"), tree.topology.n_leaves
    if leaves is not None and (len(leaves) != n_leaves or not set(leaves) <= set(range(tree.n_classes))):
        raise CheckpointError(
            f"{EDITS} is damaged: expected a class from 0 to {tree.n_classes - 1} for each of the {n_leaves} leaves, "
            f"got {leaves}; restore it from a copy"
        )
    return leaves
