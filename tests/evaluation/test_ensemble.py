import copy
import dataclasses

import pytest
import torch

from prototree.core.confidence import Calibration
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree, TreePrediction
from prototree.core.nodes import NodeFunction, NodeKind
from prototree.errors import ConfigError, DataError
from prototree.evaluation.ensemble import ensemble_metrics


@pytest.fixture
def trees(tiny_tree: ProtoTree) -> list[ProtoTree]:
    others = []
    for seed in (1, 2):
        tree = tiny_tree.with_topology(*tiny_tree.topology.keep_leaves(torch.arange(8).ne(seed).numpy()))
        tree.leaf_logits.data = 5 * torch.rand(7, 5, generator=torch.Generator().manual_seed(seed))
        others.append(tree)
    return [tiny_tree, *others]


@pytest.mark.parametrize("strategy", ["soft", "max_path"])
def test_probabilities_are_averaged_not_their_logarithms(trees: list[ProtoTree], strategy: str) -> None:
    images = torch.rand(4, 3, 64, 64)
    expected = sum(tree.predict(images).class_probs(strategy) for tree in trees) / 3  # they ask as the paper's do
    torch.testing.assert_close(Ensemble(trees).class_probs(images, strategy), expected)
    torch.testing.assert_close(expected.sum(dim=1), torch.ones(4))


def test_a_greedy_path_counts_as_much_as_its_tree_is_sure_of_it(trees: list[ProtoTree]) -> None:
    images = torch.rand(4, 3, 64, 64)
    trees[1].calibration, trees[2].calibration = (
        Calibration(0.0, 2.0),
        Calibration(0.0, -2.0),
    )  # always 88 %, always 12 %
    found = Ensemble(trees[1:]).class_probs(images, "greedy")
    sure, unsure = (tree.predict(images).class_probs("greedy") for tree in trees[1:])
    weight = torch.sigmoid(torch.tensor(2.0))
    torch.testing.assert_close(found, weight * sure + (1 - weight) * unsure)


@pytest.mark.parametrize(
    ("kind", "own", "in_vote"), [("pairwise", 8.0, 4.0), ("presence", 6.0, 3.0), ("presence", 1.5, 1.0)]
)
def test_in_a_vote_questions_are_half_as_sharp_but_alone_they_are_not(
    tiny_tree: ProtoTree, kind: NodeKind, own: float, in_vote: float
) -> None:
    def tree_of(sharpness: float) -> ProtoTree:
        node_function = NodeFunction(kind, sharpness)
        tree = ProtoTree(
            tiny_tree.topology,
            tiny_tree.features,
            5,
            node_function=node_function,
            generator=torch.Generator().manual_seed(0),
        )
        tree.leaf_logits.data = 5 * torch.rand(8, 5, generator=torch.Generator().manual_seed(1))
        return tree.eval()

    images = torch.rand(4, 3, 64, 64)
    sharp, soft = tree_of(own), tree_of(in_vote)
    assert not torch.allclose(sharp.predict(images).soft, soft.predict(images).soft)
    torch.testing.assert_close(Ensemble([sharp, sharp]).class_probs(images), soft.predict(images).soft)
    torch.testing.assert_close(Ensemble([sharp]).class_probs(images), sharp.predict(images).soft)


def test_the_explanation_is_as_large_as_all_trees(trees: list[ProtoTree]) -> None:
    assert Ensemble(trees).n_prototypes == 7 + 6 + 6


def test_trees_that_do_not_fit_together_are_refused(trees: list[ProtoTree]) -> None:
    trees[2].class_names = ("0", "1", "2", "3", "magpie")
    with pytest.raises(ConfigError):
        Ensemble(trees)
    trees[2].class_names = ("1", "0", "2", "3", "4")
    with pytest.raises(ConfigError):
        Ensemble(trees)
    trees[2].class_names = trees[0].class_names
    trees[1].preprocessing = dataclasses.replace(trees[1].preprocessing, resize=99)
    with pytest.raises(ConfigError):
        Ensemble(trees)
    with pytest.raises(ConfigError):
        Ensemble([])


def test_every_number_of_an_ensemble_by_a_slow_loop(trees: list[ProtoTree]) -> None:
    images, labels = torch.rand(9, 3, 64, 64, generator=torch.Generator().manual_seed(3)), torch.arange(9) % 5
    found = ensemble_metrics(Ensemble(trees), zip(images.split(4), labels.split(4), strict=True))
    each = [tree.predict(images) for tree in trees]
    assert found.n_images == 9

    def weight(one: TreePrediction, strategy: str, i: int) -> float:
        return float(one.confidence[i]) if strategy == "greedy" else 1.0

    for strategy in ("soft", "max_path", "greedy"):
        alone = [one.accuracy[strategy] for one in found.alone]
        assert alone == [sum((one.labels(strategy) == labels).tolist()) / 9 for one in each]
        for group in found.ensembles:
            probs = [
                sum(weight(one, strategy, i) * one.class_probs(strategy)[i] for one in each[: group.n_trees])
                for i in range(9)
            ]
            right = [int(p.argmax()) == int(label) for p, label in zip(probs, labels, strict=True)]
            assert group.accuracy[strategy] == sum(right) / 9
            if strategy != "soft":
                lengths = sum(int(one.path(strategy).length.sum()) for one in each[: group.n_trees])
                assert group.mean_path_prototypes[strategy] == pytest.approx(lengths / 9)
    assert [group.n_trees for group in found.ensembles] == [1, 2, 3]
    assert [group.n_prototypes for group in found.ensembles] == [7, 13, 19]
    assert [one.n_prototypes for one in found.alone] == [7, 6, 6]
    assert found.ensembles[0] == found.alone[0]
    assert found.all_trees.top5 == 1.0  # of five classes


def test_the_same_backbone_runs_once_and_another_is_noticed(
    trees: list[ProtoTree], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = copy.deepcopy(trees[1])
    changed = copy.deepcopy(trees[2])
    with torch.no_grad():
        next(changed.features.backbone.parameters()).add_(0.1)
    ensemble = Ensemble([trees[0], copied, changed])
    calls = []
    forward = type(copied.features.backbone).forward
    monkeypatch.setattr(
        type(copied.features.backbone), "forward", lambda self, x: calls.append(self) or forward(self, x)
    )
    images = torch.rand(2, 3, 64, 64)
    found = ensemble.class_probs(images)
    assert len(calls) == 2
    expected = sum(tree.predict(images).soft for tree in ensemble.trees) / 3
    torch.testing.assert_close(found, expected)


def test_an_ensemble_needs_photos(trees: list[ProtoTree]) -> None:
    with pytest.raises(DataError):
        ensemble_metrics(Ensemble(trees), [])
