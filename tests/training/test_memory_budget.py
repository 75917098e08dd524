import pytest

from prototree.config import preset
from prototree.training.memory_budget import Room
from prototree.training.recipes.distill import Distill


@pytest.mark.parametrize("gigabytes", [0.0, 0.5, 1.4, 64.0])
def test_all_shares_together_take_what_was_given(gigabytes: float) -> None:
    room = Room(gigabytes)
    shares = (room.maps, room.pairs, room.distances, room.targets)
    assert 4 * sum(shares) == pytest.approx(gigabytes * 1e9, abs=8)
    assert (min(shares) > 0) == (gigabytes > 0)


def test_the_setting_is_the_room_that_a_recipe_has() -> None:
    recipe = preset("default").changed({"memory": 0.5}).recipe
    assert isinstance(recipe, Distill)
    assert recipe.room == Room(0.5)
