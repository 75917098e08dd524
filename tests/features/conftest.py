"""Fixtures of tests of feature maps."""

import pytest

from prototree.data import ImageData, open_data
from tiny_training import write_squares


@pytest.fixture(scope="session")
def squares(tmp_path_factory: pytest.TempPathFactory) -> ImageData:
    """Tiny images, 24 to train on and 9 to test on; no test may change them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return open_data(write_squares(tmp_path_factory.mktemp("squares") / "squares"))
