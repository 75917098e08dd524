"""What each ingredient of the recipe `distill` gives, on a validation share of the training photos.

python benchmarks/ablation.py DATA --out FOLDER [--rows "the recipe,one look"] [--seeds 0,1,2] [--fold 0] [--cut 50x30]

Every fifth training photo of each class is held out (`--fold` says which); the test photos are not touched. With
`--cut` it is a part of the data as in cuts.py, judged by its own test photos: for data whose figures are reported
nowhere else. Each row changes settings of the preset `default`; no second tree is trained to calibrate the
confidence, so questions stay as sharp as they learned to be. Runs that are finished are not done again; the frozen
network runs
once for all rows that see the same views.
"""

import argparse
import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from cuts import cut
from prototree.data import ImageData, Sample, open_data
from prototree.pipeline.fit import fit
from prototree.run import Run
from prototree.training.recipes.distill import Distill

FOLDS = 5
ROWS: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "one look": {"center_crop": 0.0},
    "no single patches": {"single_patch_loss_weight": 0.0},
    "half as long": {"tree_views": Distill.tree_views // 2},
    "twice as long": {"tree_views": Distill.tree_views * 2},
    "head's time halved": {"head_views": Distill.head_views // 2},
    "rate 2e-3": {"rate": 2e-3},
    "rate 1e-2": {"rate": 1e-2},
    "batches of 64": {"batch_size": 64},
    "temperature 1": {"temperature": 1.0},
    "temperature 5": {"temperature": 5.0},
    "labels instead of the teacher": {"distill_weight": 0.0},
    "one patch a question": {"question": "presence"},
    "one patch a question, no margin": {"question": "presence", "margin": 0.0},
    "sharpness 3": {"sharpness": 3.0},
    "sharpness 10": {"sharpness": 10.0},
    "the tree's answer never softened": {"student_temperature_start": 1.0, "student_temperature_end": 1.0},
    "softened from the start": {"student_temperature_start": 0.0, "student_temperature_end": 0.01},
    "all patches": {"patch_fraction": 1.0, "head_patch_fraction": 1.0},
    "half of the patches for the head, too": {"head_patch_fraction": 0.5},
    "one patch a question, flat hierarchy": {"question": "presence", "max_mean_depth": 1e9},
    "no calibration of the scale: 2.6": {"init_median_distance": 2.6},
    "head without cutmix": {"cutmix": 0.0},
    "head without dropout": {"channel_dropout": 0.0, "pooled_dropout": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "depth 128": {"prototype_dim": 128},
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
    """A finished run, from before or from now."""
    folder = out / f"{name.replace(' ', '_').replace(':', '')}-{seed}-{fold}"
    run = Run(folder)
    if "evaluate" not in run.metrics.get("seconds", {}):
        fit(data, folder, settings={**ROWS[name], "seed": seed, "hold_out": 0}, resume=True)
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
