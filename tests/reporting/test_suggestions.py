"""A suggested name says what was measured of a patch, and from what it was drawn."""

from dataclasses import replace

import numpy as np
import pytest

from prototree.backbones.geometry import Box
from prototree.core.topology import Topology
from prototree.explanation.records import Location, PerturbationEffect, Picture, PrototypeExplanation
from prototree.reporting.suggestions import colours, main_cause, suggest
from prototree.reporting.tree_page import tree_data
from sample_explanations import tree


def painted(*colours: tuple[int, int, int]) -> PrototypeExplanation:
    """A prototype whose patch has these colours, side by side."""
    prototype = tree(Topology.full(1)).prototypes[0]
    stripes = np.array(colours, dtype=np.uint8)[None].repeat(60, axis=0).repeat(60 // len(colours), axis=1)
    picture: Picture = stripes
    source = replace(prototype.source, context=None, locations=(), crop=picture)
    return replace(prototype, source=source, perturbation_effects=())


@pytest.mark.parametrize(
    ("pixels", "name"),
    [
        (((200, 20, 20),), "red"), (((20, 40, 200),), "blue"), (((250, 250, 250), (5, 5, 5)), "white and black"),
        (((110, 70, 30),), "brown"), (((240, 220, 40),), "yellow"), (((128, 128, 128),), "grey"),
    ],
)  # fmt: skip
def test_colours_are_named(pixels: tuple[tuple[int, int, int], ...], name: str) -> None:
    assert set(colours(painted(*pixels))) == set(name.split(" and "))


def test_the_property_that_matters_by_far_is_named() -> None:
    def altered(**changes: float) -> PrototypeExplanation:
        effects = tuple(PerturbationEffect(name, change) for name, change in changes.items())  # type: ignore[arg-type]
        return replace(painted((200, 20, 20)), perturbation_effects=effects)

    assert main_cause(altered(hue=-0.6, saturation=-0.5, shape=-0.1)) == "colour"
    assert main_cause(altered(hue=-0.1, shape=-0.5)) == "shape"
    assert main_cause(altered(hue=-0.5, shape=-0.45)) == ""
    assert main_cause(altered(shape=-0.01)) == main_cause(altered()) == ""
    suggestion = suggest(replace(altered(shape=-0.5), part="beak"), ["Jay", "Kite", "Owl", "Wren"])
    assert suggestion.name == "red beak"
    assert "mostly shape" in suggestion.reason
    assert "1 more" in suggestion.reason


def test_a_page_names_the_classes_of_each_side() -> None:
    data = tree_data(tree(Topology.full(1), names=("Jay", "Owl"), node_kind="pairwise"), lambda name, picture: name)
    node = data["nodes"][0]
    assert "Jay" in node["other"]["suggested_from"]
    assert "Jay" not in node["suggested_from"]


def test_a_name_is_suggested_for_one_patch_alone_and_grey_says_nothing() -> None:
    explained = tree(Topology.full(1), names=("Jay", "Owl"), node_kind="pairwise")
    left, right = explained.prototypes
    for parts, names in ((("beak", "beak"), ("", "")), (("beak", "wing"), ("beak", "wing"))):  # both are red
        same = tuple(replace(painted((200, 20, 20)), prototype=p.prototype, side=p.side, part=part)
                     for p, part in zip((left, right), parts, strict=True))  # fmt: skip
        node = tree_data(replace(explained, prototypes=same), lambda name, picture: name)["nodes"][0]
        found = {side["suggestion"] for side in (node, node["other"])}
        assert found == set(names)
    assert suggest(painted((128, 128, 128)), ["Jay"]).name == ""
    assert "main colour grey" in suggest(painted((128, 128, 128)), ["Jay"]).reason


def test_only_what_differs_between_the_sides_is_suggested() -> None:
    red, white, blue = (200, 20, 20), (250, 250, 250), (20, 40, 200)
    left, right = painted(red, white), painted(white, blue)
    assert suggest(left, ["Jay"], right).name == "red patch"
    assert suggest(right, ["Owl"], left).name == "blue patch"
    assert suggest(painted(red, white), ["Jay"], painted(white, red)).name == ""


def test_a_colour_that_fills_the_surroundings_is_not_suggested() -> None:
    photo = np.full((90, 90, 3), (20, 40, 200), dtype=np.uint8)
    photo[30:60, 30:45] = (200, 20, 20)
    box = Location("peak", Box(30.0, 30.0, 60.0, 60.0), np.zeros((1, 1), dtype=np.float32), None)
    prototype = painted((0, 0, 0))
    source = replace(prototype.source, photo=photo, size=(90, 90), locations=(box,))
    assert suggest(replace(prototype, source=source), ["Jay"]).name == "red patch"


def test_where_there_is_no_picture_no_colour_is_claimed() -> None:
    prototype = painted((0, 0, 0))
    nothing = replace(prototype.source, crop=np.zeros((1, 1, 3), dtype=np.uint8))
    assert suggest(replace(prototype, source=nothing), ["Jay"]).name == ""
