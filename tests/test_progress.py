"""What is printed of a run where there is no terminal."""

import contextlib
import io
import signal

import pytest
from rich.console import Console

from prototree import progress
from prototree.backbones.inference import thread_map
from prototree.progress import Display, EpochLog


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed; tests turn it on by hand."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_time_left_is_that_of_the_epoch_or_of_the_stage(clock: list[float]) -> None:
    said = io.StringIO()
    with Display(Console(file=said)) as display:
        display.stage("training")
        for epoch in range(2):
            for batch in range(4):
                clock[0] += 40
                display.batch(epoch, batch, 4, 1.0, 0.5, 10.0)
            display.epoch(EpochLog(epoch + 1, 1.0, 0.5, 10.0, 160.0, ""), 3)
        display.stage("evaluating")
        clock[0] += 40
        display.counting("photos", 1, 3)
    lines = said.getvalue().splitlines()
    assert [line.split()[-2] for line in lines if "epoch 2: " in line] == ["2:00", "1:20", "0:40", "0:00"]
    assert [line.split()[-2] for line in lines if "/3 " in line] == ["5:20", "2:40", "1:20"]


def test_a_second_count_in_a_stage_has_its_own_rate_and_time_left(clock: list[float]) -> None:
    said = io.StringIO()
    with Display(Console(file=said)) as display:
        display.stage("computing feature maps")
        clock[0] += 1000
        display.caching(1000, 1000)
        clock[0] += 40
        display.caching(80, 240)
    assert said.getvalue().splitlines()[-1] == "  views: 80/240  2/s  1:20 left"


def test_a_line_in_a_file_stays_one_line_and_nothing_in_it_is_markup() -> None:
    said, text = io.StringIO(), "looking at photos[red] " + "again and " * 12 + "again"
    with Display(Console(file=said, width=60)) as display:
        display.stage(text)
    assert said.getvalue() == f"• {text}\n"


@pytest.mark.parametrize(
    ("environment", "is_shown"),
    [
        ({"RANK": "abc"}, True),
        ({"RANK": "1"}, True),  # set by something else than torchrun: one process is always heard
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
    ],
)
def test_only_the_first_of_several_processes_talks(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_shown: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    said = io.StringIO()
    with Display(Console(file=said)) as display:
        display.stage("training")
    assert bool(said.getvalue()) == is_shown


def test_a_termination_that_was_lost_ends_the_next_step() -> None:
    with progress.sigterm_as_sigint():
        with contextlib.suppress(KeyboardInterrupt):  # as a library does that calls back
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            list(thread_map(str, range(3)))
    assert list(thread_map(str, range(3))) == ["0", "1", "2"], "the next block begins anew"
