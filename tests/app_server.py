"""A real server process on loopback, and requests to it, for tests of the browser app."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

BYTES = {"Content-Type": "application/octet-stream"}


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


def revision(client: Any) -> int:
    return int(client.get("/api/health").json()["revision"])


def edit(client: Any, **content: object) -> Any:
    return client.post("/api/edits", json={"revision": revision(client), "edit": content})


def undo(client: Any) -> Any:
    return client.post("/api/edits/undo", json={"revision": revision(client)})


def png(size: tuple[int, int] = (40, 40), colour: tuple[int, int, int] = (200, 40, 40)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()
