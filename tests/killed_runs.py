"""Commands in forked copies of one process, which may be ended at any event, and what a run left on the disk.

An event is a call that changes a disk, or a step that a run tells its observer of. Events are counted, so a run can be
ended at the n-th of a stage: at any moment, without a clock. The server, this file run as a program, imports everything
once and computes nothing, so that its copies may; it reads commands as lines of JSON.
"""

import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DISK_CALLS = ("replace", "rename", "fsync", "pwrite", "unlink", "mkdir", "posix_fallocate")
STEPS = ("stage", "caching", "batch", "epoch")
TIMES = ("images_per_second", "seconds")  # the columns of log.csv that no two runs share


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: by that signal), what it wrote, and its stages."""

    code: int
    out: str
    err: str
    stages: dict[int, tuple[str, int]]  # by number: the name, and how many events it had


@dataclass(frozen=True)
class Commands:
    """Runs commands of the program one after the other; `at` is a stage and the event in it before which to signal."""

    server: "subprocess.Popen[str]"
    folder: Path

    def run(
        self,
        *words: object,
        at: tuple[int, int] | None = None,
        number: int = signal.SIGKILL,
        folder: Path | None = None,
        cache: Path | None = None,
    ) -> Ended:
        files = {name: self.folder / name for name in ("out", "err", "events")}
        job = {"words": list(map(str, words)), "at": at, "signal": int(number), "folder": folder or Path.cwd(), **files}
        job["environment"] = {"PROTOTREE_CACHE": str(cache or self.folder / "cache"), "COLUMNS": "200"}
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(json.dumps(job, default=str), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        out, err, events = (path.read_text() for path in files.values())
        counts = Counter(tuple(json.loads(line)) for line in events.splitlines())
        return Ended(code, out, err, {number: (name, count) for (number, name), count in counts.items()})


@contextmanager
def commands(folder: Path) -> Iterator[Commands]:
    """A process that imports the program once, for as many commands as asked."""
    folder.mkdir(parents=True, exist_ok=True)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, __file__], env=environment, **pipes) as server:
        yield Commands(server, folder)


def options(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of the command line."""
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def content(run: Path) -> dict[str, str]:
    """A digest of every file of a run, but for how long things took."""
    files = {str(path.relative_to(run)): path for path in sorted(run.rglob("*")) if path.is_file()}
    kept = {name: path for name, path in files.items() if not name.startswith("tensorboard/")}
    return {name: hashlib.sha256(_timeless(path)).hexdigest() for name, path in kept.items()}


def differences(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The files that are not the same, or that only one of two runs has."""
    return sorted(name for name in {*first, *other} if first.get(name) != other.get(name))


def _timeless(path: Path) -> bytes:
    text = path.read_bytes()
    if path.name == "log.csv":
        header = {"log": list(csv.DictReader(io.StringIO(text.decode())))}
    elif path.name in ("metrics.json", "state.json"):
        header = {k: v for k, v in json.loads(text).items() if k not in ("seconds", "sha256")}
    else:
        return text
    header["log"] = [{k: v for k, v in row.items() if k not in TIMES} for row in header.get("log", [])]
    return json.dumps(header).encode()


class Events:
    """Counts what happens in each stage, and sends this process a signal before the chosen event.

    Where that stage has fewer events by now, before the first event after it.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._record, self._at, self._signal = open(job["events"], "w"), job["at"], job["signal"]  # noqa: SIM115
        self._position, self._stage, self._owner = [0, 0], "starting", os.getpid()

    def before(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            if os.getpid() == self._owner:  # not in a process that reads images
                if name == "stage":
                    self._stage, self._position = str(arguments[1]), [self._position[0] + 1, 0]
                if self._at is not None and self._position >= self._at:
                    self._at = None
                    os.kill(os.getpid(), self._signal)
                print(json.dumps([self._position[0], self._stage]), file=self._record, flush=True)
                self._position[1] += 1
            return function(*arguments, **named)

        return counted


def _run(job: dict[str, Any]) -> int:
    """In the copy: the command, with its output in files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
    from prototree.cli import main
    from prototree.progress import Display

    events = Events(job)
    for owner, names in ((os, DISK_CALLS), (Display, STEPS)):
        for name in names:
            setattr(owner, name, events.before(getattr(owner, name), name))
    os.environ.update(job["environment"])
    sys.argv = ["prototree", *job["words"]]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def serve() -> None:
    import prototree.cli
    import prototree.editing.finetune
    import prototree.pipeline.reproduce  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if not child:
            code = 98
            try:
                code = _run(json.loads(line))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
