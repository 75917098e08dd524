"""A real server process on loopback, for tests of the browser app."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Running:
    """Where the server is, and which process."""

    address: str  # ends in a slash
    pid: int


@contextmanager
def serving(run: Path, *options: str, cache: Path) -> Iterator[Running]:
    """`prototree serve` until the block ends; fails if the server has died meanwhile."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PROTOTREE_CACHE": str(cache)}
    command = [sys.executable, "-m", "prototree", "serve", str(run), "--port", "0", *options]
    log = cache / "server.log"
    with open(log, "wb") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "http://" in line), "")
            assert line, log.read_text()
            yield Running(next(word for word in line.split() if word.startswith("http://")), process.pid)
            assert process.poll() is None, f"the server died: {log.read_text()}"
            assert "Traceback" not in log.read_text(), log.read_text()
        finally:
            process.terminate()
            process.wait(timeout=3600)
            if process.stdout is not None:
                process.stdout.close()
