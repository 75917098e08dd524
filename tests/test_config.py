from pathlib import Path

import pytest

from prototree.config import Config, default_height, preset, preset_names, read_config
from prototree.errors import ConfigError


def test_presets_hold_the_papers_tables() -> None:
    cub, cars = preset("cub"), preset("cars")
    assert {"auto", "cars", "cub", "demo"} <= set(preset_names())
    assert (cub.height, cub.depth, cub.epochs, cub.lr_trunk, cub.threshold) == (9, 256, 100, 1e-5, 0.01)
    assert cub.milestones == (60, 70, 80, 90, 100)
    assert (cars.height, cars.depth, cars.epochs, cars.lr_trunk, cars.threshold) == (11, 128, 500, 2e-4, 0.01)
    assert cars.milestones == (250, 350, 400, 425, 450, 475, 500)
    for config in (cub, cars):
        assert (config.batch_size, config.image_size, config.freeze_epochs, config.gamma) == (64, 224, 30, 0.5)
        assert (config.lr_prototypes, config.lr_tail, config.weight_decay) == (1e-3, 1e-3, 0)
        assert (config.backbone, config.leaves, config.train_tail) == ("resnet50", "interleaved", True)
    assert (cub.augment, cars.augment, cars.resize) == ("cub", "cars", 256)


def test_settings_go_to_toml_and_back(tmp_path: Path) -> None:
    config = preset("cars").changed({"weights": 'a "b" \\ ü\n', "seed": 7, "compile": True})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert read_config(tmp_path / "config.toml") == config


def test_a_file_can_be_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("height = 5\nmilestones = [3, 4]\n")
    assert preset(str(tmp_path / "mine.toml")) == Config(height=5, milestones=(3, 4))


def test_text_is_read_as_what_the_key_needs() -> None:
    config = Config().changed({"height": "8", "lr_tail": "1e-2", "milestones": "3,5 8", "compile": "yes"})
    assert (config.height, config.lr_tail, config.milestones, config.compile) == (8, 0.01, (3, 5, 8), True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_decay_rate": 1}, "unknown key 'weight_decay_rate'; did you mean 'weight_decay'?"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; expected one of backbone,"),
        ({"height": "tall"}, "expected a whole number for height, got 'tall'"),
        ({"height": 2.5}, "expected a whole number for height, got 2.5"),
        ({"height": 21}, "expected height from 0 to 20, got 21"),
        ({"lr_tail": "nan"}, "expected lr_tail from 0 to 100, got nan"),
        ({"leaves": "magic"}, "expected one of 'interleaved', 'two_pass', 'gradient' for leaves, got 'magic'"),
        ({"compile": "perhaps"}, "expected true or false for compile, got 'perhaps'"),
        ({"milestones": "a"}, "expected whole numbers for milestones, got 'a'"),
        ({"milestones": [5, 3]}, "milestones in rising order"),
        (
            {"recipe": "warm", "train_tail": True},
            "'warm' does not go with train_tail True, head_width 0, cache_views 0",
        ),
        ({"test_share": 1}, "expected test_share from 0.01 to 0.99, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().changed(values)
    assert message in str(caught.value)


def test_presets_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'cup'; expected auto, cars, cub"):
        preset("cup")
    (tmp_path / "bad.toml").write_text("height = [")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read as TOML"):
        preset(str(tmp_path / "bad.toml"))


def test_heights_follow_the_number_of_classes() -> None:
    assert [default_height(k) for k in (2, 3, 12, 50, 196, 200, 256, 257)] == [2, 3, 5, 7, 9, 9, 9, 10]
