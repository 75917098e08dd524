"""Tiny data sets for the tests, made on the spot."""

from pathlib import Path

import numpy as np
from PIL import Image

CUB_50 = Path(__file__).parents[2] / "shared" / "data" / "CUB_50"

CORNER_COLOURS = np.array([[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 0)]], dtype=np.uint8)


def smooth_photo(size: tuple[int, int] = (40, 30), seed: int = 0) -> Image.Image:
    """A photo without sharp edges, which JPEG keeps nearly as it is."""
    rough = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(rough).resize(size, Image.Resampling.BICUBIC)


def four_colours(size: tuple[int, int] = (64, 32)) -> Image.Image:
    """Red, green, blue and yellow quarters: tells every flip and turn apart."""
    return Image.fromarray(CORNER_COLOURS).resize(size, Image.Resampling.NEAREST)


def write_classes(root: Path, counts: dict[str, int], size: tuple[int, int] = (40, 30)) -> Path:
    """One folder of photos for each class."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            smooth_photo(size, seed=index).save(root / name / f"{index}.jpg")
    return root


def write_cub(root: Path, n_images: int = 4) -> Path:
    """CUB's layout: two classes, photos of 40 x 30 with one box each and two parts, every second one for training."""
    tables: dict[str, list[str]] = {
        "classes.txt": ["1 001.Black_footed_Albatross", "2 002.Auk"],
        "images.txt": [],
        "image_class_labels.txt": [],
        "train_test_split.txt": [],
        "bounding_boxes.txt": [],
        "parts/parts.txt": ["1 beak", "2 left wing"],
        "parts/part_locs.txt": [],
    }
    for image in range(1, n_images + 1):
        label = 1 + (image > n_images // 2)
        name = f"{tables['classes.txt'][label - 1].split()[1]}/{image}.jpg"
        (root / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        smooth_photo(seed=image).save(root / "images" / name)
        tables["images.txt"].append(f"{image} {name}")
        tables["image_class_labels.txt"].append(f"{image} {label}")
        tables["train_test_split.txt"].append(f"{image} {image % 2}")
        tables["bounding_boxes.txt"].append(f"{image} 10.0 5.0 20.0 10.0")
        tables["parts/part_locs.txt"] += [f"{image} 1 12.5 8.0 1", f"{image} 2 0.0 0.0 0"]
    (root / "parts").mkdir(parents=True)
    for file, lines in tables.items():
        (root / file).write_text("\n".join(lines) + "\n")
    return root
