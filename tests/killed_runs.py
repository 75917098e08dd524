"""Commands in copies of one process that may be ended at any event, and what a run left on the disk, to compare."""

import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = Path(__file__).parent / "fork_server.py"
TIMES = ("images_per_second", "seconds")  # the columns of log.csv that no two runs share


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: by that signal), what it said, and the events before."""

    code: int
    out: str
    err: str
    events: tuple[tuple[int, str, str], ...]  # the number of the stage, its name, and what happened

    @property
    def stages(self) -> dict[int, tuple[str, int]]:
        """The name of each stage, and how many events it had."""
        count = Counter(number for number, _, _ in self.events)
        return {number: (name, count[number]) for number, name, _ in self.events}


@dataclass(frozen=True)
class Commands:
    """Runs commands of the program one after the other; each can be ended before its n-th event."""

    server: "subprocess.Popen[str]"
    folder: Path

    def run(
        self,
        *words: object,
        at: tuple[int, int] | None = None,
        number: int = signal.SIGKILL,
        folder: Path | None = None,
        columns: int = 200,
        cache: Path | None = None,
    ) -> Ended:
        """One command, perhaps in a folder; `at` is the stage and the event in it before which it gets the signal."""
        files = {name: str(self.folder / name) for name in ("out", "err", "events")}
        environment = {"PROTOTREE_CACHE": str(cache or self.folder / "cache"), "COLUMNS": str(columns)}
        job = {"words": list(map(str, words)), "at": at, "signal": int(number), "environment": environment, **files}
        job["folder"] = str(folder or Path.cwd())
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        self.server.stdin.write(json.dumps(job) + "\n")
        self.server.stdin.flush()
        answer = json.loads(self.server.stdout.readline())
        events = [tuple(json.loads(line)) for line in Path(files["events"]).read_text().splitlines()]
        return Ended(answer["code"], Path(files["out"]).read_text(), Path(files["err"]).read_text(), tuple(events))


@contextmanager
def commands(folder: Path, threads: int = 1) -> Iterator[Commands]:
    """A process that imports the program once, for as many commands as asked."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, str(SERVER)], env=environment, **pipes)
    try:
        yield Commands(server, folder)
    finally:
        server.stdin.close()
        server.wait(3600)
        server.stdout.close()


def options(settings: Mapping[str, object]) -> list[str]:
    """Settings as words of the command line."""
    return [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def content(run: Path, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """What names the content of every file of a run, but for how long things took."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    named = {str(path.relative_to(run)): path for path in files}
    kept = {name: path for name, path in named.items() if name.split("/")[0] not in ("tensorboard", *leave_out)}
    return {name: hashlib.sha256(_timeless(path)).hexdigest() for name, path in kept.items()}


def differences(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The files that are not the same, or that only one of two runs has."""
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def _timeless(path: Path) -> bytes:
    text = path.read_bytes()
    if path.name == "log.csv":
        rows = list(csv.DictReader(io.StringIO(text.decode())))
        return json.dumps([{k: v for k, v in row.items() if k not in TIMES} for row in rows]).encode()
    if path.name == "metrics.json":
        return json.dumps({k: v for k, v in json.loads(text).items() if k not in ("seconds", "sha256")}).encode()
    if path.name == "state.json":
        header = {key: value for key, value in json.loads(text).items() if key != "sha256"}  # which times go into
        header.get("totals", {}).pop("seconds", None)
        header["log"] = [{k: v for k, v in row.items() if k not in TIMES} for row in header.get("log", [])]
        return json.dumps(header).encode()
    return text
