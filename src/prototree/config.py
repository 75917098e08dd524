"""Settings of a run: those of every run, those of one recipe, presets, and the TOML file. No torch here.

In `config.toml` the common settings stand first and those of the recipe in a table of its name. On the command line and
in Python all of them are named flatly; a setting that the chosen recipe does not use is refused. `None` is written
`auto`: the value follows from the data. From the fields come errors, help texts and the settings page.
"""

import dataclasses
import difflib
import functools
import importlib.resources
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from prototree.backbones.registry import AUTO, NONE, Network, format_options, resolve
from prototree.errors import ConfigError
from prototree.io import MAX_TEXT_BYTES, read_regular

VERSION = 1
DEFAULT_IMAGE_SIZE = 224  # for networks of which nothing is known
DEFAULT_PRESET = "default"
S = TypeVar("S", bound="Settings")  # not `typing.Self`, which run-time type checkers refuse outside of a class
LABEL_SMOOTHING = 0.1  # of classifiers
_LEARNING_RATE = ("learning_rate", "learningrate", "lr", "rate")  # as people call it elsewhere
_LR_OF = ("lr", "lr_prototypes")  # what they mean, in a recipe that has it


@dataclass(frozen=True)
class Setting:
    """One setting: its type, default, range, help text, and when to change it."""

    key: str
    kind: Any
    default: Any
    help: str
    when: str
    group: str
    low: int | float | None
    high: int | float | None
    common: bool  # shown by the short help
    affects_result: bool  # a run can be resumed with another value of those that do not

    @property
    def option(self) -> str:
        return f"--{self.key.replace('_', '-')}"

    @property
    def values(self) -> str:
        """Describe the allowed values."""
        if typing.get_origin(self.kind) is Literal:
            return " | ".join(typing.get_args(self.kind))
        text = _type_text(self.kind)
        if self.low is not None and self.high is not None:
            text += f" from {self.low:g} to {self.high:g}"
        return f"{text}, or {AUTO}" if type(None) in typing.get_args(self.kind) else text


def setting(
    default: Any,
    group: str,
    limits: tuple[int | float, int | float] | None,
    text: str,
    *,
    when: str,
    common: bool = False,
    affects_result: bool = True,
) -> Any:
    """Declare a setting as a dataclass field; `limits` are the lowest and the highest value of a number."""
    low, high = limits or (None, None)
    about = {"help": text, "when": when, "group": group, "low": low, "high": high}
    return field(default=default, metadata={**about, "common": common, "affects_result": affects_result})


@dataclass(frozen=True)
class Settings:
    """Base of dataclasses of settings: values are checked when an object is made, unknown names are errors."""

    def __post_init__(self) -> None:
        for item in self.fields():
            value = getattr(self, item.key)
            numbers = () if value is None or item.low is None else value if isinstance(value, tuple) else (value,)
            for number in numbers:
                if not item.low <= number <= item.high:  # also for NaN
                    raise ConfigError(f"expected {item.key} from {item.low:g} to {item.high:g}, got {number:g}")
            if isinstance(value, tuple) and list(value) != sorted(set(value)):
                raise ConfigError(f"expected {item.key} in rising order, got {list(value)}")

    @classmethod
    def fields(cls) -> tuple[Setting, ...]:
        """List the settings in the order in which they are written."""
        kinds = typing.get_type_hints(cls)
        fields = (item for item in dataclasses.fields(cls) if "help" in item.metadata)
        return tuple(Setting(item.name, kinds[item.name], item.default, **item.metadata) for item in fields)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the names of the settings."""
        return tuple(item.key for item in cls.fields())

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert values, which may be text, to the types of the settings; refuse unknown names."""
        kinds = {item.key: item.kind for item in cls.fields()}
        if unknown := [key for key in values if key not in kinds]:
            raise unknown_key(unknown[0], kinds)
        return {key: _parse(key, kinds[key], value) for key, value in values.items()}

    def replace(self: S, values: Mapping[str, Any]) -> S:
        """Return a copy with other values, by name."""
        return replace(self, **self.parse(values))

    def values(self) -> dict[str, Any]:
        """Return all values by name."""
        return {key: getattr(self, key) for key in self.names()}

    def resume_key(self) -> dict[str, Any]:
        """Return the values that decide the result of a run; it can only be resumed with the same ones."""
        return {item.key: getattr(self, item.key) for item in self.fields() if item.affects_result}

    def to_toml(self) -> str:
        """Write the lines of a TOML file, each with its help text."""
        lines = ((f"{item.key} = {_toml(getattr(self, item.key))}", item.help) for item in self.fields())
        return "".join(f"{line:<32}  # {text}\n" for line, text in lines)


