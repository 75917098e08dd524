"""No setting is taken and ignored: each one changes what comes out of a run, or how it is done."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from prototree import training
from prototree.config import RECIPE_SETTINGS, Common, Config, DistillSettings, PaperSettings, RecipeSettings, setting
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.errors import ConfigError, DataError
from prototree.features import cache as feature_cache
from prototree.features import extract
from prototree.pipeline.fit import fit
from prototree.training import paper
from prototree.training.loop import Context
from tiny_training import TINY, TINY_DISTILL, save_weights, write_squares

QUICK = {"pretrain_epochs": 1, "epochs": 2}
PAPER = TINY | QUICK | {"height": 2, "milestones": (1,)}
DISTILL = TINY_DISTILL | QUICK | {"head_epochs": 2, "weights": "none"}

# Another value for every setting whose effect is another tree.
COMMON_CHANGES: dict[str, Any] = {
    "backbone": "test_resnet", "feature_level": -2, "image_size": 48, "resize": 40, "prototype_dim": 12,
    "head_hidden_dim": 8, "augment": "none", "bootstrap": True, "fold": "1/3", "batch_size": 5, "seed": 1,
    "precision": "bfloat16", "backbone_options": "pad_type=same", "pretrain_epochs": 2,
}  # fmt: skip
PAPER_CHANGES: dict[str, Any] = {
    "height": 3, "prototype_size": 2, "epochs": 3, "freeze_epochs": 0, "train_last_block": False, "lr_prototypes": 0.1,
    "lr_last_block": 0.1, "lr_backbone": 0.1, "weight_decay": 0.5, "adam_epsilon": 1e-3, "milestones": (),
    "leaf_update": "two_pass", "cache_views": 1, "freeze_batch_norm": True,
}  # fmt: skip
DISTILL_CHANGES: dict[str, Any] = {
    "views": 4, "center_crop": 0.5, "head_epochs": 3, "epochs": 3, "lr": 0.05, "weight_decay": 0.9,
    "sharpness": 9.0, "occlusion_weight": 0.0, "distill_weight": 0.1, "distill_temperature": 9.0,
}  # fmt: skip
# What is tested in another way below, in test_run (pruning, projection), or in training (test_paper, test_calibrate,
# test_last_blocks).
ELSEWHERE: dict[type, set[str]] = {
    Common: {
        "weights", "test_fraction", "fail_on_bad_images", "prune_threshold", "project_within_class", "workers",
        "inference_backend",
    },
    PaperSettings: {"teacher", "distill_weight", "distill_temperature", "baseline"},
    DistillSettings: {"calibration_fraction", "finetune_blocks"},
}  # fmt: skip


def test_no_setting_is_forgotten_here() -> None:
    for kind, changes in ((Common, COMMON_CHANGES), (PaperSettings, PAPER_CHANGES), (DistillSettings, DISTILL_CHANGES)):
        assert set(kind.names()) == set(changes) | ELSEWHERE[kind]
        assert not set(changes) & ELSEWHERE[kind]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("settings") / "squares", train=4, test=1)


def train(images: Path, out: Path, settings: Mapping[str, Any]) -> str:
    """Name the trained tree by every number of it."""
    fit(images, out, settings=settings, stages=["train"])
    return hashlib.sha256((out / "trained" / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def plain(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plain")
    trees = {name: train(images, folder / name, own) for name, own in (("paper", PAPER), ("distill", DISTILL))}
    assert train(images, folder / "again", PAPER) == trees["paper"], "else every comparison below would succeed"
    assert train(images, folder / "once more", DISTILL) == trees["distill"]
    return trees


def changes_of(recipe: str, changes: dict[str, Any]) -> list[Any]:
    """Common settings are quick to try with the paper's recipe, and slow with the other."""
    slow = [pytest.mark.slow] if recipe == "distill" else []
    common = [pytest.param(recipe, item, id=f"{recipe}-{item[0]}", marks=slow) for item in COMMON_CHANGES.items()]
    return common + [pytest.param(recipe, item, id=f"{recipe}-{item[0]}") for item in changes.items()]


@pytest.mark.parametrize(
    ("recipe", "change"), [*changes_of("paper", PAPER_CHANGES), *changes_of("distill", DISTILL_CHANGES)]
)
def test_every_setting_changes_the_tree(
    images: Path, plain: dict[str, str], tmp_path: Path, recipe: str, change: tuple[str, Any]
) -> None:
    settings = (PAPER if recipe == "paper" else DISTILL) | dict([change])
    assert train(images, tmp_path / "run", settings) != plain[recipe]


