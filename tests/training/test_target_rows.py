"""A teacher's answers in memory and in a file: the same but for rounding, and nothing is left on the disk."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from prototree.errors import TrainError
from prototree.pipeline.folders import clean
from prototree.training.memory_budget import USUAL_ROOM, Room
from prototree.training.target_rows import TargetRows, target_rows

KNOWN = torch.tensor([0, 1, 2, 4])  # entry 3 could not be read
PROBS = torch.rand(4, 7, generator=torch.Generator().manual_seed(0)).softmax(dim=1)


def filled(folder: Path, room: Room = USUAL_ROOM) -> TargetRows:
    rows = target_rows(5, 7, folder, room)
    rows.put(KNOWN[:3], PROBS[:3])
    rows.put(KNOWN[3:], PROBS[3:])
    return rows.finished()


def test_few_rows_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = filled(tmp_path)
    assert torch.equal(rows[KNOWN], PROBS)
    assert torch.equal(rows[torch.tensor([3])], torch.full((1, 7), 1 / 7))


def test_many_rows_are_kept_in_a_file_without_a_name(tmp_path: Path) -> None:
    rows = filled(tmp_path / "held", Room(0.0))
    assert list((tmp_path / "held").iterdir()) == [], "whatever ends the program, the disk gets its space back"
    some = torch.tensor([4, 0, 0, 2])
    torch.testing.assert_close(rows[some], PROBS[[3, 0, 0, 2]], atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(rows[some].sum(dim=1), torch.ones(4))
    assert torch.equal(rows[torch.tensor([3])], torch.full((1, 7), 1 / 7)), "of which nothing is known"
    assert rows[torch.tensor([], dtype=torch.long)].shape == (0, 7)


def test_too_small_a_disk_is_known_before_hours_are_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=69))
    with pytest.raises(TrainError, match=r"the teacher's answers need 0\.00 GB"):
        target_rows(5, 7, tmp_path, Room(0.0))
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_between_the_making_and_the_opening_is_removed(tmp_path: Path) -> None:
    gone = 2**22 + 1  # no process can have this number
    (tmp_path / "held").mkdir()
    for folder in (tmp_path, tmp_path / "held"):
        (folder / f".targets.{gone}.tmp").write_bytes(b"half")
    clean(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
