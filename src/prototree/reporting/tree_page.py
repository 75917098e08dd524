"""The whole tree as a self-contained HTML page. The same parts serve the browser app.

The page is a template's body, its style sheets, and one script with the data beside it as JSON. The body has no inline
styles or handlers, so the app may serve it under a strict content security policy.
"""

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from markupsafe import Markup

from prototree.explanation.records import Match, PrototypeExplanation, TreeExplanation
from prototree.reporting import asset, images, json_number, render, script_json, text
from prototree.reporting.histogram import histogram_svg, histogram_text
from prototree.reporting.images import PictureUrl, data_url, reduced
from prototree.reporting.layout import FAMILY_SIZE, LEAF_SIZE, NODE_SIZE, READABLE, SPACING, max_options
from prototree.reporting.suggestions import suggest
from prototree.reporting.text import TreeText

MAX_LARGE = 300  # prototypes whose pictures are as large as they may be
_MIN_SHARE = 0.002  # class probabilities of a leaf below this are left out
_CAUSES = {
    "hue": "colour (hue)",
    "saturation": "strength of colour",
    "contrast": "contrast",
    "texture": "texture",
    "shape": "shape",
}


def tree_page(explanation: TreeExplanation) -> str:
    """Write the whole tree as one HTML file that needs no network."""
    return render(
        "tree.html",
        title=explanation.title,
        body=tree_body(explanation),
        styles=[asset("base.css"), asset("tree.css")],
        script=asset("mosaic.js") + asset("tree.js"),
        data=script_json(tree_data(explanation, data_url)),
    )


def tree_body(explanation: TreeExplanation) -> Markup:
    """Fill the page's body, without data, style and script; `tree.js` completes it from `#tree-data`."""
    body = render(
        "tree_body.html",
        title=explanation.title,
        made_from=explanation.made_from,
        size=text.tree_size(explanation),
        accuracy=text.headline(explanation),
        accuracy_means=text.strategy_text("greedy", explanation.node_kind),
        node_kind=explanation.node_kind,
        test_results=explanation.test_results,
    )
    return Markup(body)


def tree_data(explanation: TreeExplanation, picture_url: PictureUrl) -> dict[str, Any]:
    """Return everything that `tree.js` shows, ready for JSON. `picture_url` says where each (reduced) picture is found.

    Pictures are smaller in larger trees, so that a page of any size can be sent and opened.
    """
    tree, scale = TreeText(explanation), math.sqrt(MAX_LARGE / max(len(explanation.prototypes), 1))
    ways = max_options(len(explanation.left))

    def url(name: str, picture: Any) -> str:
        if scale < 1:
            picture = reduced(picture, max(1, round(scale * max(picture.shape[:2]))))
        return picture_url(name, picture)

    return {
        "title": explanation.title,
        "fingerprint": fingerprint(explanation),
        "node_kind": explanation.node_kind,
        "classes": list(explanation.class_names),
        "evaluated_on": explanation.evaluated_on,
        "sizes": {
            "node": list(NODE_SIZE),
            "leaf": list(LEAF_SIZE),
            "family": list(FAMILY_SIZE),
            **asdict(SPACING),
            "readable": READABLE,
            "ways": ways,
        },
        "heat_colours": [list(colour) for colour in images.HEAT_COLOURS],
        "nodes": _without_repeated_suggestions([_node_data(tree, node, url) for node in range(len(explanation.left))]),
        "class_facts": [
            {
                "photos": [
                    url(f"class-{k}-{i}", reduced(photo, images.CLASS_SIDE)) for i, photo in enumerate(facts.photos)
                ],
                "correct": facts.correct_text,
                "confused_with": [list(pair) for pair in facts.confused_with],
            }
            for k, facts in enumerate(explanation.classes)
        ],
        "leaves": [
            {
                "id": rule.leaf,
                "predicted_class": rule.predicted,
                "share": json_number(rule.share, 4),
                "unsure": tree.is_unsure(rule.leaf),
                "shares": [
                    [label, json_number(prob, 4)]
                    for label, prob in enumerate(explanation.leaf_probs[rule.leaf].tolist())
                    if prob >= _MIN_SHARE
                ],
            }
            for rule in tree.rules
        ],
    }


