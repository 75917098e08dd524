"""Calibration on held-out images: the sharpness that makes probabilities true, and what runs share of it."""

import copy
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from prototree import fit
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.data.crops import FULL_IMAGE
from prototree.data.dataset import Sample
from prototree.data.loader import Entry
from prototree.features.cache import FOLDER, FeatureMaps
from prototree.io import write_json
from prototree.training import calibrate
from prototree.training.calibrate import CalibrationFile, Fitted, HeldOut, fit_sharpness, held_out_images
from tiny_training import TINY_DISTILL, save_weights, write_squares

TRUE = 8.0


def held_out(tree: ProtoTree, sharpness: float, count: int = 4000) -> HeldOut:
    """Images whose labels follow Eq. 4 with this sharpness: then its probabilities are true."""
    generator = torch.Generator().manual_seed(0)
    distance = 1.5 * torch.rand(count, tree.n_prototypes, generator=generator)
    images = HeldOut(distance, torch.zeros(count, dtype=torch.long))
    probs = tree.decode(images.forward(tree, replace(tree.node_function, sharpness=sharpness))).soft
    return replace(images, labels=torch.multinomial(probs, 1, generator=generator)[:, 0])


@pytest.fixture
def tree(tiny_tree: ProtoTree) -> ProtoTree:
    tree = ProtoTree(Topology.full(3), tiny_tree.features, 5, node_function=NodeFunction("pairwise", 0.5 * TRUE))
    tree.leaf_logits.data.copy_(12 * torch.eye(8)[:, :5])
    return tree.eval()


def test_the_fitted_sharpness_makes_probabilities_true(tree: ProtoTree) -> None:
    images = held_out(tree, TRUE)
    sharper = copy.copy(tree)
    fitted = calibrate.fit(sharper, images)
    assert 0.8 * TRUE <= fitted.sharpness <= TRUE, "the least that the images cannot tell from the best"
    assert sharper.node_function.sharpness == fitted.sharpness
    errors = []
    for each in (tree, sharper):
        confidence, predicted = each.decode(images.forward(each)).soft.max(dim=1)
        errors.append(float((confidence.mean() - (predicted == images.labels).float().mean()).abs()))
    assert errors[1] < 0.04 < errors[0], "it was less sure than right"
    prediction = sharper.decode(images.forward(sharper))
    accuracy = (prediction.labels("greedy") == images.labels).float().mean()
    assert fitted.calibration.n_images == 4000
    assert float(fitted.calibration.of(prediction.margin).mean()) == pytest.approx(float(accuracy), abs=0.01)
    assert fitted.apply_to(tree) is tree
    assert (tree.node_function.sharpness, tree.calibration) == (fitted.sharpness, fitted.calibration)


def test_few_images_change_little_and_none_make_decisions_softer(tree: ProtoTree) -> None:
    start = tree.node_function.sharpness
    few, many = (fit_sharpness(tree, held_out(tree, TRUE, count)) for count in (40, 4000))
    assert start <= few <= many
    assert fit_sharpness(tree, held_out(tree, start)) == start
    assert fit_sharpness(tree, held_out(tree, start / 2)) == start
    assert fit_sharpness(tree, held_out(tree, 64.0)) <= 3 * start


@pytest.mark.parametrize(
    ("n_images", "fraction", "expected"), [(100, 0.2, 20), (96, 0.2, 0), (96, 0.5, 48), (900, 0.0, 0)]
)
def test_every_nth_image_of_each_class_is_held_out(n_images: int, fraction: float, expected: int) -> None:
    entries = [
        Entry(i, Sample(Path(f"{i}.png"), i % 4), view)
        for i in range(n_images)
        for view in (FULL_IMAGE, replace(FULL_IMAGE))
    ]
    chosen = held_out_images(entries, fraction)
    assert len(chosen) == expected
    assert not chosen or torch.tensor([i % 4 for i in chosen]).bincount().tolist() == [expected // 4] * 4


def test_images_of_a_group_are_held_out_together() -> None:
    entries = [Entry(i, Sample(Path(f"{i}.png"), i % 4, group=f"{i // 3}"), FULL_IMAGE) for i in range(240)]
    chosen = held_out_images(entries, 0.2)
    assert chosen == {i for group in {i // 3 for i in chosen} for i in range(3 * group, 3 * group + 3)}
    assert 36 <= len(chosen) <= 60


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("held") / "squares", train=14, test=1)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The same network for all seeds."""
    weights = save_weights(tmp_path_factory.mktemp("weights") / "weights.safetensors")
    short = {"pretrain_epochs": 0, "head_epochs": 2, "epochs": 2, "calibration_fraction": 0.5}
    return TINY_DISTILL | {"weights": weights} | short


def train(images: Path, run: Path, settings: dict[str, object]) -> ProtoTree:
    return fit(images, run, settings=settings, stages=["train"]).tree("trained")


def test_seeds_share_a_calibration(
    images: Path, settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, then = (train(images, tmp_path / str(seed), settings | {"seed": seed}) for seed in (0, 1))
    assert first.calibration.n_images == 21
    assert (then.calibration, then.node_function) == (first.calibration, first.node_function)
    assert not torch.equal(first.prototypes, then.prototypes)
    trained = [(tmp_path / str(seed) / "checkpoints" / "calibration").exists() for seed in (0, 1)]
    assert trained == [True, False]
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != FOLDER)  # a cache that is read-only
    last = train(images, tmp_path / "2", settings | {"seed": 2})
    assert (last.calibration, last.node_function) == (first.calibration, first.node_function)
    assert not (tmp_path / "2" / "checkpoints" / "calibration").exists()


def test_networks_that_learn_are_calibrated_for_each_seed(
    images: Path, settings: dict[str, object], tmp_path: Path
) -> None:
    random = settings | {"weights": "none"}
    calibrations = [train(images, tmp_path / str(seed), random | {"seed": seed}).calibration for seed in (0, 1)]
    assert calibrations[0] != calibrations[1]
    assert len(list((tmp_path / FOLDER).glob("calibration-*.json"))) == 2


def test_a_calibration_is_of_the_same_images_labels_and_settings(tmp_path: Path) -> None:
    fitted = Fitted(7.2, Calibration(0.1, 0.2, 30, 0.4, 1.5))

    def saved(label: int = 0, save: bool = False, damage: str | dict[str, object] = "", **settings: object) -> object:
        entry = Entry(0, Sample(Path("a.png"), label), FULL_IMAGE)
        with CalibrationFile.of(tmp_path / "run", [FeatureMaps((), (entry,), frozenset())], settings) as file:
            if save:
                assert file.save(fitted) == fitted
            if isinstance(damage, dict):
                write_json(file.path, damage)
            elif damage:
                file.path.write_text(damage)
            return file.saved

    assert saved(depth=1) is None
    assert saved(depth=1, save=True) == saved(depth=1) == fitted
    assert saved(depth=2) is None
    assert saved(label=1, depth=1) is None
    text = json.loads(next((tmp_path / FOLDER).glob("calibration-*.json")).read_text())
    flipped = json.dumps(text | {"calibration": text["calibration"] | {"slope": 9.4}})  # its checksum is wrong
    impossible = {"sharpness": 7.2, "calibration": asdict(fitted.calibration) | {"least": 7.0}}
    for damage in ("{}", "[]", "nonsense", flipped, impossible, impossible | {"sharpness": -1}):
        assert saved(depth=1, damage=damage) is None, damage
