"""Golden numbers: tensors, metrics and predictions of small seeded runs, to compare before and after a refactoring.

    python benchmarks/golden.py --out golden.json                 # record
    python benchmarks/golden.py --against golden.json             # compare; exit code 1 if anything differs
    python benchmarks/golden.py --against golden.json --cub DATA  # also one run of the default recipe on real images

Six tiny runs on images that are drawn here: both recipes with two seeds each, an edited and fine-tuned tree, and a
packed one. Tensors count by their order and content, not by their names, which a refactoring may change. Numbers are
equal only on one machine with one version of torch and one thread.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image

import prototree
from prototree.core.model import ProtoTree
from prototree.editing.finetune import finetune
from prototree.editing.session import edit
from prototree.pipeline.share import pack
from prototree.run import Run

COLOURS = ((200, 40, 40), (40, 180, 60), (50, 60, 200))
NETWORK = {"backbone": "test_efficientnet", "weights": "none", "image_size": 32, "feature_level": -3, "workers": 0}
PAPER = {
    **NETWORK, "recipe": "paper", "prototype_dim": 8, "height": 3, "batch_size": 8, "epochs": 3, "freeze_epochs": 1,
    "cache_views": 0, "train_last_block": True, "head_hidden_dim": 0, "lr_backbone": 1e-3, "augment": "light",
    "prune_threshold": 0.34,
}  # fmt: skip
DEFAULT = {
    **NETWORK, "prototype_dim": 16, "head_hidden_dim": 16, "batch_size": 8, "views": 3, "pretrain_epochs": 4,
    "head_epochs": 20, "epochs": 15, "calibration_fraction": 1 / 3,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file to record to")
    parser.add_argument("--against", type=Path, help="file to compare with")
    parser.add_argument("--cub", type=Path, help="a CUB data set, such as CUB_50, for the default recipe with seed 0")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        numbers = tiny_runs(Path(folder))
        if chosen.cub:
            run = prototree.fit(chosen.cub, Path(folder) / "cub", settings={"seed": 0})
            numbers["cub"] = {"metrics": flat(run.last_metrics), "tensors": digests(run.tree())}
    if chosen.out:
        chosen.out.write_text(json.dumps(numbers, indent=1) + "\n")
    if chosen.against:
        wrong = list(differences(json.loads(chosen.against.read_text()), numbers))
        print("\n".join(wrong) or f"all golden numbers are equal ({', '.join(numbers)})")
        sys.exit(bool(wrong))


def tiny_runs(folder: Path) -> dict[str, Any]:
    """Train, edit, fine-tune and pack; all golden numbers by the name of the run."""
    data = draw(folder / "images")
    numbers = {}
    for name, settings in (("paper", PAPER), ("default", DEFAULT)):
        for seed in (0, 1):
            run = prototree.fit(data, folder / f"{name}-{seed}", settings={**settings, "seed": seed})
            numbers[f"{name}-{seed}"] = numbers_of(run, data)
    session = edit(folder / "default-0")
    session.apply(session.workbench.candidates(session.state, 0)[3].cell.as_replacement(0))
    edited = session.save(folder / "edited")
    numbers["edited"] = numbers_of(edited, data)
    numbers["fine-tuned"] = numbers_of(finetune(edited.folder, folder / "fine-tuned"), data)
    numbers["packed"] = numbers_of(Run.open(pack(folder / "default-1", folder / "x.prototree")), data)
    return numbers


def draw(root: Path) -> Path:
    """Three classes of images: a square of the class's colour somewhere on grey noise."""
    random = np.random.default_rng(0)
    for split, count in (("train", 30), ("test", 8)):
        for label, colour in enumerate(COLOURS):
            folder = root / split / f"class-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(90, 160, (40, 40, 3), dtype=np.uint8)
                top, left = random.integers(0, 24, 2)
                pixels[top : top + 16, left : left + 16] = colour
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def numbers_of(run: Run, data: Path) -> dict[str, Any]:
    """Digests of the tree's tensors, the values of its metrics, and what it says of every test image."""
    said = prototree.predict(run, sorted((data / "test").rglob("*.png")))
    answers = [
        [one.predicted_class, one.confidence, one.probability, [[step.node - 1, step.p_right] for step in one.path]]
        for one in said
        if not one.error
    ]
    return {"tensors": digests(run.tree()), "metrics": flat(run.last_metrics), "predictions": answers}


def digests(tree: ProtoTree) -> list[str]:
    """A digest of each tensor in the order of the module; distances within which a prototype counts are left out.

    Those are stored in units that may change: they decide predictions, which are compared.
    """
    tensors = [tensor for name, tensor in tree.state_dict().items() if name not in ("reach", "radius")]
    return [hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16] for tensor in tensors]


def flat(values: Any) -> list[float]:
    """Every number in a structure, in the order of its structure, without the keys."""
    if isinstance(values, dict):
        return [number for inner in values.values() for number in flat(inner)]
    if isinstance(values, list | tuple):
        return [number for inner in values for number in flat(inner)]
    return [values] if isinstance(values, int | float) else []


def differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterable[str]:
    for run, parts in expected.items():
        for part, numbers in parts.items():
            if run in found and found[run][part] != numbers:
                pairs = list(zip(numbers, found[run][part], strict=False))
                first = next((pair for pair in pairs if pair[0] != pair[1]), (len(numbers), len(found[run][part])))
                yield f"{run}: {part} differ, first {first[0]} before, {first[1]} now"


if __name__ == "__main__":
    main()
