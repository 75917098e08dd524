"""Editing a run by hand: edits with undo and redo, a history that is saved, and a new run at the end (§7).

    session = open_session("runs/birds")
    cell = session.bench.locate("images/001.jpg", (60.0, 40.0, 75.0, 55.0))
    session.apply(cell.replaces(5))
    session.apply(Note(5, "black beak"))
    print(session.compare().after.accuracy)
    run = session.save()

**What the figures stand on.** Prototypes and leaves come from the training photos. Feedback after each edit comes from
the data's validation photos or from a folder of one's own; where there are none, from every second test photo. The
other test photos are looked at only when a run is saved: the figure written then is a fair one. The run that editing
began with is never changed.
"""

import contextlib
import os
import shutil
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from prototree import files, locks
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED
from prototree.core.model import ProtoTree
from prototree.data import ImageData
from prototree.data.dataset import Sample
from prototree.data.loading import ViewDataset
from prototree.editing import edits
from prototree.editing.edits import Edit, Exclude, History, read_history
from prototree.editing.figures import Comparison, Figures
from prototree.editing.state import TreeState
from prototree.editing.workbench import Workbench, photo_set, training_set
from prototree.errors import CheckpointError, ConfigError, EditError
from prototree.evaluation.errors import ErrorCollector
from prototree.evaluation.metrics import evaluate_all
from prototree.features.cache import StoredMaps, cache_features, kept_borders, kept_sets
from prototree.features.extract import Tick
from prototree.files import make_folder, read_json, write_file, write_json
from prototree.run import METRICS_VERSION, NOTES, Run

HISTORY, EDITS = "history.json", "edits.json"
OWN_FOLDER = "photos given for validation"  # what feedback that comes from another folder is called
_KEPT_STATES = 16  # for undoing at once; older ones are computed again


@dataclass(frozen=True)
class Snapshot:
    """A session between two changes: read it once, and all of it belongs together, whatever others do meanwhile."""

    history: History
    state: TreeState
    previous: TreeState  # before the last edit, undo or redo


