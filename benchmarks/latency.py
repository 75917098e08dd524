"""How long one prediction takes with a finished run, in seconds: `python benchmarks/latency.py RUN IMAGES OUT.json`.

One thread predicts single images and 64 together, and explains single decisions. Medians, after one image that is not
counted.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import prototree
from prototree.io import write_json

_IMAGES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("run", "images", "out"):
        parser.add_argument(name, type=Path)
    words = parser.parse_args()
    torch.set_num_threads(1)
    run = prototree.Run.open(words.run)
    tree, paths = run.tree(), sorted(words.images.rglob("*.jpg"))[: _IMAGES + 1]
    many = sorted(words.images.rglob("*.jpg"))[:64]
    content = {
        "predict": median(paths, lambda path: prototree.predict(tree, path)),
        "predict_many": median([many, many], lambda group: prototree.predict(tree, group)) / len(many),
        "explain": median(paths, lambda path: prototree.explain(run, path)),
        "prototypes": tree.n_prototypes,
        "image_size": tree.preprocessing.size,
        "crops": len(tree.features.backbone.crops),
    }
    write_json(words.out, content)
    print(content)


def median(items: list[Any], work: Callable[[Any], object]) -> float:
    """Take the median of the seconds that the work takes for each item but the first."""
    seconds = []
    for item in items:
        began = time.perf_counter()
        work(item)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
