import dataclasses

import pytest
import torch

from prototree.ensemble import Ensemble
from prototree.errors import ConfigError
from prototree.model import ProtoTree


@pytest.fixture
def trees(tiny_tree: ProtoTree) -> list[ProtoTree]:
    others = []
    for seed in (1, 2):
        tree = tiny_tree.with_topology(*tiny_tree.topology.keep_leaves(torch.arange(8).ne(seed).numpy()))
        tree.leaf_logits.data = 5 * torch.rand(7, 5, generator=torch.Generator().manual_seed(seed))
        others.append(tree)
    return [tiny_tree, *others]


@pytest.mark.parametrize("strategy", ["soft", "max_path", "greedy"])
def test_probabilities_are_averaged_not_their_logarithms(trees: list[ProtoTree], strategy: str) -> None:
    images = torch.rand(4, 3, 64, 64)
    expected = sum(tree.predict(images).class_probs(strategy) for tree in trees) / 3
    torch.testing.assert_close(Ensemble(trees).class_probs(images, strategy), expected)
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(4))


def test_the_explanation_is_as_large_as_all_trees(trees: list[ProtoTree]) -> None:
    assert Ensemble(trees).n_prototypes == 7 + 6 + 6


def test_trees_that_do_not_fit_together_are_refused(trees: list[ProtoTree]) -> None:
    trees[2].class_names = ("0", "1", "2", "3", "magpie")
    with pytest.raises(ConfigError, match=r"tree 3 knows other classes than the first \(4, magpie\)"):
        Ensemble(trees)
    trees[2].class_names = ("1", "0", "2", "3", "4")
    with pytest.raises(ConfigError, match="their order"):
        Ensemble(trees)
    trees[2].class_names = trees[0].class_names
    trees[1].preprocessing = dataclasses.replace(trees[1].preprocessing, resize=99)
    with pytest.raises(ConfigError, match="tree 2 expects other input"):
        Ensemble(trees)
    with pytest.raises(ConfigError, match="at least one tree"):
        Ensemble([])
