"""How a run reports its progress, and how it is shown: a live display, plain lines, TensorBoard. No torch here."""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 30.0


@dataclass(frozen=True)
class EpochLog:
    """One row of log.csv."""

    epoch: int  # from 1
    loss: float
    accuracy: float
    images_per_second: float
    seconds: float
    rates: str


class Observer:
    """Hears of every step of a run; does nothing by itself."""

    def stage(self, text: str) -> None:
        """A stage begins, or has something to say."""

    def caching(self, done: int, total: int) -> None:
        """How many of how many photos have gone through the network."""

    def batch(self, epoch: int, batch: int, n_batches: int, loss: float, accuracy: float, rate: float) -> None:
        """After every batch: means of the epoch so far and images per second."""

    def epoch(self, row: EpochLog, n_epochs: int) -> None:
        """After every epoch."""


class Display(Observer):
    """Shows stages, batches and epochs; use it as a context manager."""

    def __init__(self, console: Console, tensorboard: Path | None = None) -> None:
        first = is_first()
        self._console = console if first else Console(quiet=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[counted]}"),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._tensorboard = tensorboard if first else None
        self._writer: Any | None = None
        self._started = self._last_line = self._last_step = self._begun = time.monotonic()
        self._counting: tuple[str, int | None] = ("", None)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        if self._writer is not None:
            with contextlib.suppress(OSError):  # the figures are in log.csv too
                self._writer.close()

    def stage(self, text: str) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
        # A file has no width: the text stays one line there.
        whole = not self._console.is_terminal
        self._console.print(Text.assemble(("•", "bold"), f" {text}"), highlight=False, soft_wrap=whole)
        self._started = self._last_step = time.monotonic()
        self._counting = ("", None)

    def caching(self, done: int, total: int) -> None:
        self.counting("views", done, total)

    def counting(self, what: str, done: int, total: int | None) -> None:
        """How many of how many things are done; None if it is unknown how many there are."""
        self._count(what, total)
        self._show(what, done, total, f"{done / max(time.monotonic() - self._begun, 1e-9):.0f}/s")

    def batch(self, epoch: int, batch: int, n_batches: int, loss: float, accuracy: float, rate: float) -> None:
        news = f"loss {loss:.3f}  accuracy {accuracy:.1%}  {rate:.0f} images/s"
        self._show(f"epoch {epoch + 1}", batch + 1, n_batches, news)

    def epoch(self, row: EpochLog, n_epochs: int) -> None:
        elapsed = time.monotonic() - self._started
        left = elapsed / max(row.epoch, 1) * (n_epochs - row.epoch)
        self._console.print(
            f"  epoch {row.epoch:>{len(str(n_epochs))}}/{n_epochs}  loss {row.loss:.4f}  accuracy {row.accuracy:6.1%}  "
            f"{row.images_per_second:.0f} images/s  {_minutes(left)} left",
            highlight=False,
        )
        self._track(row)

    def _track(self, row: EpochLog) -> None:
        """For TensorBoard, where the extra `track` is installed; if it cannot be written, training goes on without."""
        try:
            if self._tensorboard is not None and self._writer is None:
                from torch.utils.tensorboard import SummaryWriter

                self._writer = SummaryWriter(str(self._tensorboard))
            if self._writer is not None:
                for name in ("loss", "accuracy", "images_per_second"):
                    self._writer.add_scalar(f"train/{name}", getattr(row, name), row.epoch)
        except ImportError:
            self._tensorboard = None
        except OSError as error:
            log.warning("TensorBoard logging has stopped: %s", error)
            self._tensorboard = self._writer = None

    def _count(self, what: str, total: int | None) -> None:
        """Begin to count something new where the last step ended: an epoch, or a second set of views."""
        if (what, total) != self._counting:
            if self._task is not None and total != self._counting[1]:
                self._progress.reset(self._task)
            self._counting, self._begun = (what, total), self._last_step

    def _show(self, what: str, done: int, total: int | None, news: str) -> None:
        self._count(what, total)
        self._last_step = time.monotonic()
        counted = str(done) if total is None else f"{done}/{total}"
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._progress.add_task(what, total=total, news=news, counted=counted)
            self._progress.update(self._task, description=what, completed=done, total=total, news=news, counted=counted)
            return
        if self._last_step - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = self._last_step
            left = (self._last_line - self._begun) / max(done, 1) * (total - done) if total is not None else None
            when = f"  {_minutes(left)} left" if left is not None else ""
            self._console.print(f"  {what}: {counted}  {news}{when}", highlight=False)


_terminated = threading.Event()


@contextlib.contextmanager
def sigterm_as_sigint() -> Iterator[None]:
    """Let SIGTERM end a block as Ctrl-C does, so that nothing is left half done.

    Where the exception is lost, as in a callback of a library, the next `check_stopped` raises it again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        _terminated.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _terminated.clear()


def check_stopped() -> None:
    """Raise KeyboardInterrupt if SIGTERM came; loops call it once a step."""
    if _terminated.is_set():
        raise KeyboardInterrupt


def is_first() -> bool:
    """Whether this is the only process, or the first of those that torchrun started."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def _minutes(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
