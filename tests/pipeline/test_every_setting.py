"""No setting is taken and ignored: each one changes what comes out of a run, or how it is done."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from prototree.config import Config, preset
from prototree.data import open_data
from prototree.errors import DataError
from prototree.features import batches, extract
from prototree.features import cache as feature_cache
from prototree.pipeline.fit import fit
from prototree.settings import Common
from prototree.training import loop
from prototree.training.recipes.distill import Distill
from prototree.training.recipes.paper import Paper
from tiny_training import NETWORK, TINY, TINY_DISTILL, write_squares

QUICK = {"pretrain_epochs": 1, "epochs": 2}
PAPER = TINY | QUICK | {"height": 2, "milestones": (1,)}
DISTILL = TINY_DISTILL | QUICK | {"head_epochs": 2, "weights": "none"}
PRESENCE = DISTILL | {"question": "presence"}

# Another value for every setting whose effect is another tree.
COMMON_CHANGES: dict[str, Any] = {
    "backbone": "test_resnet",
    "feature_level": -2,
    "image_size": 48,
    "resize": 40,
    "prototype_dim": 12,
    "head_hidden_dim": 8,
    "augment": "none",
    "bootstrap": True,
    "fold": "1/3",
    "batch_size": 5,
    "seed": 1,
    "precision": "bfloat16",
    "adam_epsilon": 1e-3,
}
PAPER_CHANGES: dict[str, Any] = {
    "height": 3,
    "prototype_height": 2,
    "prototype_width": 2,
    "epochs": 3,
    "freeze_epochs": 0,
    "train_last_block": False,
    "lr_prototypes": 0.1,
    "lr_last_block": 0.1,
    "lr_backbone": 0.1,
    "weight_decay": 0.5,
    "milestones": (),
    "gamma": 0.1,
    "pretrain_epochs": 2,
    "leaves": "two_pass",
    "cache_views": 1,
}
WARM_CHANGES: dict[str, Any] = {
    "views": 4,
    "center_crop": 0.5,
    "head_epochs": 3,
    "lr_head": 0.1,
    "head_weight_decay": 0.9,
    "single_patch_loss_weight": 0.0,
    "cutmix": 1.0,
    "channel_dropout": 0.5,
    "pooled_dropout": 0.5,
    "epochs": 3,
    "rate": 0.05,
    "weight_decay": 0.9,
    "init_median_distance": 2.0,
    "question": "presence",
    "sharpness_start": 1.5,
    "sharpness": 9.0,
    "sharp_at": 0.2,
    "distill_weight": 0.1,
    "temperature": 9.0,
    "student_temperature_start": 0.1,
    "student_temperature_end": 0.6,
    "memory": 0.0,
    "hiding": 0.0,
    "pretrain_epochs": 2,
}
PRESENCE_CHANGES: dict[str, Any] = {"margin": 2.0, "near": 0.01, "far": 5.0}
# What is shown another way below.
ELSEWHERE = {
    Common: {
        "weights", "test_fraction", "strict", "threshold", "project_within_class", "workers", "engine", "channels_last",
        "checkpoint_minutes",
    },
    Paper: {"teacher", "distill_weight", "temperature", "compile"},
    Distill: {
        "head_views", "tree_views", "patch_fraction", "head_patch_fraction", "max_mean_depth", "continue_fraction",
        "lr_pretrain",
        "hold_out", *PRESENCE_CHANGES,
    },
}  # fmt: skip


def test_no_setting_is_forgotten_here() -> None:
    for kind, changes in ((Common, COMMON_CHANGES), (Paper, PAPER_CHANGES), (Distill, WARM_CHANGES)):
        assert set(kind.names()) == set(changes) | ELSEWHERE[kind]
        assert not set(changes) & ELSEWHERE[kind]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("settings") / "squares", train=4, test=1)


def tree_after(photos: Path, out: Path, settings: Mapping[str, Any]) -> str:
    """What names the trained tree: every number of it."""
    fit(photos, out, settings=settings, stages=["train"])
    return hashlib.sha256((out / "trained" / "weights.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def plain(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plain")
    found = {name: tree_after(photos, folder / name, own) for name, own in (("paper", PAPER), ("distill", DISTILL))}
    # Else every comparison below would succeed.
    assert tree_after(photos, folder / "again", PAPER) == found["paper"]
    assert tree_after(photos, folder / "once more", DISTILL) == found["distill"]
    return found


@pytest.mark.parametrize("name", [*COMMON_CHANGES, *PAPER_CHANGES])
def test_settings_of_the_papers_recipe_change_the_tree(
    photos: Path, plain: dict[str, str], tmp_path: Path, name: str
) -> None:
    changes = {**COMMON_CHANGES, **PAPER_CHANGES}
    assert tree_after(photos, tmp_path / "run", {**PAPER, name: changes[name]}) != plain["paper"]


@pytest.mark.parametrize("name", PRESENCE_CHANGES)
def test_settings_of_presence_change_the_tree(photos: Path, tmp_path: Path, name: str) -> None:
    plain = tree_after(photos, tmp_path / "plain", PRESENCE)
    assert tree_after(photos, tmp_path / "run", {**PRESENCE, name: PRESENCE_CHANGES[name]}) != plain


def test_holding_photos_out_teaches_how_sure_answers_are(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "squares", train=14, test=1)
    for every, fitted in ((2, 21), (0, 0)):
        run = fit(photos, tmp_path / str(every), settings=DISTILL | {"hold_out": every}, stages=["train"])
        assert run.tree().calibration.n_photos == fitted


@pytest.mark.parametrize("name", [*COMMON_CHANGES, *WARM_CHANGES])
def test_settings_of_the_recipe_warm_change_the_tree(
    photos: Path, plain: dict[str, str], tmp_path: Path, name: str
) -> None:
    changes = {**COMMON_CHANGES, **WARM_CHANGES}
    assert tree_after(photos, tmp_path / "run", {**DISTILL, name: changes[name]}) != plain["distill"]


def test_settings_that_only_larger_data_or_other_networks_show(photos: Path) -> None:
    """Where the tiny run cannot show an effect, what the setting decides is asked for directly."""
    assert Distill(tree_views=9_000)._tree_epochs(90, 1.0) == 100
    assert Distill(tree_views=9_000, continue_fraction=0.5)._tree_epochs(90, 0.5) == 50
    from prototree.training import anchored, class_hierarchy

    for share in (Distill(patch_fraction=0.7).patch_fraction, Distill(head_patch_fraction=0.7).head_patch_fraction):
        assert anchored.random_patches(torch.zeros(1, 2, 10, 10), share, fewest=60).shape[1] == 70
        assert anchored.random_patches(torch.zeros(1, 2, 10, 10), share, fewest=80).shape[1] == 80
    means = torch.rand(60, 4, generator=torch.Generator().manual_seed(0)).double().numpy()
    flat, nested = (
        class_hierarchy.hierarchy(means, Distill(max_mean_depth=path).max_mean_depth) for path in (1e9, 7.0)
    )
    assert class_hierarchy.max_mean_depth(nested) < class_hierarchy.max_mean_depth(flat)


def test_a_teacher_and_how_far_it_is_followed_change_the_tree(
    photos: Path, plain: dict[str, str], tmp_path: Path
) -> None:
    fit(photos, tmp_path / "teacher", settings=PAPER, stages=["train"])
    taught = PAPER | {"teacher": str(tmp_path / "teacher")}
    found = [
        tree_after(photos, tmp_path / str(number), taught | more)
        for number, more in enumerate(({}, {"distill_weight": 0.1}, {"temperature": 9.0}))
    ]
    assert len({plain["paper"], *found}) == 4


def test_settings_after_training(photos: Path, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=PAPER | {"threshold": 0.35})
    assert run.metrics["pruning"]["threshold"] == 0.35
    free = fit(photos, tmp_path / "free", settings=PAPER | {"threshold": 0.35, "project_within_class": False})
    assert (run.folder / "projected_any_class").exists()
    assert not (free.folder / "projected_any_class").exists()


def test_settings_of_the_data(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    for place in (write_squares(tmp_path / "squares", train=10, test=1) / "train").iterdir():
        (folder / place.name).parent.mkdir(exist_ok=True)
        place.rename(folder / place.name)
    for share in (0.2, 0.5):
        run = fit(folder, tmp_path / f"{share}", settings=PAPER | {"test_fraction": share}, stages=["train"])
        assert len(open_data(folder, test_fraction=share).test) == round(30 * share)
        assert run.config.test_fraction == share
    next((folder / "red").iterdir()).write_bytes(b"no image")
    fit(folder, tmp_path / "lenient", settings=PAPER, stages=["train"])
    with pytest.raises(DataError):
        fit(folder, tmp_path / "strict", settings=PAPER | {"strict": True}, stages=["train"])


@pytest.mark.parametrize("recipe", [PAPER, DISTILL])
def test_settings_of_the_machine(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: dict[str, Any]
) -> None:
    seen: dict[str, set[Any]] = {"workers": set(), "options": set()}
    for room, name in ((batches, "make_loader"), (extract, "photo_loader")):
        real = getattr(room, name)

        def loader(*args: Any, real: Any = real, **options: Any) -> Any:
            seen["workers"].add(options.get("workers"))
            return real(*args, **{**options, "workers": 0})

        monkeypatch.setattr(room, name, loader)
    start = loop.Loop.__init__

    def watch(self: Any, objective: Any, batches: Any, n_epochs: int, options: Any, observer: Any = None) -> None:
        seen["options"].add((options.channels_last, options.checkpoint_minutes))
        start(self, objective, batches, n_epochs, options, observer)

    monkeypatch.setattr(loop.Loop, "__init__", watch)
    settings = recipe | {"workers": 3, "channels_last": False, "checkpoint_minutes": 7.0}
    fit(photos, tmp_path / "run", settings=settings, stages=["train"])
    assert seen == {"workers": {3}, "options": {(False, 7.0)}}


def test_the_engine_runs_the_frozen_network_and_names_its_maps(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    real, asked = feature_cache.frozen, []

    def pretend(backbone: Any, name: str, threads: int) -> Any:
        asked.append(name)
        return replace(real(backbone), engine=name)

    monkeypatch.setattr(feature_cache, "frozen", pretend)
    for name in ("torch", "onnxruntime"):
        fit(photos, tmp_path / name, settings=DISTILL | {"engine": name})
    assert asked == ["torch"] * 3 + ["onnxruntime"] * 3  # training photos, the same with places hidden, test photos
    names = [path.stem.partition("-")[2] for path in (tmp_path / "prototree-maps").glob("*.f16")]
    assert names.count("onnxruntime") == names.count("")
    assert Config().identity() == Config(engine="auto").identity() != Config(engine="torch").identity()


def test_weights_and_what_tunes_them(photos: Path, tmp_path: Path, plain: dict[str, str]) -> None:
    from safetensors.torch import save_file

    from prototree.backbones.backbone import Backbone

    torch.manual_seed(5)
    state = Backbone(NETWORK, None, image_size=32).net.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w.safetensors")
    given = DISTILL | {"weights": str(tmp_path / "w.safetensors")}
    found = [
        tree_after(photos, tmp_path / str(number), given | more)
        for number, more in enumerate(({}, {"lr_pretrain": 0.05}))
    ]
    assert len({plain["distill"], *found}) == 3


def test_compiling_is_asked_for(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prototree.backbones.backbone import Backbone

    asked: list[str] = []
    monkeypatch.setattr(Backbone, "compile", lambda self: asked.append(self.name))
    fit(photos, tmp_path / "run", settings=PAPER | {"compile": True}, stages=["train"])
    assert asked == [NETWORK]


def test_epochs_of_the_head_follow_the_views_it_is_to_see() -> None:
    from prototree.training.recipes.distill import _epochs_for

    assert _epochs_for(Distill(head_views=600).head_views, 60) == 10


def test_presets_only_name_settings_that_exist() -> None:
    for name in ("default", "demo", "paper-cub", "paper-cars"):
        assert isinstance(preset(name), Config)
