"""Soft labels from a teacher: trees or a timm classifier, computed once."""

from pathlib import Path

import pytest
import torch

from prototree.backbones.backbone import FeatureExtractor
from prototree.core import checkpoint
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import ImageData, open_data
from prototree.data.crops import evaluation_views
from prototree.data.loader import ViewDataset
from prototree.errors import ConfigError, WeightsError
from prototree.progress import Observer
from prototree.training import teacher
from tiny_training import NETWORK, tiny_context, write_squares

import timm  # isort: skip


@pytest.fixture
def trees(tiny_tree: ProtoTree, tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "a", tmp_path / "b"]
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        tree = ProtoTree(Topology.full(2), FeatureExtractor(tiny_tree.features.backbone, 8), 3).eval()
        tree.leaf_logits.data.copy_(5 * torch.rand(4, 3))
        checkpoint.save(tree, folder)
    return folders


@pytest.mark.parametrize("kind", ["tree", "trees", "timm"])
def test_teachers_of_every_kind(squares: ImageData, tmp_path: Path, trees: list[Path], kind: str) -> None:
    torch.manual_seed(0)
    network = timm.create_model(NETWORK, num_classes=3).eval()
    torch.save(network.state_dict(), tmp_path / "teacher.pth")
    sources = {
        "tree": f"{trees[0]}",
        "trees": f"{trees[0]},{trees[1]}",
        "timm": f"{NETWORK}={tmp_path / 'teacher.pth'}",
    }
    stages: list[str] = []

    class Stages(Observer):
        def stage(self, text: str) -> None:
            stages.append(text)

    context = tiny_context(tmp_path / "run", squares, Stages())
    probs, again = (teacher.soft_labels(context, sources[kind], 2.0) for _ in range(2))
    assert len(stages) == 1, "the second time they are read"
    assert torch.equal(probs, again)
    opened = teacher.open_teacher(sources[kind], 3, 32)
    image = ViewDataset(squares.train, evaluation_views, opened.preprocessing)[5].image[None]
    with torch.no_grad():
        if kind == "timm":
            expected = (network(image) / 2).softmax(dim=1)
        else:
            ensemble = Ensemble([checkpoint.load(folder) for folder in trees[: 1 + (kind == "trees")]])
            expected = (ensemble.class_probs(image).log() / 2).softmax(dim=1)
    torch.testing.assert_close(probs[5:6], expected, atol=1e-5, rtol=1e-4)


def test_images_that_cannot_be_read_have_uniform_labels(tmp_path: Path, trees: list[Path]) -> None:
    data = open_data(write_squares(tmp_path / "squares", train=2, test=1))
    data.train[1].path.write_bytes(b"no image")
    opened = teacher.open_teacher(str(trees[0]), 3, 32)
    probs = teacher.predict_proba(opened, ViewDataset(data.train, evaluation_views, opened.preprocessing), 3, 2.0)
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(6))
    assert [bool((row == 1 / 3).all()) for row in probs] == [False, True, False, False, False, False]


def test_a_teacher_that_does_not_fit_is_refused(tmp_path: Path, trees: list[Path]) -> None:
    with pytest.raises(ConfigError, match="classes"):
        teacher.open_teacher(str(trees[0]), 4, 32)
    torch.save(timm.create_model(NETWORK, num_classes=5).state_dict(), tmp_path / "teacher.pth")
    with pytest.raises(WeightsError):
        teacher.open_teacher(f"{NETWORK}={tmp_path / 'teacher.pth'}", 3, 32)
