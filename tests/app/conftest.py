"""Fixtures of tests of the app: a tiny run, a server of it, and a client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app_server import Running, serving
from prototree.run import Run
from tiny_editing import tiny_run


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(cache))
        return tiny_run(tmp_path_factory.mktemp("app"))


@pytest.fixture(scope="module")
def server(run: Run, cache: Path) -> Iterator[Running]:
    with serving(run.folder, cache=cache) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    httpx = pytest.importorskip("httpx", reason="needs httpx")
    with httpx.Client(base_url=server.address, timeout=3600) as client:
        yield client
