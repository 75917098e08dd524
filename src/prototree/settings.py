"""Settings as frozen dataclasses whose fields carry their meaning, their range and when to change them. No torch here.

From the fields come the errors, the help of the command line, the comments in `config.toml`, and `docs/settings.md`.
`Common` are the settings of every run; each recipe adds its own (`training.recipes`), and `config` puts them together.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeVar

from prototree.errors import ConfigError


@dataclass(frozen=True)
class About:
    """What a setting means, what it may be, and when to change it."""

    meaning: str
    touch: str
    group: str
    low: int | float | None
    high: int | float | None
    often: bool  # shown by the short help
    free: bool  # says how a run is done, not what comes out of it: a run may be continued with another value


@dataclass(frozen=True)
class Setting:
    """A setting of a class of settings, for help and documents."""

    key: str
    kind: Any
    default: Any
    about: About

    @property
    def option(self) -> str:
        """As on the command line."""
        return f"--{self.key.replace('_', '-')}"

    @property
    def values(self) -> str:
        """What it may be, in words."""
        about = self.about
        if typing.get_origin(self.kind) is Literal:
            return " | ".join(typing.get_args(self.kind))
        if about.low is None or about.high is None:
            return _kind_words(self.kind)
        return f"{_kind_words(self.kind)} from {about.low:g} to {about.high:g}"


def setting(
    default: Any,
    meaning: str,
    *,
    touch: str = "",
    group: str = "",
    low: int | float | None = None,
    high: int | float | None = None,
    often: bool = False,
    free: bool = False,
) -> Any:
    """A field of a class of settings."""
    return dataclasses.field(default=default, metadata={"about": About(meaning, touch, group, low, high, often, free)})


Own = TypeVar("Own", bound="Settings")


@dataclass(frozen=True)
class Settings:
    """Base of classes of settings: values are checked when they are made, unknown names are errors."""

    def __post_init__(self) -> None:
        for one in self.described():
            value, low, high = getattr(self, one.key), one.about.low, one.about.high
            for number in value if isinstance(value, tuple) else (value,):
                if low is not None and high is not None and not low <= number <= high:  # also for NaN
                    raise ConfigError(f"expected {one.key} from {low:g} to {high:g}, got {number:g}")
            if isinstance(value, tuple) and list(value) != sorted(set(value)):
                raise ConfigError(f"expected {one.key} in rising order, got {list(value)}")

    @classmethod
    def described(cls) -> tuple[Setting, ...]:
        """Its settings in the order in which they are written."""
        kinds = typing.get_type_hints(cls)
        fields = [field for field in dataclasses.fields(cls) if "about" in field.metadata]
        return tuple(Setting(f.name, kinds[f.name], f.default, f.metadata["about"]) for f in fields)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of its settings."""
        return tuple(one.key for one in cls.described())

    def changed(self: Own, values: Mapping[str, Any]) -> Own:
        """The same with other values; text is read as what the setting needs."""
        return replace(self, **self.parsed(values))

    @classmethod
    def parsed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values as what the settings need; unknown names are refused."""
        kinds = {one.key: one.kind for one in cls.described()}
        if unknown := [key for key in values if key not in kinds]:
            raise unknown_key(unknown[0], kinds)
        return {key: _parse(key, kinds[key], value) for key, value in values.items()}

    def values(self) -> dict[str, Any]:
        """By name."""
        return {key: getattr(self, key) for key in self.names()}

    def identity(self) -> dict[str, Any]:
        """The values that decide what comes out of a run."""
        return {one.key: getattr(self, one.key) for one in self.described() if not one.about.free}

    def to_toml(self) -> str:
        """Lines of a TOML file, each with its meaning."""
        lines = ((f"{one.key} = {_toml(getattr(self, one.key))}", one.about.meaning) for one in self.described())
        return "".join(f"{line:<32}  # {meaning}\n" for line, meaning in lines)


def unknown_key(key: str, known: Iterable[str], also: Iterable[str] = ()) -> ConfigError:
    """The error for a name that no setting has, with the nearest one that does, of these or `also`."""
    known = list(known)
    near = difflib.get_close_matches(key, [*known, *also], n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return ConfigError(f"unknown key {key!r}; {hint}")


_NETWORK, _DATA, _LEARNING, _AFTER, _MACHINE = "network", "data", "learning", "after training", "this machine"


@dataclass(frozen=True)
class Common(Settings):
    """The settings of every run, whatever its recipe."""

    GROUPS: ClassVar[tuple[str, ...]] = (_NETWORK, _DATA, _LEARNING, _AFTER, _MACHINE)

    backbone: str = setting(
        "auto",
        "the network: the name of a timm model, or auto (EfficientNet-Lite0)",
        touch="You have a GPU, or weights that were trained on photos like yours.",
        group=_NETWORK,
        often=True,
    )
    weights: str = setting(
        "auto",
        "weights of the network: auto, hub (timm's own), none (random), or a file",
        touch="You have a file of weights.",
        group=_NETWORK,
        often=True,
    )
    feature_level: int = setting(
        -1,
        "which feature map: -1 is the last, -2 a finer one, and so on",
        touch="What matters in your photos is small: with -2 a patch has half the side.",
        group=_NETWORK,
        low=-16,
        high=-1,
    )
    image_size: int = setting(
        224,
        "side of the square that the network sees, in pixels",
        touch="Larger gives finer patches; the cost grows with the square.",
        group=_NETWORK,
        low=16,
        high=4096,
        often=True,
    )
    resize: int = setting(
        0,
        "photos are resized to this side, then a square of image_size is cropped; 0: no cropping",
        touch="The preset cars has 256, as in the paper.",
        group=_NETWORK,
        low=0,
        high=4096,
    )
    prototype_dim: int = setting(
        256,
        "numbers per cell of a prototype (D)",
        touch="Rarely; 128 was worse on birds.",
        group=_NETWORK,
        low=1,
        high=65536,
    )
    head_hidden_dim: int = setting(
        0,
        "width of a hidden layer between the feature map and the prototypes; 0: none, as in the paper",
        touch="Smaller for a faster head, larger for many classes.",
        group=_NETWORK,
        low=0,
        high=65536,
    )
    augment: str = setting(
        "light",
        "random changes to training photos: none, light, colour, cub or cars",
        touch="none if the label depends on colour or orientation.",
        group=_DATA,
    )
    test_fraction: float = setting(
        0.2,
        "share of the photos kept for testing if the data has no split of its own",
        touch="You have few photos, or very many.",
        group=_DATA,
        low=0.01,
        high=0.99,
        often=True,
    )
    fold: str = setting(
        "",
        "the part of the photos kept for testing, such as 2/5; empty: the data's own split, or test_share",
        touch="You cross-validate by hand; --folds 5 runs all five parts.",
        group=_DATA,
    )
    bootstrap: bool = setting(
        False,
        "train on a bootstrap sample of the photos, a different one for each seed",
        touch="You train several trees to vote.",
        group=_DATA,
    )
    strict: bool = setting(
        False,
        "a photo that cannot be read is an error; otherwise it is skipped",
        touch="Every file must be used.",
        group=_DATA,
        free=True,
    )
    batch_size: int = setting(
        64, "photos in a batch", touch="You run out of memory: smaller.", group=_LEARNING, low=1, high=1_000_000
    )
    seed: int = setting(
        0,
        "the same seed gives the same run",
        touch="You want a different tree from the same data.",
        group=_LEARNING,
        low=0,
        high=2**63 - 1,
        often=True,
    )
    adam_epsilon: float = setting(
        1e-8,
        "epsilon of Adam: the larger it is, the less weights with small gradients move",
        touch="The published code uses 1e-7; so do the presets cub and cars.",
        group=_LEARNING,
        low=1e-16,
        high=1,
    )
    threshold: float = setting(
        0.0,
        "leaves whose largest probability is at most this are pruned; 0: 2 / number of classes",
        touch="Leaves without a clear class stay, or leaves with one are lost.",
        group=_AFTER,
        low=0,
        high=0.999,
    )
    project_within_class: bool = setting(
        True,
        "projection takes patches only from classes below the node (Eq. S1), not from any class (Eq. 6)",
        touch="You want to compare the two.",
        group=_AFTER,
    )
    workers: int = setting(
        2,
        "processes that read photos; not for maps on a CPU, where every core reads its own",
        touch="Reading is slower than the network: more. Worker processes cause trouble: 0.",
        group=_MACHINE,
        low=0,
        high=1024,
        often=True,
        free=True,
    )
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "number format of the network: auto takes bfloat16 on GPUs that support it, float32 elsewhere",
        touch="You need full precision on a GPU: float32.",
        group=_MACHINE,
    )
    engine: Literal["auto", "torch", "onnxruntime"] = setting(
        "auto",
        "what runs a frozen network; auto: onnxruntime if installed, on a CPU, from 500 photos on",
        touch="Runs must be the same, bit for bit, with and without onnxruntime: torch.",
        group=_MACHINE,
    )
    channels_last: bool = setting(
        True,
        "channels-last memory layout, which makes most networks faster",
        touch="A network does not work with it.",
        group=_MACHINE,
        free=True,
    )
    checkpoint_minutes: float = setting(
        10.0,
        "minutes between saved states, from which an interrupted run can continue",
        touch="The disk is slow: more. You want to lose less after a crash: fewer.",
        group=_MACHINE,
        low=0,
        high=1e6,
        free=True,
    )

    def identity(self) -> dict[str, Any]:
        values = super().identity()
        for key, distance_p95 in (
            ("fold", ""),
            ("engine", "auto"),
        ):  # runs of earlier versions, continued, do not know them
            if values[key] == distance_p95:
                del values[key]
        return values


def _parse(key: str, kind: Any, value: Any) -> Any:
    try:
        origin = typing.get_origin(kind)
        if origin is Literal:
            if value not in typing.get_args(kind):
                raise ValueError
            return value
        if origin is tuple:
            parts = value.replace(",", " ").split() if isinstance(value, str) else value
            return tuple(typing.get_args(kind)[0](part) for part in parts)
        if kind is bool:
            return _flag(value)
        if kind is int and not isinstance(value, str) and int(value) != value:
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"expected {_kind_words(kind)} for {key}, got {value!r}") from None


def _flag(value: Any) -> bool:
    answers = {True: True, False: False, "true": True, "false": False, "yes": True, "no": False}
    lowered = value.lower() if isinstance(value, str) else value
    if lowered not in answers:
        raise ValueError
    return answers[lowered]


def _kind_words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "whole numbers" if typing.get_args(kind)[0] is int else "numbers"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[kind]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value)
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(repr, value))}]"
    return repr(value)
