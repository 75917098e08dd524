from collections import Counter
from pathlib import Path

import pytest

from prototree.backbones.geometry import Box
from prototree.data.dataset import ImageData, Sample, image_name, parse_fold, take_fold
from prototree.errors import ConfigError, DataError


def data(n_classes: int = 3, train: int = 5, test: int = 2) -> ImageData:
    splits = [
        tuple(Sample(Path(f"{split}/{label}/{i}.jpg"), label) for label in range(n_classes) for i in range(count))
        for split, count in (("train", train), ("test", test))
    ]
    return ImageData(Path(), "folder", tuple("abcdef"[:n_classes]), splits[0], splits[1])


def test_boxes() -> None:
    box = Box.from_corner(10.0, 5.0, 20.0, 8.0)
    assert box == Box(10.0, 5.0, 30.0, 13.0)
    assert (box.width, box.height) == (20.0, 8.0)
    assert Box(10.0, 10.0, 30.0, 20.0).enlarge(0.1) == Box(8.0, 9.0, 32.0, 21.0)
    assert Box(-3.0, -2.0, 50.0, 40.0).clip((40, 30)) == Box(0.0, 0.0, 40.0, 30.0)
    assert Box(50.0, 5.0, 60.0, 9.0).clip((40, 30)) == Box(40.0, 5.0, 40.0, 9.0)
    assert box.contains(30.0, 5.0)
    assert not box.contains(30.1, 5.0)
    assert box.contains_box(Box(11.0, 6.0, 30.0, 9.0))
    assert not box.contains_box(Box(11.0, 6.0, 31.0, 9.0))
    for edges in ((5.0, 0.0, 4.0, 1.0), (0.0, 2.0, 1.0, 1.0), (0.0, 0.0, float("nan"), 1.0)):
        with pytest.raises(DataError):
            Box(*edges)


def test_a_bootstrap_sample_draws_with_replacement_within_classes() -> None:
    whole = data(train=20)
    drawn = whole.bootstrap(1)
    assert Counter(sample.label for sample in drawn.train) == Counter(sample.label for sample in whole.train)
    assert set(drawn.train) < set(whole.train), "some images are missing, none is new"
    assert drawn.test == whole.test
    assert whole.bootstrap(1) == drawn != whole.bootstrap(2)


def test_folds_deal_out_every_image_once() -> None:
    whole = data()
    folds = [take_fold(whole, f"{k}/4") for k in range(1, 5)]
    assert sorted(len(fold.test) for fold in folds) == [5, 5, 5, 6]
    tested = sorted((sample for fold in folds for sample in fold.test), key=lambda sample: str(sample.path))
    assert tuple(tested) == whole.all_samples
    for fold in folds:
        assert set(fold.train) == set(whole.all_samples) - set(fold.test)
        assert {sample.label for sample in fold.test} == {0, 1, 2}
    assert take_fold(folds[0], "2/4") == folds[1], "whatever split the data has"
    for wrong in ("5/4", "0/4", "1/1", "2", "a/b", "1/1000"):
        with pytest.raises(ConfigError, match="fold"):
            parse_fold(wrong)


def test_validation_and_held_out_test_do_not_meet() -> None:
    whole = data(test=5)
    assert [len(part) for part in (whole.validation, whole.held_out_test)] == [9, 6]
    assert {*whole.validation, *whole.held_out_test} == set(whole.test)
    own = ImageData(Path(), "folder", ("a",), whole.train, whole.test, validation_split=whole.train[:1])
    assert (own.validation, own.held_out_test) == (whole.train[:1], whole.test)


def test_groups_stay_together_in_folds_and_validation() -> None:
    samples = tuple(Sample(Path(f"{i}.jpg"), i // 2 % 3, group=f"{i // 2}" if i % 12 else "") for i in range(60))
    whole = ImageData(Path(), "folder", ("a", "b", "c"), samples[:30], samples[30:])
    for fold in range(1, 5):
        part = take_fold(whole, f"{fold}/4")
        assert {*part.train, *part.test} == set(samples)
        assert not {s.group for s in part.train} & {s.group for s in part.test} - {""}
        assert len(part.test) >= 10
    assert not {s.group for s in whole.validation} & {s.group for s in whole.held_out_test} - {""}
    assert whole.validation
    assert whole.held_out_test


def test_images_are_named_within_their_data() -> None:
    assert image_name(Path("/data"), Path("/data/a/b.jpg")) == "a/b.jpg"
    assert image_name(Path("/data"), Path("/elsewhere/c.jpg")) == "../elsewhere/c.jpg"
    assert image_name(Path("/data"), Path("/data/../elsewhere/c.jpg")) == "../elsewhere/c.jpg"
