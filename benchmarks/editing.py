"""The worked example of docs/guides/edit.md: how right a tree is as trained, as edited, and after learning with it.

python benchmarks/editing.py --out FOLDER [--seeds 3] [--photo 0]

Draws birds with a planted shortcut and trains a tree for each seed. At the node that misleads most photos, a black beak
takes the place of the patch that stands for the species beside the berries, and the network learns with it. Judged on
new photos without berries, and on the same birds with berries beside all other species. What is finished is not done
again.
"""

import argparse
import dataclasses
from collections import Counter
from pathlib import Path

import torch

from prototree.core.projection import side_classes
from prototree.data.crops import evaluation_views
from prototree.editing.edits import Note, Region, Side
from prototree.editing.finetune import finetune
from prototree.editing.session import edit as edit_run
from prototree.pipeline.fit import fit
from prototree.pipeline.stages import RunStages
from prototree.progress import Observer
from prototree.run import Run
from prototree_birds import write_birds

BESIDE_BERRIES, LOOK_ALIKE = 0, 1  # the species with the shortcut, and the one that differs from it in the beak alone
OWN_TEST = 20  # test photos of a species that the run has, too
COLUMNS = ("seed", "photos", "tree", "soft", "greedy", "Black-tipped", "Grey-billed", "mean confidence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--photo", type=int, default=0, help="which photo of the species gives the beak, from 0")
    words = parser.parse_args()
    draw(words.out)
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for seed in range(words.seeds):
        for name, run in three_trees(words.out, seed, words.photo).items():
            for data, skip in (("berries", 0), ("none", OWN_TEST), ("others", OWN_TEST)):
                print(table_row(seed, data, name, run, words.out / data, skip), flush=True)


def draw(out: Path) -> None:
    """The data to learn from, and new birds: without berries, and with berries beside all other species."""
    if not (out / "berries").exists():
        write_birds(out / "berries", shortcut=True)
    for name, rate in (("none", 0.0), ("others", 1.0)):
        if not (out / name).exists():
            write_birds(out / name, train_per_species=1, test_per_species=100, shortcut=True, test_shortcut=rate)


def three_trees(out: Path, seed: int, photo: int) -> dict[str, Run]:
    """As trained, as edited, and after learning; the first alone where no photo was misled."""
    run, edited = Run(out / f"seed{seed}"), Run(out / f"seed{seed}-photo{photo}")
    if "evaluate" not in run.metrics.get("seconds", {}):
        fit(out.resolve() / "berries", run.folder, preset="demo", settings={"seed": seed}, resume=True)
    if not edited.folder.exists() and not edit(run, edited.folder, photo):
        return {"trained": run}
    learned = finetune(edited.folder, edited.folder.with_name(f"{edited.folder.name}-learned"))
    return {"trained": run, "edited": edited, "learned": learned}


def edit(run: Run, out: Path, photo: int) -> bool:
    """Puts a black beak where the most misleading node asks for something else; False: no photo was misled."""
    session = edit_run(run, work=out.with_name(f"{out.name}-work"))
    blamed = session.errors().by_node()
    if not blamed:
        return False
    node = blamed[0].node
    right = side_classes(session.state.tree)[1][node, BESIDE_BERRIES]
    side: Side = "right" if right else "left"
    beaks = [(name, box) for name, box in beak_boxes(session.data.root).items() if name.startswith("images/001.")]
    session.apply(session.workbench.locate(*beaks[photo]).as_replacement(node, side))
    session.apply(Note(node, "black beak"))
    session.save(out)
    return True


def beak_boxes(root: Path) -> dict[str, Region]:
    """Photo → box of its beak, in the order of the data."""
    names = dict(line.split() for line in (root / "images.txt").read_text().splitlines())
    numbers = dict(line.split(" ", 1)[::-1] for line in (root / "parts" / "parts.txt").read_text().splitlines())
    rows = (line.split() for line in (root / "parts" / "part_boxes.txt").read_text().splitlines())
    beaks = ((row[0], [float(value) for value in row[2:]]) for row in rows if row[1] == numbers["beak"])
    return {f"images/{names[image]}": (x, y, x + width, y + height) for image, (x, y, width, height) in beaks if width}


@torch.no_grad()
def table_row(seed: int, photos: str, name: str, run: Run, data: Path, skip: int) -> str:
    """How right a tree is on the test photos of a data set, without the first of each species."""
    images, tree, seen = run.data(data), run.tree().eval(), Counter[int]()
    kept = []
    for sample in images.test:
        seen[sample.label] += 1
        kept += [sample] if seen[sample.label] > skip else []
    work = RunStages(run, dataclasses.replace(images, test=tuple(kept)), run.config, torch.device("cpu"), Observer())
    found = [
        (decisions.labels("soft") == labels, decisions.labels("greedy") == labels, labels, decisions.confidence)
        for z, labels, _ in work.batches(tree, kept, evaluation_views).encoded(tree.features)
        for decisions in (tree.decode(tree.forward_features(z)),)
    ]
    soft, greedy, labels, confidence = (torch.cat(part) for part in zip(*found, strict=True))
    alone = (greedy[labels == species] for species in (BESIDE_BERRIES, LOOK_ALIKE))
    shares = (part.double().mean() for part in (soft, greedy, *alone, confidence))
    return f"| {seed} | {len(kept)} {photos} | {name} | {' | '.join(f'{100 * share:.1f}' for share in shares)} |"


if __name__ == "__main__":
    main()
