"""Settings: presets, the TOML file, what is refused, and what follows from the data."""

import importlib.resources
from pathlib import Path

import pytest

from prototree.config import (
    Common,
    Config,
    DistillSettings,
    PaperSettings,
    default_height,
    default_temperature,
    default_threshold,
    load_preset,
    preset_names,
    preset_values,
    read_config,
)
from prototree.errors import ConfigError


def recipe_of(config: Config) -> PaperSettings:
    assert isinstance(config.recipe, PaperSettings)
    return config.recipe


def test_presets_hold_the_papers_tables() -> None:
    cub, cars = load_preset("paper-cub"), load_preset("paper-cars")
    assert {"default", "demo", "paper-cars", "paper-cub", "paper-small"} <= set(preset_names())
    recipe = recipe_of(cub)
    assert (recipe.height, cub.prototype_dim, recipe.epochs, recipe.lr_backbone) == (9, 256, 100, 1e-5)
    assert recipe.milestones == (60, 70, 80, 90, 100)
    recipe = recipe_of(cars)
    assert (recipe.height, cars.prototype_dim, recipe.epochs, recipe.lr_backbone) == (11, 128, 500, 2e-4)
    assert recipe.milestones == (250, 350, 400, 425, 450, 475, 500)
    for config in (cub, cars):
        recipe = recipe_of(config)
        assert (config.batch_size, config.image_size, recipe.freeze_epochs) == (64, 224, 30)
        assert (config.prune_threshold, recipe.weight_decay, recipe.adam_epsilon) == (0.01, 0, 1e-7)
        assert recipe.lr_prototypes == recipe.lr_last_block == 1e-3
        assert (config.backbone, config.head_hidden_dim) == ("resnet50", 0)
        assert (recipe.leaf_update, recipe.train_last_block, recipe.prototype_size) == ("interleaved", True, 1)
    assert (cub.augment, cars.augment, cars.resize) == ("cub", "cars", 256)
    assert not any(recipe_of(config).baseline or recipe_of(config).cache_views for config in (cub, cars))
    assert set(preset_values(DistillSettings)) == {"default", "demo"}
    assert set(preset_values(Common)) == set(preset_names())


def test_the_small_preset_is_the_papers_but_for_what_its_file_lists() -> None:
    small, cub = load_preset("paper-small"), load_preset("paper-cub")
    text = (importlib.resources.files("prototree") / "configs" / "paper-small.toml").read_text()
    listed = {line.split()[1] for line in text.splitlines() if line.startswith("#   ")}
    values = [config.values() | config.recipe.values() for config in (small, cub)]
    differing = {key for key in values[0] if values[0][key] != values[1][key]}
    assert differing - {"freeze_epochs"} == listed
    recipe = recipe_of(small)
    halvings = sum(milestone <= recipe.freeze_epochs for milestone in recipe.milestones)
    assert recipe.freeze_epochs < recipe.epochs
    assert recipe.lr_backbone / 2**halvings == pytest.approx(1e-5, rel=0.3)  # the rate of paper-cub
    assert (recipe_of(small.for_data(200)).height, small.for_data(200).prune_threshold) == (9, 0.01)


@pytest.mark.parametrize("name", ["default", "demo", "paper-cub", "paper-cars", "paper-small"])
def test_settings_go_to_toml_and_back(tmp_path: Path, name: str) -> None:
    config = load_preset(name).replace({"weights": 'a "b" \\ ü\n', "seed": 7, "weight_decay": 0.5, "resize": "auto"})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert read_config(tmp_path / "config.toml") == config
    for item in (*Common.fields(), *config.recipe.fields()):
        assert f"{item.key} = " in config.to_toml()
        assert item.help in config.to_toml()


def test_a_file_can_be_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 3\n[paper]\nheight = 5\nmilestones = [3, 4]\n")
    expected = Config(seed=3, recipe=PaperSettings(height=5, milestones=(3, 4)))
    assert load_preset(str(tmp_path / "mine.toml")) == expected
    with pytest.raises(ConfigError, match="earlier version"):
        read_config(tmp_path / "mine.toml")  # a run's file has a version


