"""Do the boxes show what the species differ in? The generated birds know (see `prototree_birds/ground_truth`)."""

from pathlib import Path

import pytest

from prototree.backbones.backbone import Backbone
from prototree.core.nodes import NodeFunction
from prototree.data import Box, ImageData, open_data
from prototree.errors import DataError
from prototree.pipeline.fit import fit
from prototree_birds import make_species
from prototree_birds.ground_truth import deciding_parts, on_differences, part_pixels, read_species, touches
from tiny_explain import projected


def test_parts_are_where_the_annotation_says(birds: ImageData) -> None:
    for sample in birds.train[::5]:
        image = sample.path.relative_to(birds.root).as_posix()
        for part in sample.parts:
            pixels = part_pixels(birds.root, image, {part.name})
            assert touches(pixels, Box(part.x - 6, part.y - 6, part.x + 6, part.y + 6).clip((64, 64))), part.name


@pytest.mark.slow
def test_boxes_of_the_demo_show_the_parts_in_which_species_differ(tmp_path: Path) -> None:
    data = open_data("birds")
    found = on_differences(fit("birds", tmp_path / "run", preset="demo").tree(), data)
    assert len(found) >= 5
    for place in ("peak", "cell"):
        touching = sum(own[place].touches for own in found.values()) / len(found)
        by_chance = sum(own[place].by_chance for own in found.values()) / len(found)
        print(place, touching, by_chance)
        assert touching >= 0.7
        assert touching > by_chance


def test_species_are_read_back_as_they_were_drawn(birds: ImageData, tmp_path: Path) -> None:
    species = read_species(birds.root, birds.class_names)
    assert species is not None
    assert [bird.looks for bird in species] == [bird.looks for bird in make_species(3, 0)]
    assert read_species(birds.root / "images", birds.class_names) is None
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "looks.txt").write_text("1 1 cone\n")
    with pytest.raises(DataError, match=r"looks\.txt"):
        read_species(tmp_path, ("a", "b"))


def test_a_node_is_about_what_its_look_alikes_differ_in() -> None:
    species = make_species(12, 0)
    family, others = [True] + [False] * 11, [False] + [True] * 11
    parts = deciding_parts(family, others, species)
    assert len(parts) >= 1
    assert deciding_parts(family, family, species) == (), "nobody differs from itself"


def test_prototypes_are_judged_by_the_pixels_of_the_part(tiny_backbone: Backbone, birds: ImageData) -> None:
    tree = projected(tiny_backbone, birds, node_function=NodeFunction("pairwise", 6.0))
    found = on_differences(tree, birds)
    assert found
    for prototype, own in found.items():
        source = tree.sources[prototype]
        assert source is not None
        pixels = part_pixels(birds.root, source.image, own["cell"].parts)
        left, top, right, bottom = (round(edge) for edge in source.patch_box)
        assert own["cell"].touches == bool(pixels[top:bottom, left:right].any())
        assert 0 <= own["cell"].by_chance <= 1
