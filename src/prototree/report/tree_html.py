"""The whole tree as a self-contained page. The same parts serve the browser app.

The page is a template's body, its style sheets, and one script with the data beside it as JSON. The body has no inline
styles or handlers, so the app may serve it under a strict content security policy.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from prototree.explain.records import ClassExplanation, Location, Match, Picture, PrototypeExplanation, TreeExplanation
from prototree.report.cards import LEAF_SIZE, NODE_SIZE, SPACING
from prototree.report.histogram import spread_svg, spread_words
from prototree.report.images import (
    AROUND_SIDE,
    CLASS_SIDE,
    CROP_SIDE,
    HEAT_COLOURS,
    PHOTO_SIDE,
    SMALL_PHOTO_SIDE,
    data_url,
    frame_in,
    heat_values,
    reduced,
    surroundings_of,
)
from prototree.report.layout import most_ways
from prototree.report.templating import asset, render, script_json
from prototree.report.text import (
    METHOD_LONG,
    METHOD_SHORT,
    Reading,
    count,
    headline,
    hiding_words,
    strategy_words,
)

PictureUrl = Callable[[str, Picture], str]
"""From a picture's name, unique on its page, and the picture to where the page finds it."""

_CAUSE_WORDS = {
    "hue": "colour (hue)",
    "saturation": "strength of colour",
    "contrast": "contrast",
    "texture": "texture",
    "shape": "shape",
}
MOST_LARGE = 300  # prototypes whose pictures are as large as they may be
_SMALLEST_BAR = 0.002  # shares below this are not drawn


def tree_page(explanation: TreeExplanation) -> str:
    """The whole tree as one HTML file that needs no network."""
    return render(
        "tree.html",
        title=explanation.title,
        body=Markup(tree_body(explanation)),
        styles=[Markup(asset("base.css")), Markup(asset("tree.css"))],
        script=Markup(asset("mosaic.js") + asset("tree.js")),
        data=Markup(script_json(tree_data(explanation, data_url))),
    )


def tree_body(explanation: TreeExplanation) -> str:
    """What stands in the page's body, without data, style and script; `tree.js` fills it from `#tree-data`."""
    return render(
        "tree_body.html",
        title=explanation.title,
        size=f"{count(len(explanation.prototypes), 'prototype')} · "
        f"{count(len(explanation.class_names), 'class', 'classes')}",
        accuracy=headline(explanation),
        accuracy_means=strategy_words("greedy", explanation.question),
        question=explanation.question,
        tests=explanation.tests,
    )


def tree_data(explanation: TreeExplanation, picture_url: PictureUrl) -> dict[str, Any]:
    """Everything that `tree.js` shows, ready for JSON. `picture_url` says where each (reduced) picture is found."""
    reading, picture_url = Reading(explanation), _shrinking(picture_url, len(explanation.prototypes))
    return {
        "title": explanation.title,
        "question": explanation.question,
        "classes": list(explanation.class_names),
        "judged_on": explanation.judged_on,
        "sizes": {
            "node": list(NODE_SIZE), "leaf": list(LEAF_SIZE), **asdict(SPACING),
            "ways": most_ways(len(explanation.left)),
        },
        "heat_colours": [list(colour) for colour in HEAT_COLOURS],
        "nodes": [
            {
                "id": node,
                "left": explanation.left[node],
                "right": explanation.right[node],
                "below": list(reading.labels_below(node)),
                **_prototype_data(explanation.prototype_at(node, "right"), picture_url),
                "other": _prototype_data(explanation.prototype_at(node, "left"), picture_url)
                if reading.is_choice
                else None,
                **_spread_data(explanation, node),
            }
            for node in range(len(explanation.left))
        ],
        "class_facts": [_class_data(label, known, picture_url) for label, known in enumerate(explanation.classes)],
        "leaves": [
            {
                "id": rule.leaf,
                "label": rule.label,
                "share": _number(rule.share),
                "unsure": reading.is_unsure(rule.leaf),
                "shares": [
                    [k, _number(share)]
                    for k, share in enumerate(explanation.leaf_probs[rule.leaf].tolist())
                    if share >= _SMALLEST_BAR
                ],
            }
            for rule in reading.rules
        ],
    }  # fmt: skip


def _shrinking(picture_url: PictureUrl, n_prototypes: int) -> PictureUrl:
    """The same, of smaller pictures in larger trees, so that a page of any size can be sent and opened."""
    scale = math.sqrt(MOST_LARGE / max(n_prototypes, 1))
    if scale >= 1:
        return picture_url
    return lambda name, picture: picture_url(name, reduced(picture, max(1, round(scale * max(picture.shape[:2])))))


def _spread_data(explanation: TreeExplanation, node: int) -> dict[str, str]:
    spread, question = explanation.prototype_at(node, "right").spread, explanation.question
    if spread is None:
        return {"spread": "", "spread_words": ""}
    return {"spread": str(spread_svg(spread, question)), "spread_words": spread_words(spread, question)}


def _class_data(label: int, known: ClassExplanation, picture_url: PictureUrl) -> dict[str, Any]:
    return {
        "photos": [
            picture_url(f"class-{label}-{i}", reduced(photo, CLASS_SIDE)) for i, photo in enumerate(known.photos)
        ],
        "right": known.right_words,
        "taken_for": [list(pair) for pair in known.taken_for],
    }


def _prototype_data(prototype: PrototypeExplanation, picture_url: PictureUrl) -> dict[str, Any]:
    number, source = prototype.prototype, prototype.source
    return {
        "prototype": number,
        "reach": _number(prototype.reach),
        "note": prototype.note,
        "projected": prototype.distance_moved is not None,
        "moved": _number(prototype.distance_moved) if prototype.distance_moved is not None else None,
        "tests": list(prototype.tests),
        "photo": picture_url(f"photo-{number}", reduced(source.photo, PHOTO_SIDE)),
        "size": list(source.size),
        **_match_data(source, f"crop-{number}", picture_url),
        # If there is no picture of the patch's surroundings, the page cuts it out of the photo.
        "around": picture_url(f"around-{number}", reduced(source.around, AROUND_SIDE))
        if source.around is not None
        else None,
        "surroundings": [round(edge, 1) for edge in surroundings_of(source).edges],
        "frame": [_number(edge) for edge in frame_in(source)],
        "where": [_where_data(where) for where in source.where],
        "nearest": [
            {
                **_match_data(match, f"nearest-{number}-{i}", picture_url),
                "photo": picture_url(f"nearest-photo-{number}-{i}", reduced(match.photo, SMALL_PHOTO_SIDE)),
                "size": list(match.size),
                "where": [{"box": _box(where)} for where in match.where[:1]],
            }
            for i, match in enumerate(prototype.nearest)
        ],
        "right_share": [_number(share) for share in prototype.right_share],
        "causes": [[_CAUSE_WORDS[cause.name], _number(cause.change)] for cause in prototype.causes],
    }


def _match_data(match: Match, name: str, picture_url: PictureUrl) -> dict[str, Any]:
    return {
        "image": match.image,
        "label": match.label,
        "similarity": _number(match.similarity),
        "crop": picture_url(name, reduced(match.crop, CROP_SIDE)),
    }


def _where_data(where: Location) -> dict[str, Any]:
    return {
        "method": where.method,
        "name": METHOD_SHORT[where.method],
        "meaning": METHOD_LONG[where.method],
        "box": _box(where),
        "heat": heat_values(where.heat),
        "words": hiding_words(where.hiding),
    }


def _box(where: Location) -> list[float]:
    return [round(edge, 1) for edge in where.box.edges]


def _number(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
