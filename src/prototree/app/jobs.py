"""Work outside the event loop: worker threads with bounded queues, and fine-tuning in a process of its own."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from prototree.app.schemas import FinetuneResponse, RevisionRequest
from prototree.editing.finetune import check_can_finetune
from prototree.editing.session import EDITS, EditSession
from prototree.errors import ConflictError
from prototree.io import read_json
from prototree.run import ERRORS

Result = TypeVar("Result")
_LOG_TAIL = 4096  # bytes
_MAX_LINE = 300


class BusyError(Exception):
    """Too many requests are waiting."""

    def __init__(self, retry_after: int) -> None:
        super().__init__("too many requests are waiting; try again in a moment")
        self.retry_after = retry_after


class Worker:
    """One thread, and a bounded number of requests that wait for it."""

    def __init__(self, max_waiting: int, seconds_each: float) -> None:
        self._max_waiting, self._seconds_each, self.waiting = max_waiting, seconds_each, 0
        self._thread = ThreadPoolExecutor(1)

    async def run(self, work: Callable[..., Result], *args: object) -> Result:
        """Do the work in the thread, after all that came before; raises `BusyError` if too many are waiting."""
        if self.waiting >= self._max_waiting:
            raise BusyError(max(1, round(self.waiting * self._seconds_each)))
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Wait for what is running, drop what is waiting."""
        self._thread.shutdown(cancel_futures=True)


class FinetuneJob:
    """Fine-tuning of the edited tree: at most one process, which ends with the server."""

    def __init__(self, session: EditSession, status: FinetuneResponse | None = None) -> None:
        self._session, self._lock = session, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._final = status  # how the fine-tuning ended that made this run, if the app has seen it
        self._log, self._began = session.work / "finetune.log", 0.0
        self.edited = self.out = session.run.folder

    def start(self, request: RevisionRequest) -> FinetuneResponse:
        """Saves the tree, and trains the network further with it, in a new run; takes minutes."""
        session = self._session
        check_can_finetune(session.run)
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                raise ConflictError("the network is being trained already; wait until it is done")
            self.edited, self.out = session.save(revision=request.revision).folder, session.free_folder("finetuned")
            command = [sys.executable, "-m", "prototree", "finetune", str(self.edited), "--out", str(self.out)]
            command += ["--data", session.source]
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            self._began, self._final = time.monotonic(), None
        return self.status()

    def status(self) -> FinetuneResponse:
        """Progress of fine-tuning."""
        with self._lock:
            if self._final is not None or self._process is None:
                return self._final or FinetuneResponse(state="idle")
            code = self._process.poll()
            status = FinetuneResponse(
                state="running" if code is None else "failed" if code else "done",
                run=self.out.name,
                folder=os.path.relpath(self.out),
                seconds=round(time.monotonic() - self._began),
                last_log_line=_last_line(self._log),
            )
            if code is not None:
                self._final = status if code else status.model_copy(update=self._accuracies())
            return self._final or status

    def close(self) -> None:
        """End the process, if there is one; what it has trained is saved and can be continued."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    self._process.kill()

    def _accuracies(self) -> dict[str, object]:
        """Evaluate the initial, the edited and the fine-tuned tree on the images that edits were not chosen by."""
        evaluation = read_json(self.edited / EDITS)["evaluation"]
        wrong = {error["image"] for error in read_json(self.out / ERRORS)["images"]}
        images = (self._session.test or self._session.validation).entries
        n_correct = sum(self._session.workbench.name(entry.sample) not in wrong for entry in images)
        before, after = evaluation["before"]["greedy"], evaluation["after"]["greedy"]
        return {
            "images": evaluation["images"],
            "initial": before,
            "edited": after,
            "finetuned": n_correct / len(images),
        }


def _last_line(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable())[:_MAX_LINE] if lines else ""
