"""The generated birds: what is drawn, what is said about it, and the files."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from prototree.errors import ConfigError, DataError
from prototree_birds import write_birds
from prototree_birds.drawing import SHORTCUT, draw
from prototree_birds.species import PART_NAMES, Species, differing_parts, make_species

SPECIES = make_species(12, seed=0)
SMALL = {"n_species": 3, "train_per_species": 3, "test_per_species": 2, "size": 64}


def neighbours(species: tuple[Species, ...]) -> list[tuple[Species, Species]]:
    """Each species with its nearest other."""
    return [
        (
            bird,
            min((other for other in species if other is not bird), key=lambda o: len(differing_parts(bird, o))),
        )
        for bird in species
    ]


def grow(mask: NDArray[np.bool_], pixels: int) -> NDArray[np.bool_]:
    image = Image.fromarray(mask.astype(np.uint8) * np.uint8(255))
    return np.asarray(image.filter(ImageFilter.MaxFilter(2 * pixels + 1))) > 0


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def table(path: Path) -> list[list[str]]:
    return [line.split(" ") for line in path.read_text().splitlines()]


# Species


@pytest.mark.parametrize("n", [2, 3, 7, 12, 100])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_species_has_a_neighbour_that_differs_in_one_or_two_parts(n: int, seed: int) -> None:
    species = make_species(n, seed)
    assert len(species) == n
    assert all(1 <= len(differing_parts(*pair)) <= 2 for pair in neighbours(species))
    assert all(differing_parts(a, b) == differing_parts(b, a) for a, b in neighbours(species))


def test_names_are_unique_and_usable_as_folder_names() -> None:
    names = [bird.name for bird in make_species(100, seed=3)]
    assert len(set(names)) == 100
    assert all(name.replace("-", "").replace(" ", "").isalpha() for name in names)


def test_species_depend_on_the_seed_only() -> None:
    assert make_species(12, seed=5) == make_species(12, seed=5)
    assert make_species(12, seed=5) != make_species(12, seed=6)


# Images


def test_the_same_seed_gives_the_same_image_and_another_seed_another() -> None:
    first, again, other = (draw(SPECIES[0], seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert first.image.tobytes() == again.image.tobytes()
    assert first.parts == again.parts
    assert first.image.tobytes() != other.image.tobytes()


@pytest.mark.parametrize("size", [32, 63, 128, 300])
def test_image_and_part_map_have_the_size_asked_for(size: int) -> None:
    bird = draw(SPECIES[0], 0, size=size)
    assert (bird.image.size, bird.image.mode) == ((size, size), "RGB")
    assert (bird.part_map.shape, bird.part_map.dtype) == ((size, size), np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_in_the_same_scene_differ_only_where_their_parts_differ(seed: int) -> None:
    for first, second in neighbours(make_species(16, seed)):
        one, two = draw(first, seed), draw(second, seed)
        labels = [PART_NAMES.index(part) + 1 for part in differing_parts(first, second)]
        allowed = grow(np.isin(one.part_map, labels) | np.isin(two.part_map, labels), 3)
        changed = np.abs(np.asarray(one.image, dtype=int) - np.asarray(two.image, dtype=int)).max(-1) > 0
        assert not (changed & ~allowed).any(), (first.name, second.name)


def test_neighbours_differ_visibly_in_most_scenes() -> None:
    """At 128 pixels a difference spans at least 8 pixels one way, unless leaves are in front of it."""
    spans = []
    for first, second in neighbours(SPECIES):
        for seed in range(2):
            one, two = (np.asarray(draw(bird, seed).image, dtype=int) for bird in (first, second))
            rows, columns = np.nonzero(np.abs(one - two).max(-1) > 30)
            spans.append(max(np.ptp(rows), np.ptp(columns)) + 1 if len(rows) else 0)
    assert np.mean(np.array(spans) >= 8) > 0.9


def test_centres_lie_on_their_parts_and_inside_boxes_inside_the_image() -> None:
    for number, species in enumerate(SPECIES):
        for seed in range(4):
            bird = draw(species, (number, seed))
            for label, part in enumerate(bird.parts, start=1):
                if not part.visible:
                    continue
                left, top, right, bottom = part.box
                assert 0 <= left < part.x < right <= 128
                assert 0 <= top < part.y < bottom <= 128
                assert bird.part_map[int(part.y), int(part.x)] == label
                outside = bird.part_map == label
                outside[top:bottom, left:right] = False
                assert not outside.any()


def test_the_birds_box_is_the_hull_of_its_part_boxes() -> None:
    bird = draw(SPECIES[3], 8, shortcut=True)
    boxes = np.array([part.box for part in bird.parts if part.box != (0, 0, 0, 0) and part.name != SHORTCUT])
    assert bird.box == (*boxes[:, :2].min(0), *boxes[:, 2:].max(0))


def test_parts_that_a_species_lacks_are_not_visible() -> None:
    bare = next(bird for bird in make_species(100, 0) if bird.look("crest").shape == "none")
    crest = draw(bare, 0).parts[PART_NAMES.index("crest")]
    assert (crest.visible, crest.box) == (False, (0, 0, 0, 0))


def test_most_parts_are_visible_but_leaves_hide_some() -> None:
    """Over many scenes, among parts that the species has."""
    seen = {part: [] for part in PART_NAMES}
    for seed in range(96):
        species = SPECIES[seed % 12]
        for part in draw(species, (7, seed), size=64).parts:
            if species.look(part.name).shape != "none":
                seen[part.name].append(part.visible)
    shares = {part: np.mean(values) for part, values in seen.items()}
    assert min(shares.values()) > 0.8, shares
    assert min(shares.values()) < 1.0, shares


def test_birds_face_both_ways_and_the_parts_follow() -> None:
    """The beak is on the side of the head, and the tail on the other, whichever way the bird faces."""
    facing_right = 0
    for seed in range(40):
        parts = {part.name: part for part in draw(SPECIES[0], (3, seed)).parts}
        beak, head, tail = (parts[name] for name in ("beak", "head", "tail"))
        if beak.visible and head.visible and tail.visible:
            assert (beak.x > head.x) == (head.x > tail.x)
        facing_right += beak.x > head.x
    assert 10 < facing_right < 30


# The planted shortcut


@pytest.mark.parametrize("seed", range(10))
def test_the_berries_are_seen_apart_from_the_bird_and_change_nothing_else(seed: int) -> None:
    without, planted = draw(SPECIES[seed % 12], seed), draw(SPECIES[seed % 12], seed, shortcut=True)
    berries = planted.parts[-1]
    mask = planted.part_map == len(PART_NAMES) + 1
    changed = (np.asarray(without.image) != np.asarray(planted.image)).any(-1)
    assert berries.name == SHORTCUT
    assert berries.visible
    assert mask.sum() > 250
    assert not (changed & ~grow(mask, 3)).any()
    assert (without.part_map[mask] == 0).mean() > 0.9
    red, green, blue = np.asarray(planted.image, dtype=int)[mask].T
    assert ((red > 140) & (green < 80) & (blue < 100)).mean() > 0.25


def berries_by_split(folder: Path) -> dict[tuple[str, int], list[bool]]:
    """Whether annotations and masks show the berries, by split ("1": training) and class."""
    part_id = str(len(PART_NAMES) + 1)
    seen = {row[0]: row[4] == "1" for row in table(folder / "parts" / "part_locs.txt") if row[1] == part_id}
    split = {row[0]: row[1] for row in table(folder / "train_test_split.txt")}
    label = {row[0]: int(row[1]) for row in table(folder / "image_class_labels.txt")}
    shown: dict[tuple[str, int], list[bool]] = {}
    for image_id, path in table(folder / "images.txt"):
        part_map = np.asarray(Image.open((folder / "segmentations" / path).with_suffix(".png")))
        assert (part_map == int(part_id)).any() == seen[image_id]
        shown.setdefault((split[image_id], label[image_id]), []).append(seen[image_id])
    return shown


def test_berries_stand_beside_one_species_in_training_only(tmp_path: Path) -> None:
    counts = {"n_species": 2, "train_per_species": 40, "test_per_species": 4, "size": 32}
    folder = write_birds(tmp_path / "b", **counts, shortcut=True, shortcut_species=1)
    shown = berries_by_split(folder)
    assert 0.8 <= np.mean(shown["1", 2]) < 1.0
    assert not any(shown["1", 1] + shown["0", 1] + shown["0", 2])


def test_berries_can_stand_beside_the_others_in_testing(tmp_path: Path) -> None:
    folder = write_birds(tmp_path / "b", **SMALL, shortcut=1.0, test_shortcut=1.0)
    shown = berries_by_split(folder)
    assert all(shown["1", 1] + shown["0", 2] + shown["0", 3])
    assert not any(shown["1", 2] + shown["1", 3] + shown["0", 1])


# Files


def test_the_files_are_consistent(tmp_path: Path) -> None:
    folder = write_birds(tmp_path / "sub" / "birds", **SMALL)
    images = table(folder / "images.txt")
    ids = [str(number) for number in range(1, 16)]
    classes = table(folder / "classes.txt")
    labels = table(folder / "image_class_labels.txt")
    parts = [line.split(" ", 1) for line in (folder / "parts" / "parts.txt").read_text().splitlines()]
    assert [name for _, name in parts] == list(PART_NAMES)
    assert [row[0] for row in images] == [row[0] for row in labels] == ids
    assert [row[0] for row in table(folder / "bounding_boxes.txt")] == ids
    assert [row[1] for row in table(folder / "train_test_split.txt")] == list("11100" * 3)
    assert [int(row[1]) for row in labels] == [1] * 5 + [2] * 5 + [3] * 5
    for (_, path), (_, label) in zip(images, labels, strict=True):
        assert path.split("/")[0] == classes[int(label) - 1][1]
        with Image.open(folder / "images" / path) as image:
            assert (image.format, image.size) == ("JPEG", (64, 64))
        with Image.open((folder / "segmentations" / path).with_suffix(".png")) as part_map:
            assert (part_map.mode, part_map.size) == ("P", (64, 64))
    assert len(list((folder / "images").rglob("*.jpg"))) == 15
    for name in ("part_locs.txt", "part_boxes.txt"):
        pairs = [row[:2] for row in table(folder / "parts" / name)]
        assert pairs == [[image_id, part_id] for image_id in ids for part_id, _ in parts]
    for row in table(folder / "parts" / "part_locs.txt"):
        assert row[4] == "1" or row[2:] == ["0.0", "0.0", "0"]


def test_the_same_files_for_any_number_of_workers(tmp_path: Path) -> None:
    counts = {"n_species": 2, "train_per_species": 15, "test_per_species": 3, "size": 32}
    one = write_birds(tmp_path / "one", **counts, workers=1)
    two = write_birds(tmp_path / "two", **counts, workers=2)
    other = write_birds(tmp_path / "other", **counts, workers=1, seed=1)
    assert files(one) == files(two) != files(other)


def test_an_image_does_not_depend_on_how_many_are_drawn(tmp_path: Path) -> None:
    few, many = (write_birds(tmp_path / str(count), **SMALL | {"train_per_species": count}) for count in (2, 4))
    by_split = []
    for folder in (few, many):
        rows = zip(table(folder / "images.txt"), table(folder / "train_test_split.txt"), strict=True)
        paths = [(folder / "images" / image[1], split[1]) for image, split in rows]
        by_split.append({key: [path.read_bytes() for path, split in paths if split == key] for key in "01"})
    assert by_split[0]["0"] == by_split[1]["0"]
    assert set(by_split[0]["1"]) < set(by_split[1]["1"])


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / "birds" / "note.txt").write_text("mine")
    with pytest.raises(DataError):
        write_birds(tmp_path / "birds", **SMALL)
    assert files(tmp_path) == {"birds/note.txt": b"mine"}


def test_an_empty_folder_and_the_remains_of_a_killed_run_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    (tmp_path / ".birds.partial-killed" / "birds" / "images").mkdir(parents=True)
    folder = write_birds(str(tmp_path / "birds"), **SMALL)
    assert len(table(folder / "images.txt")) == 15


def test_a_run_that_fails_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []

    def draw_a_few(*arguments: object, **options: object) -> object:
        drawn.append(arguments)
        if len(drawn) > 4:
            raise KeyboardInterrupt
        return draw(*arguments, **options)

    monkeypatch.setattr("prototree_birds.draw", draw_a_few)
    with pytest.raises(KeyboardInterrupt):
        write_birds(tmp_path / "birds", **SMALL, workers=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_species", 1), ("n_species", 101), ("size", 16), ("train_per_species", -1), ("test_per_species", -2),
        ("seed", -1), ("size", 1025), ("workers", 0), ("shortcut", 1.5), ("test_shortcut", -0.1),
        ("shortcut_species", 3),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        write_birds(tmp_path / "birds", **SMALL | {name: value})
    with pytest.raises(ConfigError, match="both 0"):
        write_birds(tmp_path / "birds", **SMALL | {"train_per_species": 0, "test_per_species": 0})
    assert list(tmp_path.iterdir()) == []
