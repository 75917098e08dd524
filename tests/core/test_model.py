"""The model against the oracle: distances, routing, whole trees, and errors for input that does not fit."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import oracle
from conftest import grow, random_maps, tree_shapes
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import (
    DecisionPath,
    ProtoTree,
    PrototypeSource,
    distance_map,
    extract_patches,
    greedy_leaves,
    log_path_probs,
    max_path_leaves,
    nearest_patches,
    pair_distances,
)
from prototree.core.nodes import LN2, PAPER
from prototree.core.topology import Topology
from prototree.errors import ShapeError

# The backbone only lends its depth here; feature maps are given directly.
ORACLE_SETTINGS = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = [((4, 4), (1, 1)), ((3, 5), (2, 2)), ((5, 2), (3, 1)), ((2, 3), (2, 3)), ((1, 1), (1, 1))]


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_distances_and_patches_agree_with_the_oracle(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(0, 3, 6, *map_size), random_maps(1, 7, 6, *size)
    found = nearest_patches(z, p)
    for b in range(3):
        for n in range(7):
            distance, patch = oracle.nearest(z[b], p[n])
            assert found.distance[b, n] == pytest.approx(float(distance), abs=1e-12)
            assert found.patch[b, n] == patch


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_gradients_agree_with_the_oracle(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(0, 3, 6, *map_size).requires_grad_(), random_maps(1, 7, 6, *size).requires_grad_()
    weights = random_maps(2, 3, 7)
    fast = torch.autograd.grad((weights * nearest_patches(z, p).distance).sum(), (z, p))
    slow_loss = sum(weights[b, n] * oracle.nearest(z[b], p[n])[0] for b in range(3) for n in range(7))
    slow = torch.autograd.grad(slow_loss, (z, p))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_gradcheck_of_nearest_and_of_chosen_pairs(scale: float) -> None:
    z, p = scale * random_maps(3, 2, 4, 3, 3), scale * random_maps(4, 5, 4, 1, 1)
    assert torch.autograd.gradcheck(lambda *x: nearest_patches(*x).distance, (z.requires_grad_(), p.requires_grad_()))
    z, p = (scale * random_maps(seed, count, 6) for seed, count in ((5, 4), (6, 3)))
    row, node = torch.tensor([0, 0, 3, 2]), torch.tensor([1, 2, 1, 0])
    inputs = z.requires_grad_(), p.requires_grad_()
    torch.testing.assert_close(pair_distances(*inputs, row, node), (z[row] - p[node]).norm(dim=1))
    assert torch.autograd.gradcheck(lambda *x: pair_distances(*x, row, node), inputs)
    nothing = pair_distances(*inputs, row[:0], node[:0])
    assert nothing.shape == (0,)
    assert all((one == 0).all() for one in torch.autograd.grad(nothing.sum(), inputs))


def test_in_single_precision_the_same_patches_are_found() -> None:
    z, p = random_maps(0, 3, 6, 4, 5).float(), random_maps(1, 7, 6, 1, 1).float()
    rough, exact = nearest_patches(z, p, exact=False), nearest_patches(z, p)
    torch.testing.assert_close(rough.distance, exact.distance)
    assert torch.equal(rough.patch, exact.patch)
    near = nearest_patches(z, z[1, :, 2, 3][None, :, None, None], exact=False)
    assert near.patch[1, 0] == 2 * 5 + 3
    assert near.distance[1, 0] < 1e-2, "a few times the rounding of squares"


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1e-4, 0.02, 0.3, 3.0]))
@settings(deadline=None)
def test_float32_agrees_with_float64_at_every_scale(seed: int, height: int, width: int, spread: float) -> None:
    z = 0.5 + spread * (random_maps(seed, 2, 64, height, width) - 0.5)
    p = 0.5 + spread * (random_maps(seed + 1, 5, 64, 1, 1) - 0.5)
    z, p = z.float(), p.float()
    truth = torch.cdist(extract_patches(z.double(), (1, 1)), p.double().flatten(1).expand(2, -1, -1)).amin(dim=1)
    torch.testing.assert_close(nearest_patches(z, p).distance.double(), truth, atol=1e-7, rtol=1e-4)


def test_an_identical_patch_is_at_distance_zero_and_similarity_one() -> None:
    z = random_maps(0, 4, 256, 7, 7, dtype=torch.float32)
    p = z[2, :, 3, 4][None, :, None, None]
    found = nearest_patches(z, p)
    assert found.distance[2, 0] <= 1e-6
    assert math.exp(-found.distance[2, 0]) >= 1 - 1e-6
    assert found.patch[2, 0] == 3 * 7 + 4
    assert PAPER.similarity(distance_map(z, p), torch.tensor(math.log(2)))[2, 0, 3, 4] >= 1 - 1e-6


def test_the_nearest_of_almost_equal_patches_is_found() -> None:
    # Closer together than the matrix product can tell apart.
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(256, generator=generator)
    z = base[:, None, None] + 1e-4 * torch.rand(256, 7, 7, generator=generator)
    for patch in range(49):
        p = z[:, patch // 7, patch % 7][None, :, None, None]
        found = nearest_patches(z[None], p)
        assert found.patch.item() == patch
        assert found.distance.item() == 0


def test_a_tie_goes_to_the_first_patch() -> None:
    z = torch.full((1, 16, 3, 3), 0.25)
    assert nearest_patches(z, torch.full((1, 16, 1, 1), 0.26)).patch.item() == 0


@pytest.mark.parametrize("distance", [5e-4, 2e-3, 0.05, 0.399, 0.401, 2.0])
def test_small_distances_and_their_gradients_are_right(distance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(8, 256, 7, 7, generator=generator, dtype=torch.float64)
    step = torch.randn(8, 256, generator=generator, dtype=torch.float64)
    p = z[:, :, 2, 2] + distance * step / step.norm(dim=1, keepdim=True)
    z32, p32 = z.float().requires_grad_(), p.float()[:, :, None, None].requires_grad_()
    found = nearest_patches(z32, p32)
    own = found.distance.diagonal()
    exact = (z32[:, :, 2, 2].double() - p32[:, :, 0, 0].double()).norm(dim=1)
    torch.testing.assert_close(own.double(), exact, rtol=1e-3, atol=0)
    pairs = pair_distances(z32[:, :, 2, 2], p32.flatten(1), torch.arange(8), torch.arange(8))
    torch.testing.assert_close(pairs, own, rtol=1e-6, atol=1e-7)
    own.sum().backward()
    torch.testing.assert_close(p32.grad.flatten(1).norm(dim=1), torch.ones(8), rtol=1e-3, atol=0)
    direction = (p32[:, :, 0, 0].double() - z32[:, :, 2, 2].double()) / exact[:, None]
    torch.testing.assert_close(p32.grad.flatten(1).double(), direction, rtol=0, atol=1e-3)
    torch.testing.assert_close(z32.grad[:, :, 2, 2].double(), -direction, rtol=0, atol=1e-3)


def test_the_gradient_at_distance_zero_is_zero() -> None:
    z = random_maps(0, 1, 8, 2, 2, dtype=torch.float32).requires_grad_()
    p = z.detach()[:, :, :1, :1].clone().requires_grad_()
    nearest_patches(z, p).distance.sum().backward()
    assert (z.grad == 0).all()
    assert (p.grad == 0).all()


@pytest.mark.parametrize(("map_size", "size"), SHAPES)
def test_similarity_map_is_equation_seven(map_size: tuple[int, int], size: tuple[int, int]) -> None:
    z, p = random_maps(5, 2, 3, *map_size), random_maps(6, 4, 3, *size)
    found = PAPER.similarity(distance_map(z, p), torch.tensor(math.log(2)))
    rows, columns = map_size[0] - size[0] + 1, map_size[1] - size[1] + 1
    assert found.shape == (2, 4, rows, columns)
    for b in range(2):
        for n in range(4):
            expected = [math.exp(-float((patch - p[n]).norm())) for patch in oracle.patches(z[b], size)]
            torch.testing.assert_close(found[b, n].flatten(), torch.tensor(expected, dtype=z.dtype))


@pytest.mark.parametrize("size", [(1, 1), (2, 3)])
def test_written_down_by_torch_export_the_distances_are_the_same(size: tuple[int, int]) -> None:
    class Nearest(torch.nn.Module):
        def forward(self, z: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = nearest_patches(z, p)
            return found.distance, found.patch

    z, p = random_maps(7, 3, 64, 4, 5).float(), random_maps(8, 6, 64, *size).float()
    p[0] = z[1, :, : size[0], : size[1]]  # at distance 0 of one of them
    shapes = ({0: torch.export.Dim("b")}, {})
    program = torch.export.export(Nearest(), (z, p), dynamic_shapes=shapes).module()
    for n in (1, 3):
        distance, patch = program(z[:n], p)
        found = nearest_patches(z[:n], p)
        torch.testing.assert_close(distance, found.distance, atol=1e-6, rtol=0)
        assert torch.equal(patch, found.patch)


def paper_paths(distance: torch.Tensor, topology: Topology) -> torch.Tensor:
    radius = torch.full(distance.shape[1:], LN2, dtype=distance.dtype)
    return log_path_probs(*PAPER.log_p_left_right(distance, radius), topology)


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_path_probabilities_agree_with_the_oracle(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    z, p = random_maps(seed, 2, 4, 2, 3), random_maps(seed + 1, topology.n_nodes, 4, 1, 1)
    found = paper_paths(nearest_patches(z, p).distance, topology)
    torch.testing.assert_close(found.exp(), oracle.path_probs(z, p, topology), atol=1e-12, rtol=1e-10)


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_both_hard_strategies_agree_with_the_oracle(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    z, p = random_maps(seed, 3, 3, 2, 2), random_maps(seed + 1, topology.n_nodes, 3, 1, 1)
    distance = nearest_patches(z, p).distance
    assert greedy_leaves(torch.exp(-distance), topology).tolist() == [oracle.greedy(image, p, topology) for image in z]
    found = max_path_leaves(paper_paths(distance, topology)).tolist()
    pi = oracle.path_probs(z, p, topology)
    assert torch.allclose(pi.gather(1, torch.tensor(found)[:, None])[:, 0], pi.amax(dim=1), rtol=1e-9)


def test_probabilities_sum_to_one_in_a_tall_tree_in_float32() -> None:
    topology = Topology.full(11)
    generator = torch.Generator().manual_seed(0)
    for scale in (1e-6, 1e-2, 1.0, 20.0):
        distance = scale * torch.rand(8, topology.n_nodes, generator=generator)
        total = paper_paths(distance, topology).exp().sum(dim=1)
        torch.testing.assert_close(total, torch.ones(8), atol=1e-5, rtol=0)


def test_the_root_has_log_probability_zero() -> None:
    single_leaf = Topology(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert paper_paths(torch.zeros(3, 0), single_leaf).tolist() == [[0.0]] * 3
    one_node = Topology(np.array([~0]), np.array([~1]))
    found = paper_paths(torch.tensor([[math.log(4)]]), one_node)
    torch.testing.assert_close(found, torch.tensor([[math.log(3 / 4), math.log(1 / 4)]]))


def test_greedy_is_not_max_path() -> None:
    # The root leans right (0.6), but behind it the way is split in even parts: 0.3 each against 0.4 × 0.9 on the left.
    topology = Topology.full(2)
    similarity = torch.tensor([[0.6, 0.1, 0.5]])
    distance = -similarity.log()
    log_probs = paper_paths(distance, topology)
    torch.testing.assert_close(log_probs.exp(), torch.tensor([[0.36, 0.04, 0.3, 0.3]]))
    assert max_path_leaves(log_probs).tolist() == [0]
    assert greedy_leaves(similarity, topology).tolist() == [2]  # exactly 0.5 goes left


@given(tree_shapes, st.integers(0, 1000))
@settings(deadline=None)
def test_a_path_tells_nodes_turns_and_probabilities(shape: list[int], seed: int) -> None:
    topology = grow(shape)
    p_right = random_maps(seed, 4, topology.n_nodes)
    leaf = torch.tensor([seed * k % topology.n_leaves for k in range(4)])
    path = DecisionPath.to(leaf, p_right, topology)
    routes = oracle.routes(topology)
    for b in range(4):
        route = routes[int(leaf[b])]
        assert path.length[b] == len(route)
        for step, (node, right) in enumerate(route):
            assert (path.nodes[b, step], path.goes_right[b, step]) == (node, right)
            assert path.p_right[b, step] == p_right[b, node]
        assert (path.nodes[b, len(route) :] == -1).all()


def random_tree(
    backbone: Backbone, topology: Topology, seed: int, size: tuple[int, int] = (1, 1), n_classes: int = 3
) -> ProtoTree:
    tree = ProtoTree(topology, FeatureExtractor(backbone, 4), n_classes, size)
    tree.prototypes.data = random_maps(seed, *tree.prototypes.shape)
    tree.leaf_logits.data = 6 * random_maps(seed + 1, topology.n_leaves, n_classes)
    return tree


def test_parameter_counts_of_table_s1() -> None:
    tree = ProtoTree(Topology.full(8), FeatureExtractor(Backbone("resnet50", None), 256), 200)
    assert tree.prototypes.numel() == 65_280
    assert tree.leaf_logits.numel() == 51_200
    assert sum(p.numel() for p in tree.parameters()) == 23_508_032 + 524_288 + 65_280 + 51_200


def test_initialisation_is_the_papers(tiny_backbone: Backbone) -> None:
    tree = ProtoTree(Topology.full(7), FeatureExtractor(tiny_backbone, 64), 9)
    assert tree.prototypes.mean().item() == pytest.approx(0.5, abs=0.01)
    assert tree.prototypes.std().item() == pytest.approx(0.1, abs=0.01)
    assert (tree.leaf_logits == 0).all()
    assert not tree.leaf_logits.requires_grad


@given(tree_shapes, st.integers(0, 1000), st.sampled_from([((3, 3), (1, 1)), ((3, 4), (2, 2)), ((4, 2), (3, 1))]))
@ORACLE_SETTINGS
def test_decisions_agree_with_the_oracle(
    tiny_backbone: Backbone, shape: list[int], seed: int, sizes: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    tree = random_tree(tiny_backbone, grow(shape), seed, sizes[1])
    z = random_maps(seed + 2, 3, 4, *sizes[0])
    decisions = tree.decode(tree.forward_features(z))
    pi = oracle.path_probs(z, tree.prototypes.detach(), tree.topology)
    torch.testing.assert_close(decisions.soft, oracle.prediction(pi, tree.leaf_logits.detach()))
    sigma = oracle.softmax(tree.leaf_logits.detach())
    greedy = [oracle.greedy(image, tree.prototypes.detach(), tree.topology) for image in z]
    assert decisions.greedy.leaf.tolist() == greedy
    torch.testing.assert_close(decisions.class_probs("greedy"), sigma[greedy])
    torch.testing.assert_close(decisions.class_probs("max_path"), sigma[oracle.max_path(pi)])
    assert decisions.labels().tolist() == decisions.soft.argmax(dim=1).tolist()


@given(tree_shapes.filter(len), st.integers(0, 1000))
@ORACLE_SETTINGS
def test_loss_gradients_agree_with_the_oracle(tiny_backbone: Backbone, shape: list[int], seed: int) -> None:
    tree = random_tree(tiny_backbone, grow(shape), seed)
    z, labels = random_maps(seed + 2, 2, 4, 2, 3).requires_grad_(), torch.tensor([0, 2])
    fast = torch.autograd.grad(-tree.log_likelihood(tree.forward_features(z), labels).mean(), (z, tree.prototypes))
    y_hat = oracle.prediction(oracle.path_probs(z, tree.prototypes, tree.topology), tree.leaf_logits.detach())
    slow = torch.autograd.grad(-y_hat[[0, 1], labels].log().mean(), (z, tree.prototypes))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_a_tree_of_some_nodes_predicts_what_the_oracle_predicts_on_them(tiny_backbone: Backbone) -> None:
    tree = random_tree(tiny_backbone, Topology.full(3), 5)
    source = PrototypeSource("a.jpg", 1, "full", (0, 1), (0.0, 0.0, 8.0, 8.0), 0.1)
    tree.sources = (None,) * 6 + (source,)
    kept = np.array([True, False, False, False, True, True, False, True])
    topology, nodes, leaf_ids = tree.topology.keep_leaves(kept)
    smaller = tree.with_topology(topology, nodes, leaf_ids)
    z = random_maps(7, 4, 4, 2, 2)
    pi = oracle.path_probs(z, smaller.prototypes.detach(), smaller.topology)
    torch.testing.assert_close(pi.sum(dim=1), torch.ones(4, dtype=torch.float64))
    expected = oracle.prediction(pi, tree.leaf_logits.detach()[leaf_ids])
    torch.testing.assert_close(smaller.decode(smaller.forward_features(z)).soft, expected)
    assert smaller.prototypes.shape[0] == 3
    assert smaller.sources == tuple(tree.sources[node] for node in nodes)
    assert tree.topology.n_nodes == 7, "the old tree is unchanged"
    assert smaller.features is tree.features


def test_distances_stay_in_full_precision_under_autocast(tiny_tree: ProtoTree) -> None:
    images = torch.rand(2, 3, 64, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = tiny_tree(images)
    assert routed.distance.dtype == torch.float32
    assert routed.log_path_probs.dtype == torch.float32
    feature_map = torch.rand(2, 8, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = tiny_tree.forward_features(feature_map).distance
    assert torch.equal(found, tiny_tree.forward_features(feature_map).distance), "not the dtype alone, the digits too"


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("shape", [(0, 3, 64, 64), (2, 1, 64, 64), (3, 64, 64), (0, 8, 4, 4), (2, 7, 4, 4), (8, 4, 4)])
def test_input_of_a_wrong_shape(tiny_tree: ProtoTree, shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError):
        (tiny_tree if shape[-1] == 64 else tiny_tree.forward_features)(torch.zeros(shape))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_numbers(tiny_tree: ProtoTree, value: float) -> None:
    feature_map = torch.rand(2, 8, 4, 4)
    feature_map[1, 3, 2, 2] = value
    with pytest.raises(ShapeError):
        tiny_tree.forward_features(feature_map)


def test_leaves_that_are_not_numbers_give_no_answer(tiny_tree: ProtoTree) -> None:
    tiny_tree.leaf_logits.data[1, 2] = torch.nan
    with pytest.raises(ShapeError):
        tiny_tree.predict(torch.rand(1, 3, 64, 64))


@pytest.mark.parametrize(("n_classes", "size"), [(1, (1, 1)), (3, (5, 1))])
def test_one_class_or_prototypes_larger_than_the_map_are_refused(
    tiny_backbone: Backbone, n_classes: int, size: tuple[int, int]
) -> None:
    with pytest.raises(ShapeError):
        ProtoTree(Topology.full(2), FeatureExtractor(tiny_backbone, 4), n_classes, size)


def test_the_soft_strategy_has_no_path(tiny_tree: ProtoTree) -> None:
    decisions = tiny_tree.predict(torch.rand(1, 3, 64, 64))
    assert decisions.path("greedy") is decisions.greedy
    with pytest.raises(ShapeError):
        decisions.path("soft")
