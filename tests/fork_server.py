"""Runs commands of the program in forked copies of one process, and ends them at a chosen event.

An event is a call that changes a disk, or one of the steps that a run tells its observer of. Events are counted, so a
run can be ended at the n-th of them: at any moment of any stage, without a clock. Every line of the input is a command
as JSON, every line of the output what became of it. This process imports everything once and computes nothing, so that
its copies may.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISK_CALLS = ("replace", "rename", "fsync", "pwrite", "unlink", "mkdir", "posix_fallocate")
STEPS = ("stage", "caching", "batch", "epoch")


class Events:
    """Counts what happens in each stage, and sends this process a signal before the chosen event.

    `at` is the stage and the event in it; where that stage has fewer events by now, the first event after it.
    """

    def __init__(self, record: Path, at: list[int] | None, number: int) -> None:
        self._record, self._at, self._signal = open(record, "w"), at, number  # noqa: SIM115 (open until the end)
        self._place, self._stage, self._owner = [0, 0], "starting", os.getpid()

    def happens(self, name: str, stage: str | None = None) -> None:
        if os.getpid() != self._owner:  # a process that reads photos
            return
        if stage is not None:
            self._stage, self._place = stage, [self._place[0] + 1, 0]
        if self._at is not None and self._place >= self._at:
            self._at = None
            os.kill(os.getpid(), self._signal)
        self._record.write(json.dumps([self._place[0], self._stage, name]) + "\n")
        self._record.flush()
        self._place[1] += 1

    def before(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.happens(name, str(arguments[1]) if name == "stage" else None)
            return function(*arguments, **named)

        return counted


def _run(job: dict[str, Any]) -> int:
    """In the copy: the command, with its output in files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it
    events = Events(Path(job["events"]), job["at"], job["signal"])
    for name in DISK_CALLS:
        setattr(os, name, events.before(getattr(os, name), name))
    from prototree.cli import main
    from prototree.progress import Display

    for name in STEPS:
        setattr(Display, name, events.before(getattr(Display, name), name))
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


def _copy(job: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 98
    try:
        code = _run(job)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def main() -> None:
    import prototree.editing.finetuning
    import prototree.pipeline.fit
    import prototree.pipeline.reproduce  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"code": _copy(job)}), flush=True)


if __name__ == "__main__":
    main()
