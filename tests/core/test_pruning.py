"""Contract 5: a pruned tree predicts what the oracle predicts on the spliced tree."""

import logging

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from conftest import grow, random_maps, tree_shapes
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.pruning import prune
from prototree.core.topology import Topology
from prototree.errors import PruneError


def tree_with(
    backbone: Backbone, topology: Topology, confident: list[bool], seed: int = 0, n_classes: int = 4
) -> ProtoTree:
    """Leaves are sure of a class or exactly uniform."""
    tree = ProtoTree(topology, FeatureExtractor(backbone, 4), n_classes)
    tree.prototypes.data = random_maps(seed, *tree.prototypes.shape)
    tree.leaf_logits.data = torch.zeros(topology.n_leaves, n_classes, dtype=torch.float64)
    for leaf, sure in enumerate(confident):
        tree.leaf_logits.data[leaf, (seed + leaf) % n_classes] = 8.0 if sure else 0.0
    return tree


@given(tree_shapes, st.integers(0, 1000), st.data())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pruned_trees_agree_with_the_oracle(
    tiny_backbone: Backbone, shape: list[int], seed: int, data: st.DataObject
) -> None:
    topology = grow(shape)
    confident = data.draw(st.lists(st.booleans(), min_size=topology.n_leaves, max_size=topology.n_leaves).filter(any))
    tree = tree_with(tiny_backbone, topology, confident, seed)
    pruned = prune(tree)
    assert pruned.leaves_after == sum(confident)
    assert pruned.tree.prototypes.shape[0] == sum(confident) - 1
    # The oracle walks the old tree: a node counts only if kept leaves lie on both sides, the turn there as before.
    z = random_maps(seed + 1, 2, 4, 2, 2)
    ways = oracle.routes(topology)
    kept = [leaf for leaf, sure in enumerate(confident) if sure]
    sides = {step for leaf in kept for step in ways[leaf]}
    p, c = tree.prototypes.detach(), tree.leaf_logits.detach()
    expected = torch.zeros(2, 4, dtype=torch.float64)
    for b in range(2):
        for leaf in kept:
            way = [(node, right) for node, right in ways[leaf] if (node, not right) in sides]
            expected[b] += oracle.path_prob(z[b], p, way) * oracle.softmax(c)[leaf]
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(pruned.tree.decode(pruned.tree.forward_features(z)).soft, expected)
    again = prune(pruned.tree)
    assert again.tree.topology.left.tolist() == pruned.tree.topology.left.tolist()
    assert torch.equal(again.tree.leaf_logits, pruned.tree.leaf_logits)


def test_the_default_threshold_follows_the_number_of_classes(tiny_backbone: Backbone) -> None:
    tree = tree_with(tiny_backbone, Topology.full(2), [True] * 4)
    tree.leaf_logits.data[0] = torch.tensor([0.3, 0.1, 0.0, 0.0])  # maximum 0.31: the paper's 0.01 would keep it
    assert prune(tree).leaves_after == 3
    assert prune(tree, 0.01).leaves_after == 4


def test_the_original_is_not_changed(tiny_backbone: Backbone) -> None:
    tree = tree_with(tiny_backbone, Topology.full(2), [True, False, True, False])
    before = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    prune(tree).tree.prototypes.data.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in tree.state_dict().items())


def test_a_threshold_that_removes_everything_says_so(tiny_backbone: Backbone) -> None:
    tree = tree_with(tiny_backbone, Topology.full(2), [False] * 4)
    with pytest.raises(PruneError, match="removes all 4 leaves"):
        prune(tree)
    with pytest.raises(PruneError, match="from 0 to 1, got 2"):
        prune(tree, 2.0)


def test_a_report_in_words(tiny_backbone: Backbone, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    some = prune(tree_with(tiny_backbone, Topology.full(2), [True, True, False, False]))
    assert "3 → 1 prototypes" in str(some)
    none = prune(tree_with(tiny_backbone, Topology.full(4), [True] * 16))
    assert "nothing was removed" in str(none)