def test_text_is_read_as_what_the_setting_needs() -> None:
    values = {"height": "8", "lr_last_block": "1e-2", "milestones": "3,5 8", "bootstrap": "yes", "resize": "auto"}
    recipe = PaperSettings(height=8, lr_last_block=0.01, milestones=(3, 5, 8))
    assert Config(resize=99).replace(values) == Config(bootstrap=True, recipe=recipe)
    assert Config().replace({"height": "auto"}).recipe == PaperSettings(height=None)


@pytest.mark.parametrize(
    ("values", "token"),
    [
        ({"weight_decay_rate": 1}, "did you mean 'weight_decay'"),
        ({"xyzzy": 1}, "xyzzy"),
        ({"height": "tall"}, "whole number for height"),
        ({"height": 2.5}, "whole number for height"),
        ({"height": 21}, "height from 1 to 20"),
        ({"seed": "auto"}, "whole number for seed"),
        ({"lr_last_block": "nan"}, "lr_last_block"),
        ({"leaf_update": "magic"}, "'two_pass'"),
        ({"bootstrap": "perhaps"}, "true or false"),
        ({"milestones": "a"}, "whole numbers"),
        ({"milestones": [5, 3]}, "rising order"),
        ({"epochs": 0}, "epochs"),
        ({"recipe": "distill"}, "head_hidden_dim"),
        ({"recipe": "distill", "head_hidden_dim": 8, "center_crop": 0.05}, "center_crop"),
        ({"recipe": "cold"}, "'distill'"),
        ({"test_fraction": 1}, "test_fraction"),
        ({"learning_rate": 0.1}, "lr_prototypes"),
        ({"paper": {"lr": 0.1}}, "lr"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, object], token: str) -> None:
    with pytest.raises(ConfigError, match=token):
        Config().replace(values)


# In the default recipe these were once taken and ignored without a word.
@pytest.mark.parametrize("name", ["height", "leaf_update", "teacher", "milestones", "lr_prototypes"])
def test_a_setting_of_another_recipe_is_refused(name: str) -> None:
    value = PaperSettings().values()[name]
    for values in ({name: value}, {"paper": {name: value}}):
        with pytest.raises(ConfigError, match="recipe 'paper'"):
            load_preset("default").replace(values)
    config = load_preset("default").replace({"recipe": "paper", name: value})
    assert (config.recipe, config.image_size) == (PaperSettings(), None)


@pytest.mark.parametrize("content", ["height = [", "version = 99\n", "version = 'a'\n"])
def test_files_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    for name in (str(tmp_path / "bad.toml"), "cup"):
        with pytest.raises(ConfigError):
            load_preset(name)


def test_only_what_changes_the_result_decides_whether_a_run_can_be_resumed() -> None:
    config = load_preset("default")
    assert config.replace({"workers": 7, "fail_on_bad_images": True}).resume_key() == config.resume_key()
    for name, value in {"seed": 5, "lr": 0.2, "views": 5, "image_size": 64, "inference_backend": "torch"}.items():
        assert config.replace({name: value}).resume_key() != config.resume_key(), name


def test_auto_follows_from_the_number_of_classes() -> None:
    assert [default_height(k) for k in (2, 3, 12, 50, 196, 200, 256, 257)] == [2, 3, 5, 7, 9, 9, 9, 10]
    assert [default_threshold(k) for k in (2, 3, 200)] == [0.75, pytest.approx(2 / 3), 0.01]
    assert [default_temperature(k) for k in (2, 12, 50, 200, 10_000)] == pytest.approx(
        [2.5, 2.5, 2.5, 1.95, 1.47], abs=0.01
    )
    config = load_preset("paper-cub").replace({"height": "auto", "prune_threshold": "auto"}).for_data(3)
    assert (recipe_of(config).height, config.resize, config.prune_threshold) == (3, 224, pytest.approx(2 / 3))
    kept = load_preset("paper-cars").for_data(3)
    assert (recipe_of(kept).height, kept.resize, kept.prune_threshold) == (11, 256, 0.01)