def unknown_key(key: str, known: Iterable[str], also: Iterable[str] = ()) -> ConfigError:
    """Make the error for an unknown name, with the nearest known one."""
    near = difflib.get_close_matches(key, [*known, *also], n=1)
    hint = _meant(near[0]) if near else f"expected one of {', '.join(known)}"
    return ConfigError(f"unknown setting {key!r}; {hint}")


def _meant(key: str) -> str:
    return f"did you mean {key!r} (--{key.replace('_', '-')})?"


_NETWORK, _DATA, _TRAINING, _AFTER, _MACHINE = "network", "data", "training", "after training", "machine"


@dataclass(frozen=True)
class Common(Settings):
    """Settings of every run, whatever its recipe."""

    # fmt: off
    backbone: str = setting(AUTO, _NETWORK, None,
        "the network: auto (EfficientNet-Lite0), a name that `prototree backbones` lists, or a timm model",
        when="You have a GPU, or weights that were trained on images like yours.", common=True)
    backbone_options: str = setting("", _NETWORK, None,
        "what timm builds the network with, such as pad_type=same; a weight file may name it itself",
        when="The network was trained in another form than timm's own.")
    weights: str = setting(AUTO, _NETWORK, None,
        "weights of the network: auto, hub (timm's own), none (random), or a file",
        when="You have a file of weights.", common=True)
    feature_level: int = setting(-1, _NETWORK, (-16, 0),
        "which feature map: -1 is the last block's, -2 a finer one, and so on; 0 is after the last convolution",
        when="What matters in your images is small: with -2 a patch has half the side.")
    image_size: int | None = setting(None, _NETWORK, (16, 4096),
        "side of the square that the network sees, in pixels; auto: as `prototree backbones` or the weight file says",
        when="Larger gives finer patches; the cost grows with the square.", common=True)
    resize: int | None = setting(None, _NETWORK, (16, 4096),
        "images are resized to this side, then a square of image_size is cropped; auto: no cropping",
        when="The preset paper-cars has 256, as in the paper.")
    prototype_dim: int = setting(256, _NETWORK, (1, 65536), "numbers per cell of a prototype (D)",
        when="Less memory: 128, which was less accurate on birds.")
    head_hidden_dim: int = setting(0, _NETWORK, (0, 65536),
        "width of a hidden layer between the feature map and the prototypes; 0: none, as in the paper",
        when="Smaller for a faster head, larger for many classes.")
    augment: str = setting("light", _DATA, None, "random changes to training images: none, light, colour, cub or cars",
        when="none if the label depends on colour or orientation.")
    test_fraction: float = setting(0.2, _DATA, (0.01, 0.99),
        "fraction of the images kept for testing if the data has no split of its own",
        when="You have few images, or very many.", common=True)
    fold: str = setting("", _DATA, None,
        "the part of the images kept for testing, such as 2/5; empty: the data's own split, or test_fraction",
        when="You cross-validate by hand; --folds 5 runs all five parts.")
    bootstrap: bool = setting(False, _DATA, None,
        "train on a bootstrap sample of the images, a different one for each seed", when="You train an ensemble.")
    fail_on_bad_images: bool = setting(False, _DATA, None,
        "an image that cannot be read is an error; otherwise it is skipped",
        when="Every file must be used.", affects_result=False)
    batch_size: int = setting(64, _TRAINING, (1, 1_000_000), "images in a batch",
        when="You run out of memory: smaller.")
    seed: int = setting(0, _TRAINING, (0, 2**31), "the same seed gives the same run",
        when="You want a different tree from the same data.", common=True)
    pretrain_epochs: int = setting(0, _TRAINING, (0, 1_000_000),
        "epochs of training the whole network as a plain classifier first",
        when="The network has no pretrained weights.")
    prune_threshold: float | None = setting(None, _AFTER, (0, 0.999),
        "leaves whose largest probability is at most this are removed; auto: twice the uniform probability",
        when="The tree is larger than you can read: higher.")
    project_within_class: bool = setting(True, _AFTER, None,
        "projection takes patches only from classes below the node (Eq. S1), not from any class (Eq. 6)",
        when="You want to compare the two.")
    workers: int = setting(2, _MACHINE, (0, 1024),
        "processes that read images; on a CPU feature extraction uses one thread per core instead",
        when="Reading is slower than the network: more. Worker processes cause trouble: 0.",
        common=True, affects_result=False)
    precision: Literal["auto", "float32", "bfloat16"] = setting("auto", _MACHINE, None,
        "number format of the network: auto takes bfloat16 on GPUs that support it, float32 elsewhere",
        when="You need full precision on a GPU: float32.")
    inference_backend: Literal["auto", "torch", "onnxruntime"] = setting("auto", _MACHINE, None,
        "what runs a frozen network; auto: onnxruntime if installed, on a CPU, from 500 images on",
        when="Runs must be the same, bit for bit, with and without onnxruntime: torch.")
    # fmt: on


