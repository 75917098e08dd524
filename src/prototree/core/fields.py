"""What a field of a JSON file may be: each check raises an error that says where, what was expected and what is there.

Files come from outside, so everything in them is checked before it is used. No torch here.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from prototree.errors import CheckpointError

_SHOWN = 60

Name = tuple[str | int, ...]
"""Keys and positions, from the whole inwards."""

Check = Callable[[Any, Name], None]
"""Raises a `CheckpointError` if the value, called by this name, is not what it should be."""


def wrong(name: Name, expected: str, got: Any) -> CheckpointError:
    """The error about a value, which is shown but for a long tail."""
    shown = repr(got)
    return CheckpointError(
        f"{_said(name)}: expected {expected}, got {shown[:_SHOWN]}{'…' if len(shown) > _SHOWN else ''}"
    )


def _said(name: Name) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in name).lstrip(".")


def integer(low: int, high: int) -> Check:
    """A whole number of a range; `true` is none."""

    def check(value: Any, name: Name) -> None:
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, f"a whole number from {low} to {high}", value)

    return check


def number(low: float = -math.inf, high: float = math.inf) -> Check:
    """A finite number of a range."""

    def check(value: Any, name: Name) -> None:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise wrong(name, f"a number from {low:g} to {high:g}", value)

    return check


def text(value: Any, name: Name) -> None:
    """A text, also an empty one."""
    if not isinstance(value, str):
        raise wrong(name, "a text", value)


def truth(value: Any, name: Name) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)


def one_of(*values: Any) -> Check:
    """One of some texts."""

    def check(value: Any, name: Name) -> None:
        if not isinstance(value, str) or value not in values:
            raise wrong(name, " or ".join(map(repr, values)), value)

    return check


def list_of(each: Check, shortest: int, longest: int) -> Check:
    """A list whose every element passes a check."""

    def check(value: Any, name: Name) -> None:
        if not isinstance(value, list) or not shortest <= len(value) <= longest:
            count = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
            raise wrong(name, f"a list of {count}", value)
        for place, one in enumerate(value):
            each(one, (*name, place))

    return check


def record(fields: Mapping[str, Check]) -> Check:
    """An object with exactly these keys."""

    def check(value: Any, name: Name) -> None:
        if not isinstance(value, Mapping):
            raise wrong(name, "an object", value)
        if odd := value.keys() ^ fields.keys():
            key = min(odd, key=str)
            raise CheckpointError(f"{_said((*name, str(key)))} is {'not known' if key in value else 'missing'}")
        for key, one in fields.items():
            one(value[key], (*name, key))

    return check


def perhaps(check_value: Check) -> Check:
    """Null, or what passes a check."""
    return lambda value, name: None if value is None else check_value(value, name)


def part_of(needed: Mapping[str, Check], known: Mapping[str, Check]) -> Check:
    """An object with some keys that it needs and some that it may have; other keys are ignored."""

    def check(value: Any, name: Name) -> None:
        if not isinstance(value, Mapping):
            raise wrong(name, "an object", value)
        if missing := [key for key in needed if key not in value]:
            raise CheckpointError(f"{_said((*name, missing[0]))} is missing")
        for key, one in {**needed, **known}.items():
            if key in value:
                one(value[key], (*name, key))

    return check


def each_of(check_value: Check) -> Check:
    """An object whose every value passes a check, whatever its key is."""

    def check(value: Any, name: Name) -> None:
        if not isinstance(value, Mapping):
            raise wrong(name, "an object", value)
        for key, one in value.items():
            check_value(one, (*name, str(key)))

    return check
