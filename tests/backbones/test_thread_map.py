"""Many small computations, each with one thread."""

import threading
from collections.abc import Iterator

import pytest
import torch

from prototree.backbones.thread_map import side_by_side


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_order_and_each_is_computed_with_one_thread() -> None:
    found = list(side_by_side(lambda item: (item, torch.get_num_threads()), range(20)))
    assert found == [(item, 1) for item in range(20)]
    assert torch.get_num_threads() == 2


def test_two_are_done_at_a_time() -> None:
    """Each waits for the other, so that one after the other would never end."""
    both = threading.Barrier(2, timeout=60)
    assert len(list(side_by_side(lambda _: both.wait(), range(2)))) == 2


def test_an_error_is_raised_and_the_threads_are_given_back() -> None:
    def work(item: int) -> float:
        return 1 / item

    with pytest.raises(ZeroDivisionError):
        list(side_by_side(work, [2, 1, 0]))
    assert torch.get_num_threads() == 2
