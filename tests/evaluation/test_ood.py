"""Whether a tree notices photos of classes that it does not know, and how that is measured."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from prototree.cli import app
from prototree.core import checkpoint
from prototree.core.confidence import Calibration
from prototree.errors import ConfigError
from prototree.evaluation.metrics import ImagePredictions
from prototree.evaluation.ood import auroc, evaluate_ood, ood_metrics
from prototree.pipeline.fit import fit
from tiny_training import TINY, write_squares


def predictions(confidence: list[float], ood_score: list[float]) -> ImagePredictions:
    zeros = torch.zeros(len(confidence), dtype=torch.long)
    return ImagePredictions(
        *(zeros,) * 7,
        soft_confidence=torch.ones(len(zeros)),
        confidence=torch.tensor(confidence),
        ood_score=torch.tensor(ood_score),
        is_known=torch.tensor(confidence) > 0.5,
        in_top5=zeros.bool(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_auroc_is_the_share_of_pairs_in_the_right_order(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    high = torch.randint(0, 6, (17,), generator=generator).double() + 1
    low = torch.randint(0, 6, (23,), generator=generator).double()
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(high.tolist(), low.tolist())]
    assert auroc(high, low) == pytest.approx(sum(pairs) / len(pairs))


def test_either_doubt_or_distance_gives_an_unknown_class_away() -> None:
    own = predictions(torch.linspace(0.6, 1, 100).tolist(), torch.linspace(0.2, 1, 100).tolist())
    unsure, far, alike = (0.1, 0.5), (0.99, 3.0), (0.95, 0.3)
    found = ood_metrics(own, predictions(*map(list, zip(unsure, far, alike, strict=True))))
    assert found.n_images == 3
    assert found.fpr_at_95_tpr == pytest.approx(1 / 3)
    assert found.coverage == pytest.approx(2 / 3), "by what was stored in the tree"
    assert found.auroc["both"] > max(found.auroc["confidence"], found.auroc["distance"])
    assert ood_metrics(own, own).fpr_at_95_tpr >= 0.95


def test_a_run_and_images_of_no_known_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROTOTREE_CACHE", str(tmp_path / "cache"))
    run = fit(write_squares(tmp_path / "squares"), tmp_path / "run", settings=TINY)
    noise = tmp_path / "noise"
    noise.mkdir()
    for i in range(5):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(noise / f"{i}.png")
    with pytest.raises(ConfigError, match="calibrated"):
        evaluate_ood(run.folder, [noise])
    tree = run.tree()
    tree.calibration = replace(Calibration(), n_images=30)
    checkpoint.save(tree, run.folder / "projected")
    found = evaluate_ood(run.folder, [noise])["noise"]
    assert found.n_images == 5
    assert run.metrics["ood"]["noise"]["auroc"] == found.auroc
    with pytest.raises(ConfigError, match="names"):
        evaluate_ood(run.folder, [noise, noise])


def test_one_command_measures_prototypes_and_unknown_classes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []
    for name in ("_rerun", "_print_metrics", "_print_errors", "_print_prototype_quality", "_print_ood"):
        monkeypatch.setattr(f"prototree.cli.train.{name}", lambda *_, name=name: done.append(name))
    for options in (["--ood", "x"], ["--ood", "x", "--prototypes", "--errors", "3"]):
        assert CliRunner().invoke(app, ["evaluate", str(tmp_path), *options]).exit_code == 0
    assert done == ["_print_ood", "_rerun", "_print_metrics", "_print_errors", "_print_prototype_quality", "_print_ood"]