@dataclass(frozen=True)
class RecipeSettings(Settings):
    """Settings of one recipe: a way to train a tree (`training.RECIPES` has its function under the same name)."""

    name: ClassVar[str]
    summary: ClassVar[str]
    frozen_backbone: ClassVar[bool] = False  # feature maps of a network that never learns are cached
    oversamples: ClassVar[bool] = False  # images of rare classes are repeated
    can_finetune: ClassVar[bool] = False  # it can train the head further with the prototypes of an edited tree

    def check(self, common: Common) -> None:
        """Refuse common settings that the recipe cannot work with."""

    def for_data(self, n_classes: int, network: Network) -> "RecipeSettings":
        """Replace `auto` where it follows from the number of classes or the network."""
        return self


_TREE, _RATES, _LEAVES, _TEACHER, _HEAD = "tree", "learning rates", "leaves", "soft labels", "head"


@dataclass(frozen=True)
class PaperSettings(RecipeSettings):
    """The published algorithm (§4, Algorithm 1, Tables S2 and S3)."""

    name: ClassVar[str] = "paper"
    summary: ClassVar[str] = "the published algorithm: a full tree of a given height, prototypes learned by gradients"

    # fmt: off
    height: int | None = setting(None, _TREE, (1, 20),
        "edges from the root to the leaves; auto: one more than is needed for one leaf per class",
        when="Some classes have no leaf: higher. Training takes too long: lower.", common=True)
    prototype_size: int = setting(1, _TREE, (1, 256), "rows and columns of a prototype, in cells of the feature map",
        when="You want larger patches.")
    epochs: int = setting(30, _RATES, (1, 1_000_000), "passes over all images",
        when="Accuracy is still rising at the end: more.", common=True)
    freeze_epochs: int = setting(30, _RATES, (0, 1_000_000),
        "epochs in which the backbone stays frozen, except for its last block", when="You have a GPU: fewer.")
    train_last_block: bool = setting(True, _RATES, None, "train the backbone's last block from the start",
        when="You have few images or little time: false.")
    freeze_batch_norm: bool = setting(False, _RATES, None,
        "batch norm of the backbone keeps its pretrained statistics also while the backbone learns",
        when="Epochs after the frozen ones are few: true; the maps change less when the backbone begins to learn.")
    lr_prototypes: float = setting(1e-3, _RATES, (0, 100), "learning rate of the prototypes",
        when="The loss does not fall.")
    lr_last_block: float = setting(1e-3, _RATES, (0, 100),
        "learning rate of the 1×1 convolution and the backbone's last block", when="The loss does not fall.")
    lr_backbone: float = setting(1e-5, _RATES, (0, 100),
        "learning rate of the rest of the backbone once it is no longer frozen", when="You use another backbone.")
    weight_decay: float = setting(0.0, _RATES, (0, 100), "weight decay of the 1×1 convolution only",
        when="Accuracy is far higher on training images than on test images.")
    adam_epsilon: float = setting(1e-8, _RATES, (1e-16, 1), "ε of Adam",
        when="The paper's presets have 1e-7.")
    milestones: tuple[int, ...] = setting((), _RATES, (0, 1_000_000),
        "epochs after which all learning rates are halved", when="You change epochs.")
    leaf_update: Literal["interleaved", "two_pass", "gradient"] = setting("interleaved", _LEAVES, None,
        "how leaves learn: interleaved (Algorithm 1), two_pass (Eq. 5 over all images first), gradient",
        when="You want to compare the three.")
    teacher: str = setting("", _TEACHER, None,
        "where soft labels come from: runs (a,b), or a timm classifier (resnet50=file); empty: no soft labels",
        when="You have a better model of the same classes.")
    distill_weight: float = setting(0.7, _TEACHER, (0, 1), "the teacher's share in the targets",
        when="You use a teacher.")
    distill_temperature: float = setting(2.0, _TEACHER, (0.01, 1000), "temperature of the teacher's probabilities",
        when="You use a teacher.")
    cache_views: int = setting(0, _RATES, (0, 10_000),
        "views of each image whose feature maps are computed once and kept while the backbone is frozen; 0: none",
        when="You have no GPU: 3 or more; this takes some gigabytes of disk.")
    baseline: bool = setting(False, _RATES, None,
        "also fine-tune the network as a plain classifier, with the same epochs, rates and images, to compare with",
        when="You want to know what the tree costs; training takes twice as long.")
    # fmt: on

    def for_data(self, n_classes: int, network: Network) -> "PaperSettings":
        return replace(self, height=self.height or default_height(n_classes))