class EditSession:
    """A run being edited. Safe to use from several threads; each change is either complete and saved, or not made.

    Examples:
        >>> session = prototree.open_session("runs/photos")
        >>> nearest = session.workbench.candidates(session.state, 0)  # patches most like prototype 0
        >>> snapshot = session.apply(nearest[1].cell.replaces(0))
        >>> session.revision, session.save("runs/by-hand").folder.name
        (1, 'by-hand')
    """

    def __init__(
        self,
        run: Run,
        data: ImageData,
        workbench: Workbench,
        held_back: Callable[[], StoredMaps | None],
        n_held_back: int,
        work: Path,
        feedback_name: str,
        source: str,
        release: Callable[[], None],
    ) -> None:
        self.run, self.data, self.workbench = run, data, workbench
        self.close = weakref.finalize(self, release)
        """Releases the folder of the session for others; done by itself when nobody uses the session any more."""
        self._held_back, self.n_held_back = held_back, n_held_back
        self.work, self.feedback_name, self.source = work, feedback_name, source  # source: what the data was opened by
        self._lock = threading.RLock()
        self._states: OrderedDict[tuple[Edit, ...], TreeState] = OrderedDict()
        history = read_history(work / HISTORY, checkpoint.fingerprint(workbench.tree))
        state = self._state_of(history.done)
        self.snapshot = Snapshot(history, state, state)

    @cached_property
    def held_back(self) -> StoredMaps | None:
        """Photos that give no feedback. They go through the network when they are first needed, on saving."""
        return self._held_back()

    @property
    def revision(self) -> int:
        """Grows with every change; a change based on another revision is refused."""
        return self.snapshot.history.revision

    @property
    def state(self) -> TreeState:
        return self.snapshot.state

    @property
    def figures(self) -> Figures:
        """Figures of the current tree on the photos for feedback."""
        return self.workbench.figures(self.state)

    def apply(self, edit: Edit, revision: int | None = None) -> Snapshot:
        """Makes an edit; if others edit too, name the revision that the node's number belongs to."""
        return self._change(lambda history: history.add(edit), revision)

    def undo(self, revision: int | None = None) -> Snapshot:
        """Undoes the last edit."""
        return self._change(History.undo, revision)

    def redo(self, revision: int | None = None) -> Snapshot:
        """Makes the last undone edit again."""
        return self._change(History.redo, revision)

    def continue_from(self, revision: int) -> None:
        """Counts revisions from here on, so that those of another run cannot be mistaken for this one's."""
        with self._lock:
            history = replace(self.snapshot.history, revision=max(revision, self.revision))
            self.snapshot = replace(self.snapshot, history=history)

    def compare(self) -> Comparison:
        """The tree before editing, and the current tree."""
        return self.workbench.compare(self.workbench.start, self.state)

    def mistakes(self) -> dict[str, Any]:
        """Wrong answers of the current tree on the photos for feedback, as in errors.json."""
        return _mistakes(self.workbench, self.state.tree, [self.workbench.feedback])

    def save(self, out: str | Path | None = None, revision: int | None = None) -> Run:
        """Writes a new run with the edited tree; by default next to the old one, under the first free name.

        It appears when it is complete: after a kill there is either nothing or all of it.
        """
        with self._lock:
            snapshot = self.snapshot
            snapshot.history.expect(revision)
            folder = Path(out) if out is not None else self.free_name("edited")
            if folder.exists():
                raise EditError(f"expected a new folder to save to, but {folder} exists; choose another name")
            make_folder(folder.parent)
            temporary = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
            shutil.rmtree(temporary, ignore_errors=True)
            try:
                temporary.mkdir()
                self._write(temporary, snapshot)
                os.rename(temporary, folder)
            except OSError as error:
                raise EditError(f"{folder} could not be written ({error.strerror}); nothing was saved") from error
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            files.sync_folder(folder.parent)
            return Run(folder)

    def _change(self, step: Callable[[History], History], revision: int | None) -> Snapshot:
        with self._lock:
            if not self.close.alive:
                raise EditError("this session is closed; open the run again to edit it")
            before = self.snapshot
            before.history.expect(revision)
            history = step(before.history)
            state = self._state_of(history.done)  # fails for an edit that cannot be made, before anything is written
            history.write(self.work / HISTORY)
            self.snapshot = Snapshot(history, state, before.state)
            return self.snapshot

    def _state_of(self, done: tuple[Edit, ...]) -> TreeState:
        """The state after some edits, from the longest beginning of them that is still known."""
        known = next((n for n in range(len(done), 0, -1) if done[:n] in self._states), 0)
        state = self._states[done[:known]] if known else self.workbench.start
        for n in range(known, len(done)):
            state = self.workbench.apply(state, done[n])
            self._states[done[: n + 1]] = state
        while len(self._states) > _KEPT_STATES:
            self._states.popitem(last=False)
        return state

    def free_name(self, kind: str) -> Path:
        """A folder next to the run that does not exist yet."""
        folder = self.run.folder.resolve()
        names = (folder.with_name(f"{folder.name}-{kind}-{number}") for number in range(1, 10_000))
        return next(name for name in names if not name.exists())

    def _write(self, folder: Path, snapshot: Snapshot) -> None:
        tree, config = snapshot.state.tree, self.run.folder / "config.toml"
        if config.exists():
            write_file(folder / config.name, config.read_bytes())
        (folder / PROJECTED).mkdir()
        checkpoint.save(tree, folder / PROJECTED)
        judged_on = self.held_back or self.workbench.feedback
        trees = {"before": self.workbench.start.tree, "after": tree}
        metrics = evaluate_all(trees, judged_on.batches())
        comparison = self.compare()
        write_json(folder / NOTES, {str(node): text for node, text in sorted(snapshot.state.notes.items())})
        sets = [self.workbench.feedback] if self.held_back is None else [self.workbench.feedback, self.held_back]
        write_json(folder / "errors.json", _mistakes(self.workbench, tree, sets))
        editing = {
            "version": 2,
            "from": self.run.folder.resolve().name,
            "edits": [edits.to_json(edit) for edit in snapshot.history.done],
            "excluded": [edits.to_json(exclude) for exclude in snapshot.state.excluded],
            "leaves": snapshot.state.leaf_classes.tolist(),
            "feedback": {
                "photos": self.feedback_name,
                "before": asdict(comparison.before),
                "after": asdict(comparison.after),
            },
            "judged": {
                "photos": "test photos that no feedback came from" if self.held_back else self.feedback_name,
                "before": metrics["before"].accuracy,
                "after": metrics["after"].accuracy,
            },
        }
        write_json(folder / EDITS, editing)
        content = {
            "source": self.source,
            "version": METRICS_VERSION,
            "data": {"kind": self.data.kind, "train": len(self.data.train), "test": len(judged_on)},
            "classes": list(self.data.class_names),
            "stages": {PROJECTED: metrics["after"].to_json()},
        }
        write_json(folder / "metrics.json", content)


