import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prototree
from prototree.config import Config, preset, preset_names, read_config
from prototree.errors import ConfigError
from prototree.settings import Common
from prototree.training.recipes import RECIPES
from prototree.training.recipes.distill import Distill
from prototree.training.recipes.paper import Paper, default_height


def recipe_of(config: Config) -> Paper:
    assert isinstance(config.recipe, Paper)
    return config.recipe


def test_presets_hold_the_papers_tables() -> None:
    cub, cars = preset("paper-cub"), preset("paper-cars")
    assert {"default", "demo", "paper-cars", "paper-cub"} <= set(preset_names())
    own = recipe_of(cub)
    assert (own.height, cub.prototype_dim, own.epochs, own.lr_backbone, cub.threshold) == (9, 256, 100, 1e-5, 0.01)
    assert own.milestones == (60, 70, 80, 90, 100)
    own = recipe_of(cars)
    assert (own.height, cars.prototype_dim, own.epochs, own.lr_backbone, cars.threshold) == (11, 128, 500, 2e-4, 0.01)
    assert own.milestones == (250, 350, 400, 425, 450, 475, 500)
    for config in (cub, cars):
        own = recipe_of(config)
        assert (config.batch_size, config.image_size, own.freeze_epochs, own.gamma) == (64, 224, 30, 0.5)
        assert (own.lr_prototypes, own.lr_last_block, own.weight_decay) == (1e-3, 1e-3, 0)
        assert (config.backbone, config.head_hidden_dim, own.leaves, own.train_last_block) == (
            "resnet50",
            0,
            "interleaved",
            True,
        )
    assert (cub.augment, cars.augment, cars.resize) == ("cub", "cars", 256)


@pytest.mark.parametrize("name", ["default", "demo", "paper-cub", "paper-cars"])
def test_settings_go_to_toml_and_back(tmp_path: Path, name: str) -> None:
    config = preset(name).changed({"weights": 'a "b" \\ ü\n', "seed": 7, "weight_decay": 0.5})
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert read_config(tmp_path / "config.toml") == config


def test_a_configuration_explains_itself() -> None:
    text = preset("default").to_toml()
    for one in (*Common.described(), *Distill.described()):
        assert f"{one.key} = " in text
        assert one.about.meaning in text
    assert "[distill]" in text
    assert "[paper]" not in text


