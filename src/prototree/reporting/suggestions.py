"""A suggested name for a patch, from what was measured: its colours, its part, and what its match depends on.

No model of language is asked. A page marks a suggestion as one: only a person can say what the patches have in common.
"""

import colorsys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prototree.explanation.records import Perturbation, Picture, PrototypeExplanation
from prototree.reporting import images

_CAUSES: dict[Perturbation, str] = {
    "hue": "colour",
    "saturation": "colour",
    "contrast": "contrast",
    "texture": "texture",
    "shape": "shape",
}
_LEAST_FALL = 0.05  # of the similarity, for a property to matter
_MOSTLY = 1.25  # times the next property
_SECOND = 0.3  # of the lit pixels: a colour that is named too
_PIXELS, _LEAST_PIXELS = 24, 4  # a side
_HUES = ((18, "red"), (42, "orange"), (68, "yellow"), (165, "green"), (255, "blue"), (290, "violet"), (335, "pink"))
_MAX_CLASSES = 3
_COLOURLESS = ("grey", "white", "black", "brown")


@dataclass(frozen=True)
class Suggestion:
    """A name for a patch, and in a sentence what it is drawn from."""

    name: str
    reason: str


def suggest(prototype: PrototypeExplanation, towards: Sequence[str]) -> Suggestion:
    """Suggest a name for a prototype; `towards` are the classes on its side. No name where little is known of it."""
    colours, cause = colour_names(prototype), main_cause(prototype)
    thing = prototype.part or (cause if cause in ("shape", "texture") else "patch")
    classes = ", ".join(f"\u2068{name}\u2069" for name in towards[:_MAX_CLASSES])
    more = f" and {len(towards) - _MAX_CLASSES} more" if len(towards) > _MAX_CLASSES else ""
    reasons = [
        f"main colour{'s' if ' and ' in colours else ''} {colours}" if colours else "",
        f"mostly on the part {prototype.part}" if prototype.part else "",
        f"mostly {cause} counts when the photo is altered" if cause else "",
        f"leads towards {classes}{more}" if towards else "",
    ]
    # A grey patch may be anything.
    is_telling = prototype.part or cause or (colours and colours not in _COLOURLESS)
    name = f"{colours} {thing}".strip() if is_telling else ""
    return Suggestion(name, "; ".join(filter(None, reasons)))


def main_cause(prototype: PrototypeExplanation) -> str:
    """Name the property whose alteration lowers the similarity by far the most; empty where none stands out."""
    falls = Counter[str]()
    for effect in prototype.perturbation_effects:
        falls[_CAUSES[effect.name]] = max(falls[_CAUSES[effect.name]], -effect.change)  # type: ignore[assignment]
    (first, most), (_, second) = (*falls.most_common(2), ("", 0.0), ("", 0.0))[:2]
    return first if most >= max(_LEAST_FALL, _MOSTLY * second) else ""


def colour_names(prototype: PrototypeExplanation) -> str:
    """Name the one or two colours that cover most of what is lit of a patch."""
    match = prototype.source
    light, picture = images.spotlight_of(match), images.crop_around(match)
    if light is None:
        light, picture = np.ones((_PIXELS, _PIXELS), dtype=np.float32), match.crop
    if min(picture.shape[:2]) < _LEAST_PIXELS:  # there is no picture of it
        return ""
    left, top, right, bottom = (round(_PIXELS * edge) for edge in images.patch_frame(match))
    pixels, weights, counts = _squares(picture), np.zeros((_PIXELS, _PIXELS)), Counter[str]()
    weights[top:bottom, left:right] = _squares(light)[top:bottom, left:right]  # not what is lit around the box
    if not weights.any():  # the box is too thin
        return ""
    for pixel, weight in zip(pixels.reshape(-1, 3), weights.ravel(), strict=True):
        counts[_colour(pixel)] += float(weight)  # type: ignore[assignment]
    (first, most), (second, next_) = (*counts.most_common(2), ("", 0.0))[:2]
    return f"{first} and {second}" if next_ >= _SECOND * (most + next_) and second else first


def _squares(picture: Picture | np.ndarray) -> np.ndarray:
    rows, columns = (np.linspace(0, side - 1, _PIXELS).round().astype(int) for side in picture.shape[:2])
    squares: np.ndarray = picture[rows][:, columns]
    return squares


def _colour(pixel: np.ndarray) -> str:
    hue, saturation, value = colorsys.rgb_to_hsv(*(pixel / 255))
    if value < 0.2:
        return "black"
    if saturation < 0.15 or (saturation < 0.25 and value < 0.5):
        return "white" if value > 0.8 else "grey"
    name = next((name for limit, name in _HUES if 360 * hue < limit), "red")
    if name in ("red", "orange", "yellow") and value < 0.65 and not (name == "red" and saturation > 0.7):
        return "brown"
    return "pink" if name == "red" and saturation < 0.5 and value > 0.7 else name
