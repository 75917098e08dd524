"""Work in a process beside: it has one of two threads, ends with its parent, and changes no bit of what comes out."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from killed_runs import content, differences
from prototree import fit
from prototree.training.beside import beside, is_possible
from tiny_training import TINY_DISTILL, write_squares

CPU = torch.device("cpu")
FEW = TINY_DISTILL | {"pretrain_epochs": 0, "head_epochs": 3, "epochs": 2, "hold_out": 2}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="one after the other elsewhere")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_both_have_one_of_two_threads(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "seen").write_text(f"{torch.get_num_threads()} {os.getpid()}")

    with beside(work, CPU) as wait:
        assert torch.get_num_threads() == 1
        wait()
        threads, process = (tmp_path / "seen").read_text().split()
    assert threads == "1"
    assert process != str(os.getpid())
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("threads", "expected"), [(1, False), (2, True), (4, False)])
def test_only_two_threads_are_divided(threads: int, expected: bool) -> None:
    torch.set_num_threads(threads)
    assert is_possible(CPU) == expected


def test_with_one_thread_nothing_is_done_beside(tmp_path: Path) -> None:
    assert not is_possible(CPU)
    with beside((tmp_path / "seen").touch, CPU) as wait:
        wait()
    assert not (tmp_path / "seen").exists()


@pytest.mark.usefixtures("two_threads")
def test_what_fails_beside_is_left_to_the_parent(capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise ValueError("broken")

    with beside(work, CPU) as wait:
        wait()
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("two_threads")
def test_an_error_within_ends_the_work(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        time.sleep(600)

    def fail_when_it_works() -> None:
        with beside(work, CPU):
            _wait_for(tmp_path / "process")
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail_when_it_works()
    assert not _is_alive(int((tmp_path / "process").read_text()))


def test_the_work_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, time, torch
from pathlib import Path
from prototree.training.beside import beside
torch.set_num_threads(2)
def work():
    Path({str(tmp_path / "process")!r}).write_text(str(os.getpid()))
    time.sleep(600)
    Path({str(tmp_path / "ended")!r}).touch()
with beside(work, torch.device("cpu")):
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    _wait_for(tmp_path / "process")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    child = int((tmp_path / "process").read_text())
    while _is_alive(child):
        time.sleep(0.05)
    assert not (tmp_path / "ended").exists(), "it was ended, and did not come to its own end"


@pytest.mark.usefixtures("two_threads")
def test_side_by_side_and_one_after_the_other_are_the_same_run(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=14, test=1)
    fit(photos, tmp_path / "a" / "run", settings=FEW, stages=["train"])
    torch.set_num_threads(1)
    fit(photos, tmp_path / "b" / "run", settings=FEW, stages=["train"])
    two, one = (content(tmp_path / name / "run") for name in "ab")
    assert differences(two, one) == []


def _wait_for(path: Path) -> None:
    while not (path.exists() and path.read_text()):
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return state != "Z"