@dataclass(frozen=True)
class DistillSettings(RecipeSettings):
    """A frozen backbone, a head that first learns as a classifier, and prototypes that stay patches."""

    name: ClassVar[str] = "distill"
    summary: ClassVar[str] = "for small data and no GPU: a frozen network, a tree grown from the classes"
    frozen_backbone: ClassVar[bool] = True
    oversamples: ClassVar[bool] = True
    can_finetune: ClassVar[bool] = True

    # fmt: off
    views: int = setting(6, _DATA, (2, 10_000), "views of each image to train on; prototypes come from the first two",
        when="Fewer save disk and time; 2 is the minimum.", common=True)
    center_crop: float | None = setting(None, _DATA, (0, 0.95),
        "side of a second crop in the centre of the image, as a fraction; 0: the full image only; auto: 0.7, or as "
        "`prototree backbones` says",
        when="0 halves the time per prediction and costs one or two points of accuracy.")
    finetune_blocks: int = setting(0, _RATES, (0, 100),
        "how many of the network's last blocks are fine-tuned as a classifier first; 0: the network stays frozen",
        when="The network was trained on images unlike yours, and you have many of each class.")
    head_epochs: int | None = setting(None, _HEAD, (1, 1_000_000),
        "epochs of the head as a classifier; auto: enough to see 38,000 views, or 760 of each class",
        when="You want a quick trial.")
    epochs: int | None = setting(None, _TREE, (1, 1_000_000),
        "epochs of the tree; auto: enough to see 54,000 views, or 1,080 of each class",
        when="You want a quick trial.", common=True)
    lr: float = setting(5e-3, _TREE, (0, 100), "learning rate of the head under the tree",
        when="The loss does not fall.")
    weight_decay: float = setting(0.01, _TREE, (0, 100), "weight decay of the head under the tree",
        when="Accuracy is far higher on training images than on test images.")
    sharpness: float = setting(6.0, _TREE, (3, 64), "slope of the decisions when training ends, an inverse temperature",
        when="Higher makes the single path agree more with all paths averaged.")
    occlusion_weight: float = setting(0.3, _TREE, (0, 100),
        "weight of the occlusion loss: a prototype's match must depend on the displayed box; 0: none",
        when="0 if time is short, or places do not matter.")
    distill_weight: float = setting(1.0, _TEACHER, (0, 1),
        "the head's share in the tree's targets; the labels have the rest", when="The baseline is weak: lower.")
    distill_temperature: float | None = setting(None, _TEACHER, (0.01, 1000),
        "temperature of the head's probabilities, and by the end of the tree's; auto: from the number of classes "
        "(2.5 up to 50, 1.9 for 200)", when="You study distillation.")
    calibration_fraction: float = setting(0.2, _TEACHER, (0, 0.5),
        "fraction of each class that a second tree does not see, to calibrate the confidence; 0: no calibration",
        when="0 if time is short and confidences do not matter.")
    # fmt: on

    def check(self, common: Common) -> None:
        if not common.head_hidden_dim:
            raise ConfigError("the recipe 'distill' needs a hidden layer: expected head_hidden_dim from 1 on, got 0")
        if 0 < (self.center_crop or 0) < 0.1:
            raise ConfigError(f"expected center_crop of 0 or from 0.1 to 0.95, got {self.center_crop:g}")

    def for_data(self, n_classes: int, network: Network) -> "DistillSettings":
        temperature = self.distill_temperature or default_temperature(n_classes)
        crop = network.center_crop if self.center_crop is None else self.center_crop
        return replace(self, distill_temperature=temperature, center_crop=crop)


