"""Does the default recipe hold on other data? Fewer or more classes, fewer or more photos, with and without boxes.

python benchmarks/cuts.py DATA --out FOLDER [--cuts 10x20,50x5,50x30-] [--seed 0] [--set finetune_blocks=3]...

A cut is CLASSESxIMAGES: so many classes, evenly spaced in the list of all, and at most so many training images of each;
a minus at the end leaves out the boxes. All test images of the chosen classes are judged. `--set` changes settings of
the preset `default`. Finished runs are not done again, so give each group of settings a folder of its own.
"""

import argparse
import dataclasses
import re
from collections import Counter
from pathlib import Path

from prototree.data import ImageData, Sample, open_data
from prototree.evaluation.tables import tree_cost
from prototree.pipeline.fit import fit
from prototree.run import Run

COLUMNS = (
    "cut", "training", "test", "baseline", "soft", "greedy", "cost of the tree", "path length", "calibration error",
    "minutes of training",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cuts", default="10x20,20x20,50x5,50x10,50x30-")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting; can be repeated")
    words = parser.parse_args()
    settings = dict(item.split("=", 1) for item in words.set) | {"seed": words.seed}
    data = open_data(words.data)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for name in words.cuts.split(","):
        part, folder = cut(data, name), words.out / f"{name}-{words.seed}"
        if "evaluate" not in Run(folder).metrics.get("seconds", {}):
            fit(part, folder, settings=settings, resume=True)
        print(table_row(name, part, Run(folder)), flush=True)


def cut(data: ImageData, name: str) -> ImageData:
    """A part of the data: some classes, numbered anew, and the first photos of each."""
    found = re.fullmatch(r"(\d+)x(\d+)(-?)", name)
    if found is None:
        raise SystemExit(f"expected a cut such as 10x20 or 10x20-, got {name!r}")
    n_classes, n_photos = min(int(found[1]), data.n_classes), int(found[2])
    chosen = [data.n_classes * place // n_classes for place in range(n_classes)]
    label = {old: new for new, old in enumerate(chosen)}
    seen: Counter[int] = Counter()

    def kept(samples: tuple[Sample, ...], most: float) -> tuple[Sample, ...]:
        own = []
        for sample in samples:
            seen[sample.label] += 1
            if sample.label in label and seen[sample.label] <= most:
                box = None if found[3] else sample.box
                own.append(dataclasses.replace(sample, label=label[sample.label], box=box))
        return tuple(own)

    train = kept(data.train, n_photos)
    names = tuple(data.class_names[old] for old in chosen)
    return dataclasses.replace(
        data, class_names=names, train=train, test=kept(data.test, float("inf")), validation_split=()
    )


def table_row(name: str, data: ImageData, run: Run) -> str:
    end, baseline = run.metrics["stages"]["projected"], run.metrics["baseline_accuracy"]
    accuracy = (baseline, end["accuracy"]["soft"], end["accuracy"]["greedy"])
    cells = [
        *(f"{100 * value:.1f}" for value in accuracy),
        tree_cost(baseline, end["accuracy"]),
        f"{end['path_length']['greedy']['mean']:.1f}",
        "not fitted" if end["confidence_ece"] is None else f"{end['confidence_ece']:.3f}",
        f"{run.metrics['seconds']['train'] / 60:.1f}",
    ]
    return f"| {name} | {len(data.train)} | {len(data.test)} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
