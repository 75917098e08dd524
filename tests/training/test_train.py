import copy

import pytest
import torch

import oracle
from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.leaves import class_log_probs, leaf_counts
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.training.leaf_training import LEAF_TRAINERS
from prototree.training.loop import Loop, Options
from prototree.training.objectives import (
    ClassifierObjective,
    Cosine,
    Schedule,
    SoftTargets,
    TreeObjective,
    blend_with_start,
)
from tiny_training import MapBatches


@pytest.fixture
def batches(tiny_backbone: Backbone) -> MapBatches:
    return MapBatches(tiny_backbone.n_channels)


def make_tree(backbone: Backbone) -> ProtoTree:
    torch.manual_seed(1)
    return ProtoTree(Topology.full(3), FeatureExtractor(backbone, 8), 3)


def test_the_papers_rates_by_group(tiny_backbone: Backbone, batches: MapBatches) -> None:
    schedule = Schedule(100, 30, 1e-3, 1e-3, 1e-5, 0.1, (60, 70), 0.5)
    objective = TreeObjective(make_tree(tiny_backbone), batches, schedule)
    for epoch, factor in ((0, 1), (59, 1), (60, 0.5), (70, 0.25), (99, 0.25)):
        rates = [group.rate for group in objective.groups(epoch)]
        assert rates == pytest.approx([1e-3 * factor, 1e-3 * factor, 1e-3 * factor, 1e-5 * factor])
    prototypes, head, tail, trunk = objective.groups(0)
    assert [group.weight_decay for group in (prototypes, head, tail, trunk)] == [0, 0.1, 0, 0]
    assert prototypes.parameters == [objective.tree.prototypes]
    grouped = [p for group in objective.groups(0) for p in group.parameters]
    learned = [p for p in objective.parameters() if p is not objective.tree.leaf_logits]
    assert sorted(map(id, grouped)) == sorted(map(id, learned))


@pytest.mark.parametrize("soft", [False, True])
def test_after_each_epoch_the_leaves_hold_the_sum_of_targets(
    tiny_backbone: Backbone, batches: MapBatches, soft: bool
) -> None:
    tree = make_tree(tiny_backbone)
    targets = SoftTargets(torch.rand(30, 3).softmax(dim=1), 0.5) if soft else None
    objective = TreeObjective(tree, batches, Schedule(3, lr_prototypes=0.02, lr_last_block=0.02), targets=targets)
    Loop(objective, batches, 3, Options()).run()
    assert tree.leaf_logits.sum().item() == pytest.approx(30, rel=1e-4)


def test_the_leaf_update_uses_what_the_tree_said_before_the_optimisers_step(
    tiny_backbone: Backbone, batches: MapBatches
) -> None:
    tree = make_tree(tiny_backbone)
    tree.leaf_logits.data = torch.rand(8, 3)
    start = tree.leaf_logits.detach().clone()
    first = next(batches.epoch(0))
    with torch.no_grad():
        said = tree.route(tree.features.from_map(first.values)).log_path_probs
    expected = start - start / 1 + leaf_counts(said, class_log_probs(start), first.labels)
    one = MapBatches(tiny_backbone.n_channels, n_items=30)
    one.epoch = lambda epoch, start=0: iter([first])  # type: ignore[method-assign]
    one._order._batch_size = 30  # one batch an epoch
    Loop(TreeObjective(tree, one, Schedule(1, lr_prototypes=0.5, lr_last_block=0.5)), one, 1, Options()).run()
    torch.testing.assert_close(tree.leaf_logits.detach(), expected, atol=1e-5, rtol=1e-5)


def test_whole_steps_agree_with_the_oracle(tiny_backbone: Backbone) -> None:
    """Algorithm 1 by hand in float64: the loss of Eq. 4, Adam as its authors write it, then the leaves of Eq. 5."""
    torch.manual_seed(1)
    tree = ProtoTree(Topology.full(2), FeatureExtractor(copy.deepcopy(tiny_backbone), 4), 3).double()
    rate, epsilon, beta = 0.02, 1e-7, (0.9, 0.999)
    batches = MapBatches(tiny_backbone.n_channels, n_items=7, batch_size=4)  # the last batch has three
    batches.maps = batches.maps.double()
    tree.leaf_logits.data = 3 * random_maps(5, 4, 3)
    learned = [one.detach().clone().requires_grad_() for one in (tree.prototypes, tree.features.head.weight)]
    moments = [(torch.zeros_like(one), torch.zeros_like(one)) for one in learned]
    c, step = tree.leaf_logits.detach().clone(), 0
    for epoch in range(2):
        before = c.clone()
        for inputs in batches.epoch(epoch):
            z = torch.sigmoid(torch.nn.functional.conv2d(inputs.values, learned[1]))
            pi, step = oracle.path_probs(z, learned[0], tree.topology), step + 1
            y = torch.eye(3, dtype=torch.float64)[inputs.labels]
            gradients = torch.autograd.grad(-(y * oracle.prediction(pi, c).log()).sum(dim=1).mean(), learned)
            with torch.no_grad():
                for one, gradient, (mean, square) in zip(learned, gradients, moments, strict=True):
                    mean.copy_(beta[0] * mean + (1 - beta[0]) * gradient)
                    square.copy_(beta[1] * square + (1 - beta[1]) * gradient**2)
                    root = (square / (1 - beta[1] ** step)).sqrt() + epsilon
                    one.sub_(rate * mean / (1 - beta[0] ** step) / root)
                c = (c - before / batches.n_batches).clamp(min=0) + oracle.leaf_counts(pi.detach(), c, y)
    objective = TreeObjective(tree, batches, Schedule(2, lr_prototypes=rate, lr_last_block=rate))
    Loop(objective, batches, 2, Options(epsilon=epsilon)).run()
    found = (tree.prototypes, tree.features.head.weight, tree.leaf_logits)
    for one, other in zip(found, (*learned, c), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=0, atol=1e-10)