RECIPE_SETTINGS: dict[str, type[RecipeSettings]] = {"paper": PaperSettings, "distill": DistillSettings}


def default_height(n_classes: int) -> int:
    """⌈log₂K⌉ + 1: 9 for the paper's 200 classes."""
    return max(1, (n_classes - 1).bit_length() + 1)


def default_threshold(n_classes: int) -> float:
    """Twice the uniform probability: 0.01 for the paper's 200 classes. For two classes, halfway from there to 1."""
    return min(2 / n_classes, (1 + 1 / n_classes) / 2)


def default_temperature(n_classes: int) -> float:
    """At most 2.5, and never so high that the softened teacher keeps less than about a fifth for its own answer.

    Label smoothing leaves it a margin of about log(0.9 K / 0.1) over each of the K − 1 other classes.
    """
    margin = math.log(max(n_classes, 2) * (1 - LABEL_SMOOTHING) / LABEL_SMOOTHING)
    others = math.log(max(n_classes - 1, 1) / (1 / 0.19 - 1))
    return 2.5 if others <= 0 else min(2.5, round(margin / others, 2))


@dataclass(frozen=True)
class Config(Common):
    """Configuration of a run: the settings of every run, and those of its recipe. Checked when it is made.

    Attributes:
        recipe: Settings of the recipe, such as `DistillSettings`; all others are listed on the page Settings.

    Raises:
        ConfigError: A setting is out of range.

    Examples:
        >>> from prototree.config import load_preset
        >>> load_preset("default").replace({"seed": 1, "views": 4}).recipe.views
        4
    """

    recipe: RecipeSettings = field(default_factory=PaperSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recipe.check(self)

    def replace(self, values: Mapping[str, Any]) -> "Config":
        """Return a copy with other values.

        Args:
            values: Settings by name; `recipe` is the name of one, and starts from its defaults.

        Returns:
            The changed configuration.

        Raises:
            ConfigError: A name is unknown or of another recipe, or a value is out of range.
        """
        recipe = self.recipe
        if "recipe" in values and values["recipe"] != recipe.name:
            recipe = _recipe_named(values["recipe"])()
        common, of_recipe = _split(values, recipe)
        return replace(self, **self.parse(common), recipe=recipe.replace(of_recipe))

    def for_data(self, n_classes: int) -> "Config":
        """Replace every `auto` that follows from the data."""
        threshold = default_threshold(n_classes) if self.prune_threshold is None else self.prune_threshold
        network = resolve(self.backbone, self.weights, self.backbone_options)
        size = self.image_size or network.image_size
        return replace(
            self,
            backbone=network.model,
            backbone_options=format_options(dict(network.options)),
            weights=network.weights or NONE,
            image_size=size,
            resize=self.resize or size,
            prune_threshold=threshold,
            recipe=self.recipe.for_data(n_classes, network),
        )

    def resume_key(self) -> dict[str, Any]:
        return {**super().resume_key(), "recipe": self.recipe.name, **self.recipe.resume_key()}

    def to_toml(self) -> str:
        head = f'version = {VERSION}\nrecipe = "{self.recipe.name}"  # {self.recipe.summary}\n'
        return f"{head}\n{super().to_toml()}\n[{self.recipe.name}]\n{self.recipe.to_toml()}"


def preset_names() -> list[str]:
    """List the presets that come with the package."""
    files = importlib.resources.files("prototree") / "configs"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def load_preset(name: str) -> Config:
    """Load a preset by name, or a TOML file by path.

    Examples:
        >>> load_preset("paper-cub").recipe.height
        9
    """
    if name in preset_names():
        return Config().replace(_packaged(name))
    if not Path(name).is_file():
        raise ConfigError(f"no preset {name!r}; expected {', '.join(preset_names())}, or the path of a TOML file")
    return Config().replace(_read_toml(Path(name))[1])


@functools.cache
def preset_values(kind: type[Settings]) -> dict[str, dict[str, Any]]:
    """Return the values that each preset gives a class of settings; only presets that use it."""
    result = {}
    for name in preset_names():
        values = _packaged(name)
        recipe = _recipe_named(values.get("recipe", PaperSettings.name))
        common, of_recipe = _split(values, recipe)
        if kind in (Common, recipe):
            result[name] = kind(**kind.parse(common if kind is Common else of_recipe)).values()
    return result


def read_config(path: Path) -> Config:
    """Read the `config.toml` of a run."""
    version, values = _read_toml(path)
    if version is None:
        raise ConfigError(f"{path} was written by an earlier version of prototree; train the run again")
    return Config().replace(values)


def _packaged(name: str) -> dict[str, Any]:
    return tomllib.loads((importlib.resources.files("prototree") / "configs" / f"{name}.toml").read_text())


def _read_toml(path: Path) -> tuple[int | None, dict[str, Any]]:
    try:
        values = tomllib.loads(read_regular(path, MAX_TEXT_BYTES).decode())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML ({error})") from error
    version = values.pop("version", None)
    if version not in (None, VERSION):
        raise ConfigError(f"{path} has version {version!r}, this program reads version {VERSION}; train the run again")
    return version, values


def _recipe_named(name: Any) -> type[RecipeSettings]:
    if name not in RECIPE_SETTINGS:
        raise ConfigError(f"expected one of {', '.join(map(repr, RECIPE_SETTINGS))} for recipe, got {name!r}")
    return RECIPE_SETTINGS[name]


def _split(
    values: Mapping[str, Any], recipe: RecipeSettings | type[RecipeSettings]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate common values from those of the recipe, whether they stand flatly or in its table."""
    common: dict[str, Any] = {}
    of_recipe: dict[str, Any] = {}
    for key, value in values.items():
        if key in Common.names():
            common[key] = value
        elif key in recipe.names():
            of_recipe[key] = value
        elif key == recipe.name and isinstance(value, Mapping):
            of_recipe.update(value)
        elif key != "recipe":
            raise _not_used(key, recipe)
    return common, of_recipe


def _not_used(key: str, recipe: RecipeSettings | type[RecipeSettings]) -> ConfigError:
    if key in _LEARNING_RATE and (meant := next((name for name in _LR_OF if name in recipe.names()), None)):
        return ConfigError(f"unknown setting {key!r}; {_meant(meant)}")
    others = [name for name, other in RECIPE_SETTINGS.items() if key in other.names() or key == name]
    if others:
        return ConfigError(
            f"{key!r} is a setting of the recipe {others[0]!r}, which the recipe {recipe.name!r} does not use; "
            f"leave it out, or choose --recipe {others[0]}"
        )
    elsewhere = (name for other in RECIPE_SETTINGS.values() for name in other.names())
    return unknown_key(key, (*Common.names(), *recipe.names()), also=elsewhere)


def _parse(key: str, kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value in (None, AUTO) else _parse(key, arguments[0], value)
    try:
        if origin is Literal and value in arguments:
            return value
        if origin is tuple:
            parts = value.replace(",", " ").split() if isinstance(value, str) else value
            return tuple(arguments[0](part) for part in parts)
        if kind is bool:
            lowered = value.lower() if isinstance(value, str) else value
            return {True: True, False: False, "true": True, "false": False, "yes": True, "no": False}[lowered]
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError, KeyError):
        raise ConfigError(f"expected {_type_text(kind)} for {key}, got {value!r}") from None


def _type_text(kind: Any) -> str:
    if typing.get_origin(kind) is types.UnionType:
        return f"{_type_text(typing.get_args(kind)[0])} or auto"
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "whole numbers" if typing.get_args(kind)[0] is int else "numbers"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _toml(value: Any) -> str:
    if value is None:
        return f'"{AUTO}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    return repr(value)