def test_a_file_can_be_a_preset(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("seed = 3\n[paper]\nheight = 5\nmilestones = [3, 4]\n")
    assert preset(str(tmp_path / "mine.toml")) == Config(seed=3, recipe=Paper(height=5, milestones=(3, 4)))


def test_text_is_read_as_what_the_setting_needs() -> None:
    values = {"height": "8", "lr_last_block": "1e-2", "milestones": "3,5 8", "compile": "yes", "seed": "4"}
    config = Config().changed(values)
    assert config == Config(seed=4, recipe=Paper(height=8, lr_last_block=0.01, milestones=(3, 5, 8), compile=True))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight_decay_rate": 1}, "unknown key 'weight_decay_rate'; did you mean 'weight_decay'?"),
        ({"xyzzy": 1}, "unknown key 'xyzzy'; expected one of backbone,"),
        ({"height": "tall"}, "expected a whole number for height, got 'tall'"),
        ({"height": 2.5}, "expected a whole number for height, got 2.5"),
        ({"height": 21}, "expected height from 0 to 20, got 21"),
        ({"lr_last_block": "nan"}, "expected lr_last_block from 0 to 100, got nan"),
        ({"leaves": "magic"}, "expected one of 'interleaved', 'two_pass', 'gradient' for leaves, got 'magic'"),
        ({"compile": "perhaps"}, "expected true or false for compile, got 'perhaps'"),
        ({"milestones": "a"}, "expected whole numbers for milestones, got 'a'"),
        ({"milestones": [5, 3]}, "milestones in rising order"),
        ({"epochs": 0}, "expected epochs from 1 to"),
        ({"recipe": "distill"}, "expected head_hidden_dim of at least 1, got 0"),
        ({"recipe": "cold"}, "expected one of 'paper', 'distill' for recipe, got 'cold'"),
        ({"test_fraction": 1}, "expected test_fraction from 0.01 to 0.99, got 1"),
    ],
)
def test_what_does_not_fit_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config().changed(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(("recipe", "meant"), [("distill", "rate"), ("paper", "lr_prototypes")])
@pytest.mark.parametrize("key", ["learning_rate", "lr"])
def test_the_learning_rate_that_people_mean_is_named(key: str, recipe: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        preset("default").changed({"recipe": recipe, key: 0.1})


# In the default recipe these were once taken and ignored without a word.
@pytest.mark.parametrize("name", ["height", "leaves", "teacher", "compile", "milestones", "gamma", "lr_prototypes"])
def test_a_setting_that_the_recipe_does_not_use_is_refused_with_the_one_that_does(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is a setting of the recipe 'paper', which the recipe 'distill'"):
        preset("default").changed({name: Paper().values()[name]})
    with pytest.raises(ConfigError, match="'paper' is a setting of the recipe 'paper'"):
        preset("default").changed({"paper": {name: Paper().values()[name]}})


def test_a_setting_of_another_recipe_goes_with_that_recipe() -> None:
    config = preset("default").changed({"recipe": "paper", "height": 5})
    assert recipe_of(config) == Paper(height=5)
    assert config.image_size == 288


def test_presets_and_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no preset 'cup'; expected default, demo, paper-cars"):
        preset("cup")
    (tmp_path / "bad.toml").write_text("height = [")
    with pytest.raises(ConfigError, match=r"bad\.toml cannot be read as TOML"):
        preset(str(tmp_path / "bad.toml"))
    (tmp_path / "later.toml").write_text("version = 99\n")
    with pytest.raises(ConfigError, match="has version 99, this program reads up to 3; update prototree"):
        preset(str(tmp_path / "later.toml"))


def test_a_configuration_of_an_earlier_version_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('version = 2\nrecipe = "warm"\n')
    with pytest.raises(ConfigError, match="earlier version"):
        read_config(tmp_path / "config.toml")


def test_only_what_changes_the_result_decides_whether_a_run_can_be_continued() -> None:
    config = preset("default")
    assert config.changed({"workers": 7, "checkpoint_minutes": 1, "strict": True}).identity() == config.identity()
    for name, value in {"seed": 5, "margin": 0.2, "patch_fraction": 0.6, "tree_views": 5, "image_size": 64}.items():
        assert config.changed({name: value}).identity() != config.identity(), name


@pytest.mark.parametrize("kind", [Common, *RECIPES.values()])
def test_every_setting_says_what_it_means_and_when_to_touch_it(kind: type[Common]) -> None:
    for one in kind.described():
        assert one.about.meaning, one.key
        assert one.about.touch.endswith("."), one.key
        assert one.about.group, one.key
        numbers = one.kind in (int, float) or one.key == "milestones"
        assert numbers == (one.about.low is not None and one.about.high is not None), one.key


def test_the_default_height_leaves_room_for_every_class() -> None:
    assert [default_height(k) for k in (2, 3, 12, 50, 196, 200, 256, 257)] == [2, 3, 5, 7, 9, 9, 9, 10]


def test_a_third_recipe_is_one_new_file(tmp_path: Path) -> None:
    shutil.copytree(Path(prototree.__file__).parent, tmp_path / "prototree")
    (tmp_path / "prototree" / "training" / "recipes" / "third.py").write_text(
        textwrap.dedent(
            """
            from dataclasses import dataclass
            from typing import ClassVar

            from prototree.settings import setting
            from prototree.training.recipes.recipe import Recipe


            @dataclass(frozen=True)
            class Third(Recipe):
                name: ClassVar[str] = "third"
                summary: ClassVar[str] = "a third way"
                patience: int = setting(3, "how long it waits", touch="Rarely.", group="time", low=1, high=9)
            """
        )
    )
    code = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from prototree.cli.options import whole_help
        from prototree.config import Config
        from prototree.errors import ConfigError
        config = Config().changed({{"recipe": "third", "patience": "5"}})
        assert config.recipe.patience == 5 and "[third]" in config.to_toml() and "--patience" in whole_help()
        try:
            Config().changed({{"patience": 5}})
        except ConfigError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=3600)
    assert done.stdout.startswith("'patience' is a setting of the recipe 'third'"), done.stderr
