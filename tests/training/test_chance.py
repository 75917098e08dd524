"""Chance is drawn for the whole batch: shares of it are what one process would have drawn."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout2d

from conftest import random_maps
from prototree.training.chance import WholeBatch

X = random_maps(0, 8, 6, 1, 5, dtype=torch.float32)


def drawn(batch: WholeBatch, use: Callable[[WholeBatch], Tensor]) -> tuple[Tensor, Tensor]:
    """What comes out, and the state that chance is left in."""
    torch.manual_seed(3)
    return use(batch), torch.get_rng_state()


def test_alone_channels_are_dropped_as_torch_drops_them() -> None:
    found, state = drawn(WholeBatch.around(X), lambda batch: batch.kept(6, 0.3, X))
    torch.manual_seed(3)
    assert torch.equal(X * found[:, :, None, None], dropout2d(X, 0.3, True))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("cut", [0, 3, 8])
def test_shares_of_a_batch_make_the_whole(cut: int) -> None:
    whole, state = drawn(WholeBatch.around(X), lambda batch: batch.kept(6, 0.3, X))
    shares = [drawn(WholeBatch(a, b, 8), lambda batch: batch.kept(6, 0.3, X)) for a, b in ((0, cut), (cut, 8))]
    assert torch.equal(torch.cat([share for share, _ in shares]), whole)
    assert all(torch.equal(left, state) for _, left in shares), "also of a process that has no photo"


def test_without_dropout_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    assert torch.equal(WholeBatch.around(X).kept(6, 0.0, X), torch.ones(8, 6))
    assert torch.equal(torch.get_rng_state(), before)
