"""All settings of a run, with the paper's tables as presets. Only `run` and `cli` see a Config."""

import dataclasses
import difflib
import importlib.resources
import math
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from prototree.errors import ConfigError

AUTO_PRESET = "auto"


@dataclass(frozen=True)
class Config:
    """Settings of a run. 0 in `height` and `threshold` means: derived from the number of classes.

    With the recipe `warm`, 0 in `epochs` and `head_epochs` means: derived from the number of photos.
    """

    # the model (§6.1)
    backbone: str = "auto"
    weights: str = "auto"  # "auto", "hub", "none" or a file
    level: int = -1  # which feature map: −1 the last, −2 a finer one
    train_tail: bool = True  # whether the backbone's last block learns while the rest is frozen
    image_size: int = 224
    resize: int = 0  # photos are resized to this before cropping to image_size; 0: no crop
    depth: int = 256
    head_width: int = 0  # hidden 1×1 layer; 0: none, as in the paper
    prototype_height: int = 1
    prototype_width: int = 1
    height: int = 0
    # data
    augment: str = "light"
    test_share: float = 0.2  # where the data has no split of its own
    bootstrap: bool = False  # bagging: train on a bootstrap sample of the photos, another for each seed
    strict: bool = False  # whether a photo that cannot be read is an error instead of being left out
    # Algorithm 1 (Table S2)
    epochs: int = 30
    batch_size: int = 64
    freeze_epochs: int = 30
    lr_prototypes: float = 1e-3
    lr_tail: float = 1e-3  # 1×1 convolution and last block
    lr_trunk: float = 1e-5
    weight_decay: float = 0.0  # on the 1×1 convolution only
    milestones: tuple[int, ...] = ()
    gamma: float = 0.5
    leaves: Literal["interleaved", "two_pass", "gradient"] = "interleaved"
    # before it
    recipe: Literal["paper", "warm"] = "paper"  # warm: for frozen features, see warm.py
    head_epochs: int = 0  # of the head as a plain classifier, in the recipe warm
    pretrain_epochs: int = 0  # of the backbone as a plain classifier: one without weights, or (at lr_trunk) with
    start: str = ""  # a run whose tree learns on, its prototypes where they are; in the recipe warm
    # soft labels
    teacher: str = ""  # a run, a tree or a timm classifier file
    teacher_weight: float = 0.7  # its share in the targets
    temperature: float = 2.0
    # after it
    threshold: float = 0.0
    constrain_classes: bool = True
    # how it runs
    cache_views: int = 0  # views of each photo to cache while the trunk is frozen; 0: no cache
    seed: int = 0
    workers: int = 2
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    channels_last: bool = True
    compile: bool = False
    save_minutes: float = 10.0

    def __post_init__(self) -> None:
        for key, low, high in _RANGES:
            value = getattr(self, key)
            if not low <= value <= high or math.isnan(value):
                raise ConfigError(f"expected {key} from {low:g} to {high:g}, got {value:g}")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(f"expected milestones in rising order, got {list(self.milestones)}")
        if self.recipe == "warm":
            self._check_warm()
        elif not self.epochs:
            raise ConfigError("expected at least one epoch for --recipe paper, got 0")
        elif self.start:
            raise ConfigError("only the recipe 'warm' lets a tree learn on with its prototypes where they are")

    def _check_warm(self) -> None:
        """What the recipe builds on: a frozen backbone, cached maps, a wide head, prototypes of one patch."""
        needs = {"train_tail": False, "prototype_height": 1, "prototype_width": 1}
        wrong = [f"{key} {getattr(self, key)!r}" for key, value in needs.items() if getattr(self, key) != value]
        wrong += [f"{key} 0" for key in ("head_width", "cache_views") if not getattr(self, key)]
        if wrong:
            raise ConfigError(f"the recipe 'warm' does not go with {', '.join(wrong)}; choose --recipe paper for that")

    def changed(self, values: Mapping[str, Any]) -> "Config":
        """The same with other values; text is read as what the key needs."""
        return replace(self, **{key: _parse(key, value) for key, value in values.items()})

    def to_toml(self) -> str:
        """As a file that `read_config` reads back."""
        return "".join(f"{key} = {_toml(value)}\n" for key, value in dataclasses.asdict(self).items())


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("level", -16, -1),
    ("image_size", 16, 4096),
    ("resize", 0, 4096),
    ("depth", 1, 65536),
    ("head_width", 0, 65536),
    ("prototype_height", 1, 256),
    ("prototype_width", 1, 256),
    ("height", 0, 20),
    ("test_share", 0.01, 0.99),
    ("epochs", 0, 1_000_000),
    ("batch_size", 1, 1_000_000),
    ("freeze_epochs", 0, 1_000_000),
    ("lr_prototypes", 0, 100),
    ("lr_tail", 0, 100),
    ("lr_trunk", 0, 100),
    ("weight_decay", 0, 100),
    ("gamma", 0, 1),
    ("head_epochs", 0, 1_000_000),
    ("pretrain_epochs", 0, 1_000_000),
    ("teacher_weight", 0, 1),
    ("temperature", 0.01, 1000),
    ("threshold", 0, 0.999),
    ("cache_views", 0, 10_000),
    ("seed", 0, 2**63 - 1),
    ("workers", 0, 1024),
    ("save_minutes", 0, 1e6),
)
_TYPES = typing.get_type_hints(Config)
KEYS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Config))


def preset_names() -> list[str]:
    """Presets that come with the package."""
    files = importlib.resources.files("prototree") / "configs"
    return sorted(file.name.removesuffix(".toml") for file in files.iterdir() if file.name.endswith(".toml"))


def preset(name: str) -> Config:
    """A preset by name, or a TOML file by path."""
    if name in preset_names():
        text = (importlib.resources.files("prototree") / "configs" / f"{name}.toml").read_text()
        return Config().changed(tomllib.loads(text))
    if not Path(name).is_file():
        raise ConfigError(f"no preset {name!r}; expected {', '.join(preset_names())}, or the path of a TOML file")
    return read_config(Path(name))


def read_config(path: Path) -> Config:
    """A TOML file; keys it does not have keep their defaults."""
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as TOML ({error})") from error
    return Config().changed(values)


def default_height(n_classes: int) -> int:
    """⌈log₂K⌉ + 1: 9 for the paper's 200 classes."""
    return max(1, math.ceil(math.log2(n_classes)) + 1)


def _parse(key: str, value: Any) -> Any:
    if key not in _TYPES:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(KEYS)}"
        raise ConfigError(f"unknown key {key!r}; {hint}")
    kind = _TYPES[key]
    try:
        if typing.get_origin(kind) is Literal:
            return _choice(kind, value)
        if typing.get_origin(kind) is tuple:
            parts = value.replace(",", " ").split() if isinstance(value, str) else value
            return tuple(int(part) for part in parts)
        if kind is bool:
            return _flag(value)
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        wanted = "whole numbers" if typing.get_origin(kind) is tuple else _name(kind)
        raise ConfigError(f"expected {wanted} for {key}, got {value!r}") from None


def _choice(kind: Any, value: Any) -> Any:
    if value not in typing.get_args(kind):
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    answers = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False}
    lowered = value.lower() if isinstance(value, str) else value
    if lowered not in answers:
        raise ValueError
    return answers[lowered]


def _name(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return repr(value)
