"""A disk that is full, or a folder that is read-only, at every single write: nothing that was there is lost."""

import builtins
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from prototree.core import checkpoint
from prototree.editing.edits import Note, read_history
from prototree.editing.session import HISTORY, edit
from prototree.errors import ProtoTreeError
from prototree.explanation.tree import explain_tree
from prototree.pipeline.fit import fit, rerun
from prototree.progress import Display
from prototree.reporting.export import report
from prototree.run import Run
from tiny_editing import content_of, same_tree, tiny_run
from tiny_training import TINY, write_squares

SETTINGS = {
    **TINY,
    "backbone": "test_efficientnet",
    "feature_level": -2,
    "epochs": 1,
    "height": 2,
    "prune_threshold": 0.3,
}
FULL_DISK, READ_ONLY = (28, "No space left on device"), (30, "Read-only file system")


class Disk:
    """Lets so many writes pass; the next ones fail, all of them, as on a disk that stays full."""

    def __init__(self, below: Path, passing: int, error: tuple[int, str]) -> None:
        self._below, self._passing, self._error = str(below), passing, error

    def write(self, path: Any) -> None:
        if not isinstance(path, int) and not str(path).startswith(self._below):
            return
        self._passing -= 1
        if self._passing < 0:
            raise OSError(*self._error, None if isinstance(path, int) else str(path))


@contextmanager
def failing(below: Path, passing: int, error: tuple[int, str] = FULL_DISK) -> Iterator[None]:
    disk = Disk(below, passing, error)

    def guarded(real: Callable[..., Any], is_write: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if is_write(*args, **options):
                disk.write(path)
            return real(path, *args, **options)

        return call

    def opens_to_write(mode: str = "r", *_: Any, **__: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", guarded(open, opens_to_write))
        for name in ("fsync", "replace", "mkdir", "posix_fallocate", "rename"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        yield


def every_failure(
    below: Path, work: Callable[[], None], check: Callable[[], None], error: tuple[int, str], step: int = 1
) -> int:
    """Fails at the first write, at the second (or `step` later), and so on, until the work gets through.

    Returns how many writes pass before the work does: with a step of 1, how many times it failed.
    """
    for passing in range(0, 500, step):
        with failing(below, passing, error):
            try:
                work()
            except (ProtoTreeError, OSError) as problem:
                if not isinstance(problem, ProtoTreeError) and problem.strerror != error[1]:
                    raise
            else:
                return passing  # but perhaps for the last sync of a folder, which is no loss
        check()
    raise AssertionError("it never got through")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        fit(write_squares(folder / "squares", 4, 2), folder / "run", settings=SETTINGS)
    return folder / "run"


@pytest.mark.usefixtures("with_plots")
@pytest.mark.parametrize(
    "error", [FULL_DISK, pytest.param(READ_ONLY, marks=pytest.mark.slow)], ids=["full", "read-only"]
)
@pytest.mark.parametrize(
    "stage",
    ["prune", pytest.param("project", marks=pytest.mark.slow), pytest.param("evaluate", marks=pytest.mark.slow)],
)
def test_a_stage_that_cannot_write_leaves_every_tree_as_it_was(
    trained: Path, tmp_path: Path, stage: str, error: tuple[int, str], record_property: Callable[[str, object], None]
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    before = {name: checkpoint.load(run / name) for name in checkpoint.STAGES}
    files = {name: content_of(run / name) for name in before}

    def check() -> None:
        """Each tree is the old one, mostly to the byte; the stage's own may be the new one, which is the same."""
        for name, tree in before.items():
            if content_of(run / name) == files[name]:
                continue
            if stage == "prune" and name == "projected" and not (run / name).exists():
                assert same_tree(Run(run).tree("pruned"), before["pruned"])  # dropped only after pruned was saved
                shutil.copytree(trained / name, run / name)
            assert same_tree(checkpoint.load(run / name), tree)

    failures = every_failure(run, lambda: rerun(run, stage) and None, check, error)
    assert failures >= 3
    record_property("counted", f"{stage}: {failures} writes failed one by one ({error[1]}), no tree lost")


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_editing_on_a_full_disk_loses_no_edit(
    tmp_path: Path, step: int, record_property: Callable[[str, object], None]
) -> None:
    run, work = tiny_run(tmp_path), tmp_path / "work"
    session = edit(run, work=work)
    session.apply(Note(0, "first"))
    origin = session.snapshot.history.origin
    files = content_of(work)

    def check() -> None:
        assert session.state.notes == {0: "first"}
        if content_of(work) != files:
            assert read_history(work / HISTORY, origin).done == (Note(0, "first"),)
        assert not list(tmp_path.glob("run-edited*")), "half a run"

    failures = every_failure(tmp_path, lambda: session.apply(Note(0, "second")) and None, check, FULL_DISK, step)
    assert session.state.notes == {0: "second"}
    session.undo()
    files = content_of(work)
    failures += every_failure(tmp_path, lambda: session.save() and None, check, FULL_DISK, step)
    assert len(list(tmp_path.glob("run-edited*"))) == 1
    record_property("counted", f"editing: every {step}. of {failures} writes failed, no edit lost, no half run")


def test_a_report_and_the_display_on_a_full_disk(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = tiny_run(tmp_path)
    explanation = explain_tree(run, nearest=1)
    failures = every_failure(
        tmp_path / "out", lambda: report(explanation, tmp_path / "out") and None, lambda: None, FULL_DISK
    )
    record_property("counted", f"report: {failures} writes failed one by one, each one clear error")
    with failing(tmp_path, 0), Display(Console(quiet=True), tmp_path / "tensorboard") as display:
        display.stage("goes on without TensorBoard")
    assert not (tmp_path / "tensorboard").exists(), "nothing is made before there is something to write"