def open_session(
    run: str | Path | Run,
    *,
    data: str | Path | None = None,
    validation: str | Path | None = None,
    work: str | Path | None = None,
    tick: Tick | None = None,
) -> EditSession:
    """Opens a run for editing, with the history it has.

    History and feature maps are in `work`, by default `RUN-edits` next to the run. `validation` is a data set whose
    photos all give feedback; without it the data's own validation photos do, or else every second test photo.
    The session holds `work` until it is closed (`EditSession.close`) or no longer used: a second one is refused.

    Examples:
        >>> session = open_session("runs/photos")
        >>> session.revision >= 0, 0 <= session.figures.accuracy["soft"] <= 1
        (True, True)
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    tree, config, source = run.tree(), run.config, data or run.source
    images = run.data(source)
    folder = Path(work) if work is not None else _beside(run.folder)
    if folder.resolve() == run.folder.resolve():
        raise EditError(f"expected a folder for the work other than the run, got {folder}; the run is never changed")
    make_folder(folder)
    release = _hold(folder)
    with contextlib.ExitStack() as undo:
        undo.callback(release)
        # Beside it, runs that were being saved.
        files.remove_leftovers([*folder.rglob(".*"), *folder.parent.glob(".*")])
        feedback, held_back, name = _divided(run, images, validation)
        views = config.recipe.source_views(images)  # that the run's own prototypes come from
        sets = kept_sets(images, views, tree.preprocessing)

        def stored(dataset: ViewDataset, tick: Tick | None = tick) -> StoredMaps:
            kept = kept_borders(tree.features.backbone, dataset, run.folder, sets)
            return cache_features(tree, dataset, folder / "maps", tick, kept)

        edited = read_json(run.folder / EDITS) if (run.folder / EDITS).exists() else {}
        workbench = Workbench(
            tree,
            images.folder,
            stored(training_set(images, tree, views)),
            stored(photo_set(feedback, tree)),
            views,
            project_within_class=config.project_within_class,
            excluded=tuple(
                exclude for exclude in map(edits.from_json, edited.get("excluded", ())) if isinstance(exclude, Exclude)
            ),
            notes={node: text for node, text in run.notes.items() if 0 <= node < tree.topology.n_nodes},
            meant=meant_classes(edited, tree),
        )

        def unseen() -> StoredMaps | None:
            return stored(photo_set(held_back, tree), None) if held_back else None

        session = EditSession(run, images, workbench, unseen, len(held_back), folder, name, str(source), release)
        undo.pop_all()
        return session


def _hold(folder: Path) -> Callable[[], None]:
    """Keep other sessions out of a work folder, so that none overwrites the edits of another."""
    try:
        return locks.hold(folder)
    except ConfigError as error:
        raise EditError(
            f"this run is being edited already: another session or server holds {folder}; end that one, or keep the "
            "edits of this one in another folder (--work FOLDER, or open_session(run, work=FOLDER))"
        ) from error


def meant_classes(editing: Mapping[str, Any], tree: ProtoTree) -> list[int] | None:
    """What edits.json says that the leaves stand for; None where it says nothing, as in earlier versions."""
    leaves = editing.get("leaves")
    if leaves is None:
        return None
    if len(leaves) != tree.topology.n_leaves or not all(label in range(tree.n_classes) for label in leaves):
        raise CheckpointError(
            f"{EDITS} is damaged: expected a class from 0 to {tree.n_classes - 1} for each of the "
            f"{tree.topology.n_leaves} leaves, got {leaves}; restore it from a copy"
        )
    return list(leaves)


def _divided(
    run: Run, images: ImageData, validation: str | Path | None
) -> tuple[Sequence[Sample], Sequence[Sample], str]:
    """The photos that give feedback, those that are held back, and what the former are called."""
    if validation is not None:
        own = run.data(validation)
        return (*own.train, *own.test), images.test, OWN_FOLDER
    name = "the validation photos of the data" if images.validation else "every second test photo"
    return images.feedback, images.kept_back, name


def _mistakes(workbench: Workbench, tree: ProtoTree, sets: Sequence[StoredMaps]) -> dict[str, Any]:
    """As `prototree evaluate` writes them, with the photo's name in place of its place."""
    finder, names = ErrorCollector(tree), list[str]()
    for maps in sets:
        before = len(names)
        names += [workbench.name(entry.sample) for entry in maps.entries]
        for feature_map, labels, places in maps.batches():
            finder.look(feature_map, labels, places + before)
    found = finder.to_json()
    for mistake in found["images"]:
        mistake["image"] = names[mistake["place"]]
    return found


def _beside(folder: Path) -> Path:
    folder = folder.resolve()
    return folder.with_name(f"{folder.name}-edits")
