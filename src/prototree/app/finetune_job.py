"""The network is trained further with the edited tree, in a process of its own; the page asks how far it is."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from prototree.app.schemas import FinetuneStatus
from prototree.editing.finetuning import check_recipe
from prototree.editing.session import EDITS, EditSession
from prototree.errors import ConflictError
from prototree.files import read_json
from prototree.run import Run

_TAIL = 4096  # bytes of the process's words that are looked at
_MAX_WORDS = 300


@dataclass(frozen=True)
class _Job:
    process: subprocess.Popen[bytes]
    edited: Run
    out: Path
    log: Path
    began: float


class FinetuneJob:
    """At most one process that learns; it ends with the server."""

    def __init__(self, session: EditSession, ended: FinetuneStatus | None = None) -> None:
        self._session, self._lock = session, threading.Lock()
        self._job: _Job | None = None
        self._ended = ended  # how the learning ended that made this run, if the app has seen it

    @property
    def out(self) -> Path:
        """The run that is made or was made."""
        assert self._job is not None, "nothing was started"
        return self._job.out

    def start(self, revision: int) -> FinetuneStatus:
        """Saves the tree as it is, and lets the network learn with it."""
        session = self._session
        check_recipe(session.run)
        with self._lock:
            if self._job is not None and self._job.process.poll() is None:
                raise ConflictError("the network is learning already; wait until it is done")
            edited, out = session.save(revision=revision), session.free_name("finetuned")
            log = session.work / "learning.log"
            command = [sys.executable, "-m", "prototree", "finetune", str(edited.folder), "--out", str(out)]
            with open(log, "wb") as words:
                process = subprocess.Popen(
                    [*command, "--data", session.source], stdin=subprocess.DEVNULL, stdout=words, stderr=words
                )
            self._job, self._ended = _Job(process, edited, out, log, time.monotonic()), None
        return self.status()

    def status(self) -> FinetuneStatus:
        """How far it is, or how it ended."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            job = self._job
            if job is None:
                return FinetuneStatus(state="idle")
            code = job.process.poll()
            found = FinetuneStatus(
                state="learning" if code is None else "failed" if code else "done",
                run=job.out.name,
                folder=os.path.relpath(job.out),
                seconds=round(time.monotonic() - job.began),
                says=_last_words(job.log),
            )
            if code is None:
                return found
            self._ended = found if code else found.model_copy(update=self._judged(job))
            return self._ended

    def close(self) -> None:
        """Ends the process, if there is one; what it has learned is saved and can be continued."""
        with self._lock:
            if self._job is not None and self._job.process.poll() is None:
                self._job.process.terminate()
                try:
                    self._job.process.wait(timeout=30)
                except subprocess.TimeoutExpired:
                    self._job.process.kill()

    def _judged(self, job: _Job) -> dict[str, object]:
        """Right answers of the original, the edited and the learned tree on photos that no feedback came from."""
        workbench, maps = self._session.workbench, self._session.held_back or self._session.workbench.feedback
        judged = read_json(job.edited.folder / EDITS)["judged"]
        wrong = {mistake["image"] for mistake in read_json(job.out / "errors.json")["images"]}
        names = [workbench.name(entry.sample) for entry in maps.entries]
        return {
            "photos": judged["photos"],
            "original": judged["before"]["greedy"],
            "edited": judged["after"]["greedy"],
            "learned": sum(name not in wrong for name in names) / len(names),
        }


def _last_words(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        text = file.read().decode(errors="replace")
    lines = [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
    return "".join(c for c in lines[-1] if c.isprintable())[:_MAX_WORDS] if lines else ""
