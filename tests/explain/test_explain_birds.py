"""Do the boxes show what the species differ in? The generated birds know (see `explain/bird_differences`)."""

from pathlib import Path

import pytest

from prototree.data import Box, open_data
from prototree.data.birds.dataset import write_birds
from prototree.data.birds.truth import part_pixels
from prototree.explain.bird_differences import on_differences, touches
from prototree.pipeline.fit import fit


def test_parts_are_where_the_annotation_says(tmp_path: Path) -> None:
    write_birds(tmp_path / "b", n_species=3, train_per_species=12, test_per_species=1, size=96)
    data = open_data(tmp_path / "b")
    for sample in data.train[::5]:
        image = sample.path.relative_to(data.root).as_posix()
        for part in sample.parts:
            pixels = part_pixels(data.root, image, {part.name})
            assert touches(pixels, Box(part.x - 8, part.y - 8, part.x + 8, part.y + 8).clip((96, 96))), part.name


@pytest.mark.slow
def test_boxes_of_the_demo_show_the_parts_in_which_species_differ(tmp_path: Path) -> None:
    data = open_data("birds")
    found = on_differences(fit("birds", tmp_path / "run", preset_name="demo").tree(), data)
    assert len(found) >= 5
    for place in ("peak", "cell"):
        touching = sum(own[place].touches for own in found.values()) / len(found)
        by_chance = sum(own[place].by_chance for own in found.values()) / len(found)
        print(place, touching, by_chance)
        assert touching >= 0.7
        assert touching > by_chance
