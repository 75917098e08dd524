"""What all tests share: a cache of their own, so that none reads or leaves anything in the user's."""

from pathlib import Path

import pytest

from data_files import CUB_50
from prototree.data import ImageData, open_data


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PROTOTREE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def cub_50(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Real photos of fifty species, opened once."""
    if not CUB_50.is_dir():
        pytest.skip(f"the photos of {CUB_50.name} are not beside the project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_data(CUB_50)
