import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from conftest import grow, tree_shapes
from prototree.core.topology import Topology
from prototree.errors import ShapeError


def test_full_tree_has_the_papers_size() -> None:
    topology = Topology.full(9)
    assert (topology.n_nodes, topology.n_leaves, topology.height) == (511, 512, 9)
    assert (topology.depths == 9).all()


def test_full_tree_of_height_two_by_hand() -> None:
    topology = Topology.full(2)
    assert topology.left.tolist() == [1, ~0, ~2]
    assert topology.right.tolist() == [2, ~1, ~3]
    assert topology.paths.tolist() == [[0, 1], [0, 1], [0, 2], [0, 2]]
    assert topology.goes_right.tolist() == [[False, False], [False, True], [True, False], [True, True]]


@given(tree_shapes)
def test_paths_are_those_found_by_walking_down(shape: list[int]) -> None:
    topology = grow(shape)
    for leaf, way in oracle.routes(topology).items():
        depth = topology.depths[leaf]
        assert list(zip(topology.paths[leaf, :depth], topology.goes_right[leaf, :depth], strict=True)) == way
        assert (topology.paths[leaf, depth:] == -1).all()


@given(tree_shapes, st.data())
def test_keep_leaves_splices_every_parent_that_lost_a_child(shape: list[int], data: st.DataObject) -> None:
    topology = grow(shape)
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=topology.n_leaves, max_size=topology.n_leaves)))
    kept[data.draw(st.integers(0, topology.n_leaves - 1))] = True
    smaller, nodes, leaf_ids = topology.keep_leaves(kept)
    assert sorted(leaf_ids) == list(np.nonzero(kept)[0])
    # A node stays exactly if kept leaves lie on both of its sides; then paths are the old ones without the others.
    ways, new_ways = oracle.routes(topology), oracle.routes(smaller)
    sides = {(node, right) for leaf in leaf_ids for node, right in ways[leaf]}
    both = {node for node, _ in sides if {(node, False), (node, True)} <= sides}
    assert set(nodes) == both
    for new, old in enumerate(leaf_ids):
        assert [(nodes[n], r) for n, r in new_ways[new]] == [(n, r) for n, r in ways[old] if n in both]


def test_one_kept_leaf_is_a_tree_without_nodes() -> None:
    smaller, nodes, leaf_ids = Topology.full(3).keep_leaves(np.arange(8) == 5)
    assert (smaller.n_nodes, smaller.n_leaves, smaller.height) == (0, 1, 0)
    assert nodes.tolist() == []
    assert leaf_ids.tolist() == [5]


@pytest.mark.parametrize("height", [-1, 0, 21])
def test_height_out_of_range(height: int) -> None:
    with pytest.raises(ShapeError, match=f"height from 1 to 20, got {height}"):
        Topology.full(height)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ([1, ~0], [~1]),  # unequal
        ([~1], [~0]),  # leaves not in order
        ([~0], [~0]),  # a leaf twice
        ([0], [~0]),  # a node that is its own child
        ([2, ~0, 1], [~1, ~2, ~3]),  # nodes not in level order
        ([~0, 2, 1], [~1, ~2, ~3]),  # a cycle that the root does not reach
    ],
)
@pytest.mark.usefixtures("as_users_run_it")
def test_arrays_that_are_no_tree_are_refused(left: list[int], right: list[int]) -> None:
    with pytest.raises(ShapeError):
        Topology(np.array(left), np.array(right))


def test_a_cycle_and_keeping_no_leaf_are_refused() -> None:
    with pytest.raises(ShapeError, match="cycle"):
        Topology.from_children([1, 0], [~0, ~1])
    with pytest.raises(ShapeError, match="at least one leaf"):
        Topology.full(2).keep_leaves(np.zeros(4, dtype=bool))