def fingerprint(explanation: TreeExplanation) -> str:
    """Compute a digest of a tree's shape and of where its patches are: names typed on its page belong to these."""
    sources = [prototype.source for prototype in explanation.prototypes]
    patches = [[source.image, [round(edge, 1) for edge in images.context_box(source).edges]] for source in sources]
    content = [explanation.left, explanation.right, explanation.class_names, patches]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _without_repeated_suggestions(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop names that are suggested for several patches: they would tell nothing apart."""
    sides = [side for node in nodes for side in (node, node["other"]) if side]
    names = Counter(frozenset(side["suggestion"].split()) for side in sides)  # in whatever order
    for side in sides:
        if names[frozenset(side["suggestion"].split())] > 1:
            side["suggestion"] = ""
    return nodes


def _node_data(tree: TreeText, node: int, url: PictureUrl) -> dict[str, Any]:
    explanation, (*left, right) = tree.explanation, tree.sides(node)
    histogram, kind = right.histogram, explanation.node_kind
    return {
        "id": node,
        "left": explanation.left[node],
        "right": explanation.right[node],
        "below": list(tree.classes_below(node)),
        **_prototype_data(tree, right, url),
        "other": _prototype_data(tree, left[0], url) if left else None,
        "histogram": "" if histogram is None else str(histogram_svg(histogram, kind)),
        "histogram_caption": "" if histogram is None else histogram_text(histogram, kind),
    }


def _prototype_data(tree: TreeText, prototype: PrototypeExplanation, url: PictureUrl) -> dict[str, Any]:
    row, source, moved = prototype.prototype, prototype.source, prototype.projection_distance
    children = tree.explanation.right if prototype.side == "right" else tree.explanation.left
    towards = tree.classes_below(children[prototype.node])
    other = next((side for side in tree.sides(prototype.node) if side.prototype != row), None)
    suggestion = suggest(prototype, [tree.explanation.class_names[label] for label in towards], other)
    light = images.spotlight_of(source)
    context = None if source.context is None else url(f"context-{row}", reduced(source.context, images.CONTEXT_SIDE))
    return {
        "patch": tree.patch(prototype),
        "towards": list(towards),
        "radius": json_number(prototype.radius, 4),
        "note": prototype.note,
        "suggestion": suggestion.name,
        "suggested_from": suggestion.reason,
        "light": "" if light is None else images.spotlight_url(light),
        "projected": moved is not None,
        "moved": None if moved is None else json_number(moved, 4),
        "test_results": list(prototype.test_results),
        "photo": url(f"photo-{row}", reduced(source.photo, images.PHOTO_SIDE)),
        **_match_data(source, f"crop-{row}", url),
        "context": context,  # None: the page cuts it out of the photo
        "context_box": [round(edge, 1) for edge in images.context_box(source).edges],
        "frame": [json_number(edge, 4) for edge in images.patch_frame(source)],
        "locations": [
            {
                "method": where.method,
                "name": text.METHODS[where.method][0],
                "meaning": text.METHODS[where.method][1],
                "box": [round(edge, 1) for edge in where.box.edges],
                "heat": images.heat_values(where.heat),
                "text": text.occlusion_text(where.occlusion),
            }
            for where in source.locations
        ],
        "nearest": [
            {
                **_match_data(match, f"nearest-{row}-{i}", url),
                "photo": url(f"nearest-photo-{row}-{i}", reduced(match.photo, images.SMALL_PHOTO_SIDE)),
                "locations": [{"box": [round(edge, 1) for edge in where.box.edges]} for where in match.locations[:1]],
            }
            for i, match in enumerate(prototype.nearest)
        ],
        "class_pass_rate": [json_number(share, 4) for share in prototype.class_pass_rate],
        "perturbation_effects": [
            [_CAUSES[cause.name], json_number(cause.change, 4)] for cause in prototype.perturbation_effects
        ],
    }


def _match_data(match: Match, name: str, url: PictureUrl) -> dict[str, Any]:
    return {
        "image": match.image,
        "label": match.label,
        "similarity": json_number(match.similarity, 4),
        "size": list(match.size),
        "crop": url(name, reduced(match.crop, images.CROP_SIDE)),
    }
