"""A teacher's probabilities for every entry of the data: in memory while they are few, else in a file.

The file holds 16-bit numbers, is filled batch by batch, and has no name once every process has opened it: whatever ends
the program, the disk gets its space back. A training that is continued asks the teacher again.

Notation used for tensor shapes: B batch, K classes.
"""

import contextlib
import os
import shutil
import weakref
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.errors import TrainError
from prototree.files import make_folder
from prototree.training import distributed
from prototree.training.memory_budget import USUAL_ROOM, Room


@runtime_checkable
class TargetRows(Protocol):
    """Class probabilities by entry; of photos that cannot be read nothing is known, which is: all alike."""

    def __getitem__(self, entries: Int[Tensor, " B"]) -> Float[Tensor, "B K"]: ...


@runtime_checkable
class Filling(Protocol):
    """Rows that are being filled, by every process its own."""

    def put(self, entries: Int[Tensor, " B"], probs: Float[Tensor, "B K"]) -> None: ...
    def finished(self) -> TargetRows: ...


def target_rows(n_entries: int, n_classes: int, folder: Path, room: Room = USUAL_ROOM) -> Filling:
    """A place for so many rows; a file lies in `folder`."""
    if n_entries * n_classes <= room.targets:
        return _InMemory(n_entries, n_classes)
    return _InFile(n_entries, n_classes, folder)


class _InMemory:
    def __init__(self, n_entries: int, n_classes: int) -> None:
        self._rows = torch.zeros(n_entries, n_classes)

    def put(self, entries: Int[Tensor, " B"], probs: Float[Tensor, "B K"]) -> None:
        self._rows[entries] = probs

    def finished(self) -> TargetRows:
        rows = distributed.sum_over(self._rows)
        rows[rows.sum(dim=1) == 0] = 1 / rows.shape[1]
        return rows


class _InFile:
    def __init__(self, n_entries: int, n_classes: int, folder: Path) -> None:
        self._shape, self._row_bytes = (n_entries, n_classes), 2 * n_classes
        self._file = self._opened(folder)
        weakref.finalize(self, os.close, self._file)

    def put(self, entries: Int[Tensor, " B"], probs: Float[Tensor, "B K"]) -> None:
        for entry, row in zip(entries.tolist(), probs.half().numpy(), strict=True):
            os.pwrite(self._file, row.tobytes(), entry * self._row_bytes)

    def finished(self) -> TargetRows:
        if distributed.shard().world_size > 1:
            os.fsync(self._file)  # for processes on other machines
        distributed.wait_for_all()
        return self

    def __getitem__(self, entries: Int[Tensor, " B"]) -> Float[Tensor, "B K"]:
        places = (entry * self._row_bytes for entry in entries.tolist())
        read = b"".join(os.pread(self._file, self._row_bytes, place) for place in places)
        rows = torch.from_numpy(np.frombuffer(bytearray(read), np.float16).reshape(-1, self._shape[1]))
        rows = rows.to(torch.get_default_dtype())
        total = rows.sum(dim=1, keepdim=True)  # 1 but for rounding
        return torch.where(total > 0, rows / total, 1 / self._shape[1])

    def _opened(self, folder: Path) -> int:
        """By all processes; then its name goes. What a kill in between leaves is known by its name."""
        path = folder / f".targets.{distributed.lengths(os.getpid())[0]}.tmp"
        if distributed.is_first():
            make_folder(folder)
            _reserve(path, self._shape[0] * self._row_bytes)
        distributed.wait_for_all()
        file = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        distributed.wait_for_all()
        if distributed.is_first():
            with contextlib.suppress(PermissionError):  # where an open file keeps its name
                path.unlink()
        return file


def _reserve(path: Path, size: int) -> None:
    """An empty file, if there is room for it: better now than after hours."""
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise TrainError(
            f"the teacher's answers need {size / 1e9:.2f} GB in {path.parent}, {free / 1e9:.2f} GB are free; "
            "free some, or train with fewer views"
        )
    with open(path, "wb") as file:
        file.truncate(size)
