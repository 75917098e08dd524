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
_SECOND = 0.3  # of the pixels: a colour that is named too
_FILLS = 0.4  # of the pixels around a patch: a colour that fills them
_PIXELS, _LEAST_PIXELS = 24, 4  # a side
_HUES = ((18, "red"), (42, "orange"), (68, "yellow"), (165, "green"), (255, "blue"), (290, "violet"), (335, "pink"))
_MAX_CLASSES = 3
_COLOURLESS = ("grey", "white", "black", "brown")


@dataclass(frozen=True)
class Suggestion:
    """A name for a patch, and in a sentence what it is drawn from."""

    name: str
    reason: str


def suggest(
    prototype: PrototypeExplanation, towards: Sequence[str], other: PrototypeExplanation | None = None
) -> Suggestion:
    """Suggest a name for a prototype, out of what the `other` one of its node does not have too.

    `towards` are the classes on its side. There is no name where little is known of it.
    """
    own, cause, shared = colours(prototype), main_cause(prototype), set(colours(other)) if other is not None else set()
    telling = [colour for colour in own if colour not in shared | surrounding_colours(prototype)]
    thing = prototype.part or (cause if cause in ("shape", "texture") else "patch")
    classes = ", ".join(f"\u2068{name}\u2069" for name in towards[:_MAX_CLASSES])
    more = f" and {len(towards) - _MAX_CLASSES} more" if len(towards) > _MAX_CLASSES else ""
    reasons = [
        f"main colour{'s' if len(own) > 1 else ''} {' and '.join(own)}" if own else "",
        f"mostly on the part {prototype.part}" if prototype.part else "",
        f"mostly {cause} counts when the photo is altered" if cause else "",
        f"leads towards {classes}{more}" if towards else "",
    ]
    # A grey patch may be anything.
    is_telling = prototype.part or (telling and (cause or any(colour not in _COLOURLESS for colour in telling)))
    name = f"{' and '.join(telling)} {thing}".strip() if is_telling else ""
    return Suggestion(name, "; ".join(filter(None, reasons)))


def main_cause(prototype: PrototypeExplanation) -> str:
    """Name the property whose alteration lowers the similarity by far the most; empty where none stands out."""
    falls = Counter[str]()
    for effect in prototype.perturbation_effects:
        falls[_CAUSES[effect.name]] = max(falls[_CAUSES[effect.name]], -effect.change)  # type: ignore[assignment]
    (first, most), (_, second) = (*falls.most_common(2), ("", 0.0), ("", 0.0))[:2]
    return first if most >= max(_LEAST_FALL, _MOSTLY * second) else ""


def colours(prototype: PrototypeExplanation) -> tuple[str, ...]:
    """Name the one or two colours that cover most of a patch, the larger one first."""
    inside, _ = _colour_counts(prototype)
    (first, most), (second, next_) = (*inside.most_common(2), ("", 0), ("", 0))[:2]
    return tuple(filter(None, (first, second if next_ >= _SECOND * (most + next_) else "")))


def surrounding_colours(prototype: PrototypeExplanation) -> set[str]:
    """Name the colours that fill what lies around a patch: they do not tell it from there."""
    _, around = _colour_counts(prototype)
    return {colour for colour, n in around.items() if n >= _FILLS * around.total()}


def _colour_counts(prototype: PrototypeExplanation) -> tuple[Counter[str], Counter[str]]:
    """Count the colours of the pixels of a patch, and of those around it."""
    picture, inside, around = images.crop_around(prototype.source), Counter[str](), Counter[str]()
    if min(picture.shape[:2]) < _LEAST_PIXELS:  # there is no picture of it
        return inside, around
    left, top, right, bottom = (round(_PIXELS * edge) for edge in images.patch_frame(prototype.source))
    for y, row in enumerate(_squares(picture)):
        for x, pixel in enumerate(row):
            (inside if left <= x < right and top <= y < bottom else around)[_colour(pixel)] += 1
    return inside, around


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