def test_weights_a_teacher_and_how_far_it_is_followed_change_the_tree(
    images: Path, plain: dict[str, str], tmp_path: Path
) -> None:
    weights = save_weights(tmp_path / "w.safetensors", seed=5)
    assert train(images, tmp_path / "run", DISTILL | {"weights": weights}) != plain["distill"]
    fit(images, tmp_path / "teacher", settings=PAPER, stages=["train"])
    taught = PAPER | {"teacher": str(tmp_path / "teacher")}
    changes = ({}, {"distill_weight": 0.1}, {"distill_temperature": 9.0})
    trees = [train(images, tmp_path / str(number), taught | more) for number, more in enumerate(changes)]
    assert len({plain["paper"], *trees}) == 4


def test_settings_of_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    folder.mkdir()
    for part in (write_squares(tmp_path / "squares", train=10, test=1) / "train").iterdir():
        part.rename(folder / part.name)
    run = fit(folder, tmp_path / "half", settings=PAPER | {"test_fraction": 0.5}, stages=["train"])
    assert len(run.data().test) == 15
    next((folder / "red").iterdir()).write_bytes(b"no image")
    with pytest.raises(DataError):
        fit(folder, tmp_path / "strict", settings=PAPER | {"fail_on_bad_images": True}, stages=["train"])


@pytest.mark.parametrize("recipe", [PAPER, DISTILL])
def test_the_number_of_workers_is_that_of_the_loaders(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    seen: set[Any] = set()
    for module, name in ((paper, "make_loader"), (feature_cache, "make_loader"), (extract, "image_loader")):
        real = getattr(module, name)

        def loader(*args: Any, real: Any = real, **options: Any) -> Any:
            seen.add(options.get("workers"))
            return real(*args, **{**options, "workers": 0})

        monkeypatch.setattr(module, name, loader)
    fit(images, tmp_path / "run", settings=recipe | {"workers": 3, "prune_threshold": 0.34})
    assert seen == {3}


def test_the_backend_runs_the_frozen_network_and_names_its_maps(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    real, asked = feature_cache.frozen, []

    def pretend(backbone: Any, name: str, threads: int) -> Any:
        asked.append(name)
        return replace(real(backbone), engine=name)

    monkeypatch.setattr(feature_cache, "frozen", pretend)
    used = []
    for name in ("torch", "onnxruntime"):
        run = fit(images, tmp_path / name, settings=DISTILL | {"inference_backend": name})
        used.append(set(feature_cache.files_used(run.folder)))
    assert asked == ["torch"] * 3 + ["onnxruntime"] * 3  # training images, the same occluded, test images
    assert len(used[0]) == len(used[1])
    assert not used[0] & used[1]


@dataclass(frozen=True)
class MineSettings(RecipeSettings):
    """A third recipe."""

    name: ClassVar[str] = "mine"
    summary: ClassVar[str] = "leaves that count, prototypes that stay"
    patience: int = setting(2, "time", (1, 9), "how long it trains", when="Rarely.")


def train_mine(context: Context, cfg: MineSettings, start: ProtoTree | None = None) -> ProtoTree:
    """The whole of it: one function."""
    torch.manual_seed(context.config.seed)
    backbone = context.backbone()
    tree = ProtoTree(Topology.full(2), context.features(backbone), context.data.class_names)
    images = paper.augmented_images(context, backbone)
    batches = paper.Batches(context, images, PaperSettings(), tree)
    for _ in range(cfg.patience):
        paper.refit_leaves(tree, ((output, batch.labels) for output, batch in batches.forward(tree)))
    return tree


def test_a_third_recipe_is_a_function_and_its_settings(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(training.RECIPES, "mine", train_mine)
    monkeypatch.setitem(RECIPE_SETTINGS, "mine", MineSettings)
    common = {key: value for key, value in TINY.items() if key in Common.names()}
    settings = common | {"recipe": "mine", "patience": 3, "prune_threshold": 0.0}
    run = fit(images, tmp_path / "run", preset="paper-cub", settings=settings)
    assert set(run.metrics["seconds"]) == {"train", "prune", "project", "evaluate"}
    assert run.config.recipe == MineSettings(patience=3)
    assert all(source is not None for source in run.tree().sources)
    with pytest.raises(ConfigError, match="mine"):
        Config().replace({"patience": 5})
