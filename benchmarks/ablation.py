"""Ablation: what each ingredient of the recipe `distill` gives, on a validation fraction of the training images.

python benchmarks/ablation.py DATA --out FOLDER [--rows "the recipe,full image only"] [--seeds 0,1,2] [--fold 0]
    [--cut 50x30]

Every fifth training image of each class is held out (`--fold` says which); the test images are not touched. With
`--cut` it is a part of the data as in cuts.py, judged by its own test images. Each row changes settings of the preset
`default` or constants of the recipe; no second tree is trained to calibrate the confidence. Runs that are finished are
not done again; the frozen network runs once for all rows that see the same views.
"""

import argparse
import dataclasses
import statistics
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from cuts import cut
from prototree.data import ImageData, Sample, open_data
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training import distill

FOLDS = 5
ROWS: dict[str, dict[str, Any]] = {  # settings, or constants of modules of `training`
    "the recipe": {},
    "full image only": {"center_crop": 0.0},
    "half as long": {"distill._TREE_VIEWS": distill._TREE_VIEWS // 2},
    "twice as long": {"distill._TREE_VIEWS": distill._TREE_VIEWS * 2},
    "head's time halved": {"distill._HEAD_VIEWS": distill._HEAD_VIEWS // 2},
    "lr 2e-3": {"lr": 2e-3},
    "lr 1e-2": {"lr": 1e-2},
    "batches of 64": {"batch_size": 64},
    "temperature 1": {"distill_temperature": 1.0},
    "temperature 5": {"distill_temperature": 5.0},
    "labels instead of the teacher": {"distill_weight": 0.0},
    "sharpness 3": {"sharpness": 3.0},
    "sharpness 10": {"sharpness": 10.0},
    "student never softened": {"distill._STUDENT_START": 1.0, "distill._STUDENT_END": 1.01},
    "student softened from the start": {"distill._STUDENT_START": 0.0, "distill._STUDENT_END": 0.01},
    "all patches": {"distill._PATCH_FRACTION": 1.0, "head._PATCH_FRACTION": 1.0},
    "half of the patches for the head, too": {"head._PATCH_FRACTION": 0.5},
    "no rescaling of distances: 2.6": {"grow.MEDIAN_DISTANCE": 2.6},
    "head without cutmix": {"head._CUTMIX": 0.0},
    "head without dropout": {"head._CHANNEL_DROPOUT": 0.0, "head._POOLED_DROPOUT": 0.0},
    "no occlusion loss": {"occlusion_weight": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "128 numbers a prototype": {"prototype_dim": 128},
    "plain views only": {"views": 2},
    "four views": {"views": 4},
    "224 pixels": {"image_size": 224},
}
COLUMNS = ("soft", "max_path", "greedy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--fold", type=int, default=0)
    parser.add_argument("--cut", help="such as 50x30: so many classes and training photos of each")
    words = parser.parse_args()
    names = [name.strip() for name in words.rows.split(",")]
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; expected some of: {', '.join(ROWS)}")
    data = open_data(words.data)
    data = cut(data, words.cut) if words.cut else held_out(data, words.fold)
    print(f"{len(data.train)} photos to learn from, {len(data.test)} to judge by\n")
    print("| row | soft | max-path | greedy | prototypes | path | seconds of training |")
    print("| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for name in names:
        runs = [one_run(data, words.out, name, int(seed), words.fold) for seed in words.seeds.split(",")]
        print(table_row(name, runs), flush=True)


def held_out(data: ImageData, fold: int) -> ImageData:
    """The training photos alone, every fifth of each class as the photos to judge by."""
    of_class: dict[int, list[Sample]] = defaultdict(list)
    for sample in data.train:
        of_class[sample.label].append(sample)
    held = {sample.path for samples in of_class.values() for sample in samples[fold::FOLDS]}
    learn = tuple(sample for sample in data.train if sample.path not in held)
    judge = tuple(sample for sample in data.train if sample.path in held)
    return dataclasses.replace(data, train=learn, test=judge)


def one_run(data: ImageData, out: Path, name: str, seed: int, fold: int) -> Run:
    """Return a finished run, from before or from now."""
    run = Run(out / f"{name.replace(' ', '_').replace(':', '')}-{seed}-{fold}")
    if "evaluate" not in run.metrics.get("seconds", {}):
        changes = ROWS[name]
        settings = {key: value for key, value in changes.items() if "." not in key}
        with ExitStack() as stack:
            for key in changes.keys() - settings.keys():
                stack.enter_context(patch(f"prototree.training.{key}", changes[key]))
            settings |= {"seed": seed, "calibration_fraction": 0.0}
            fit(data, run.folder, settings=settings, resume=True)
    return run


def table_row(name: str, runs: list[Run]) -> str:
    stages = [run.metrics["stages"]["projected"] for run in runs]
    shown = [spread([100 * stage["accuracy"][column] for stage in stages]) for column in COLUMNS]
    size = spread([float(stage["n_prototypes"]) for stage in stages])
    length = statistics.mean(stage["path_length"]["max_path"]["mean"] for stage in stages)
    seconds = statistics.mean(run.metrics["seconds"]["train"] for run in runs)
    return f"| {name} | {' | '.join(shown)} | {size} | {length:.1f} | {seconds:.0f} |"


def spread(values: list[float]) -> str:
    """Mean ± standard deviation."""
    if len(values) == 1 or len(set(values)) == 1:
        return f"{values[0]:.1f}" if len(values) == 1 else f"{values[0]:g}"
    return f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"


if __name__ == "__main__":
    main()