def test_two_pass_leaves_are_equation_five_over_the_whole_set(tiny_backbone: Backbone, batches: MapBatches) -> None:
    tree = make_tree(tiny_backbone)
    tree.leaf_logits.data = torch.rand(8, 3)
    before = tree.leaf_logits.detach().double()
    z = tree.features.from_map(batches.maps).detach().double()
    pi = oracle.path_probs(z, tree.prototypes.detach().double(), tree.topology)
    objective = TreeObjective(tree, batches, Schedule(1), LEAF_TRAINERS["two_pass"]())
    objective.start_epoch(0, is_continued=False)
    expected = oracle.leaf_counts(pi, before, torch.eye(3, dtype=torch.float64)[batches.labels])
    torch.testing.assert_close(tree.leaf_logits.detach().double(), expected, atol=1e-4, rtol=1e-4)


def test_gradient_leaves_are_learned_by_the_optimiser(tiny_backbone: Backbone, batches: MapBatches) -> None:
    tree = make_tree(tiny_backbone)
    objective = TreeObjective(tree, batches, Schedule(2, lr_prototypes=0.05), LEAF_TRAINERS["gradient"]())
    rows = Loop(objective, batches, 8, Options()).run()
    assert (tree.leaf_logits < 0).any(), "counts would not be negative"
    assert rows[-1].loss < rows[0].loss


def test_soft_targets_mix_teacher_and_label() -> None:
    targets = SoftTargets(torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.2, 0.6]]), 0.75)
    found = targets.of(torch.tensor([2, 0]), torch.tensor([1, 0]))
    torch.testing.assert_close(found, torch.tensor([[0.15, 0.15, 0.7], [0.625, 0.375, 0.0]]))


def test_frozen_batch_norm_does_not_drift_during_training() -> None:
    torch.manual_seed(0)
    backbone = Backbone("resnet18", None, image_size=32, feature_level=-2)

    class Photos(MapBatches):
        def encode(self, features: FeatureExtractor, values: torch.Tensor) -> torch.Tensor:
            return features(values)

    photos = Photos(3)
    photos.maps = torch.rand(30, 3, 32, 32)
    before = {name: tensor.clone() for name, tensor in backbone.trunk_state().items()}
    objective = TreeObjective(make_tree(backbone), photos, Schedule(2, freeze_epochs=2))
    Loop(objective, photos, 2, Options()).run()
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.trunk_state().items())


def test_rates_rise_then_fall() -> None:
    rates = [Cosine(5, n_batches=100).at(step / 10) for step in range(50)]
    assert 0 < rates[0] < 0.05
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0.9 < max(rates) <= 1
    assert 0 < rates[-1] < 0.01


def test_pretraining_as_a_plain_classifier_learns() -> None:
    torch.manual_seed(0)
    backbone = Backbone("resnet18", None, image_size=32, feature_level=-3)
    photos = MapBatches(3)
    photos.maps = 0.1 * torch.rand(30, 3, 32, 32)
    photos.maps[torch.arange(30), photos.labels] += 1
    rows = Loop(ClassifierObjective(backbone, 3, Cosine(5, photos.n_batches), 1e-3), photos, 5, Options()).run()
    assert rows[-1].accuracy > 0.9


def test_a_tuned_network_ends_half_way() -> None:
    torch.manual_seed(0)
    backbone = Backbone("resnet18", None, image_size=32, feature_level=-3)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    images = torch.rand(4, 3, 32, 32)
    with torch.no_grad():
        for parameter in backbone.parameters():
            parameter.add_(1.0)
    backbone.train()(images)  # moves the statistics of batch norm, and counts
    tuned = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    blend_with_start(backbone, before)
    for name, tensor in backbone.state_dict().items():
        expected = (before[name] + tuned[name]) / 2 if tensor.is_floating_point() else tuned[name]
        torch.testing.assert_close(tensor, expected)


def test_the_training_accuracy_is_that_of_the_trees_own_answers(tiny_backbone: Backbone, batches: MapBatches) -> None:
    # It was once computed from log-probabilities, where a leaf that is sure of one class counts against it.
    tree = make_tree(tiny_backbone)
    for leaf in range(8):
        tree.leaf_logits.data[leaf, leaf % 3] = 300.0 if leaf % 3 == 0 else 3.0
    objective = TreeObjective(tree, batches, Schedule(1)).eval()
    for inputs in batches.epoch(0):
        _, hits = objective.loss(objective(inputs.values), inputs)
        answers = tree.decide(tree.route(tree.features.from_map(inputs.values))).labels("soft")
        assert hits.tolist() == (answers == inputs.labels).float().tolist()
