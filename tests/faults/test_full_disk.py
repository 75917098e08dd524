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

SETTINGS = {**TINY, "feature_level": -2, "epochs": 1, "height": 2, "prune_threshold": 0.3}
FULL_DISK, READ_ONLY = (28, "No space left on device"), (30, "Read-only file system")


@contextmanager
def failing(below: Path, passing: int, error: tuple[int, str] = FULL_DISK) -> Iterator[None]:
    """Let so many writes pass; the next ones fail, all of them, as on a disk that stays full."""

    def guarded(real: Callable[..., Any], is_write: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            nonlocal passing
            if is_write(*args, **options) and (isinstance(path, int) or str(path).startswith(str(below))):
                passing -= 1
                if passing < 0:
                    raise OSError(*error, None if isinstance(path, int) else str(path))
            return real(path, *args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", guarded(open, lambda mode="r", *_, **__: bool(set(mode) & set("wax+"))))
        for name in ("fsync", "replace", "mkdir", "posix_fallocate", "rename"):
            patch.setattr(os, name, guarded(getattr(os, name)))
        yield


def every_failure(
    below: Path, work: Callable[[], object], check: Callable[[], None], error: tuple[int, str], step: int = 1
) -> int:
    """Fail at the first write, then `step` later and so on; return how many writes pass before the work does."""
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
    ("stage", "error", "step"),
    [
        ("prune", FULL_DISK, 3),
        *(
            pytest.param(stage, error, 1, marks=pytest.mark.slow)
            for stage in ("prune", "project", "evaluate")
            for error in (FULL_DISK, READ_ONLY)
        ),
    ],
)
def test_a_stage_that_cannot_write_leaves_every_tree_as_it_was(
    trained: Path, tmp_path: Path, stage: str, error: tuple[int, str], step: int
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

    assert every_failure(run, lambda: rerun(run, stage), check, error, step) >= 3


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_editing_on_a_full_disk_loses_no_edit(tmp_path: Path, step: int) -> None:
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

    every_failure(tmp_path, lambda: session.apply(Note(0, "second")), check, FULL_DISK, step)
    assert session.state.notes == {0: "second"}
    session.undo()
    files = content_of(work)
    every_failure(tmp_path, session.save, check, FULL_DISK, step)
    assert len(list(tmp_path.glob("run-edited*"))) == 1


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_report_and_the_display_on_a_full_disk(tmp_path: Path, step: int) -> None:
    explanation, out = explain_tree(tiny_run(tmp_path), nearest=1), tmp_path / "out"
    every_failure(out, lambda: report(explanation, out), lambda: None, FULL_DISK, step)
    with failing(tmp_path, 0), Display(Console(quiet=True), tmp_path / "tensorboard") as display:
        display.stage("goes on without TensorBoard")
    assert not (tmp_path / "tensorboard").exists(), "nothing is made before there is something to write"
