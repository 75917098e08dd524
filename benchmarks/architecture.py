"""Figures of the house itself: how many rooms an image goes through, how long files are, what stands twice.

python benchmarks/architecture.py

A module is on the way of an image if one of its functions was given the image, in whatever form (a sample, a photo, an
array, a tensor, or what was made of these), while a tiny run was trained or a photo explained.
"""

import ast
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

import prototree
from prototree.core.model import TreeOutput
from prototree.core.patches import NearestPatches
from prototree.data.dataset import Sample
from prototree.data.images import Photo
from prototree.data.loading import Entry
from prototree.explain.records import DecisionExplanation
from prototree.explain.votes import explain_decision, open_voters
from prototree.features.cache import Inputs
from prototree.pipeline.fit import fit
from prototree.report import write_decision

SOURCE = Path(prototree.__file__).parent
TINY = {
    "backbone": "resnet18",
    "weights": "none",
    "image_size": 32,
    "feature_level": -3,
    "prototype_dim": 8,
    "head_hidden_dim": 8,
    "batch_size": 8,
    "epochs": 1,
    "workers": 0,
    "threshold": 0.1,
}
TWICE = 6  # so many lines in a row count as standing twice


def main() -> None:
    print(f"files at the root: {len(list(SOURCE.glob('*.py')))}")
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    for path in sorted(lengths, key=lambda path: -lengths[path])[:3]:
        print(f"longest files: {path.relative_to(SOURCE)}, {lengths[path]} lines")
    for lines, name in sorted(functions(), reverse=True)[:3]:
        print(f"longest functions: {name}, {lines} lines")
    print(f"lines that stand twice (runs of {TWICE} or more): {twice()} of {sum(lengths.values())}")
    with tempfile.TemporaryDirectory() as folder:
        photos, out = write_photos(Path(folder) / "photos"), Path(folder)
        for recipe in ("distill", "paper"):
            calls = traced(lambda recipe=recipe: fit(photos, out / recipe, settings=TINY | {"recipe": recipe}))  # type: ignore[misc]
            way = modules(calls, within="Stages.train")
            print(f"modules on the way through train, recipe {recipe}: {len(way)}: {', '.join(way)}")
            print(f"calls from the pipeline into the recipe {recipe} and back: {', '.join(seam(calls))}")
        voters = open_voters([out / "distill"])
        photo = next(photos.rglob("*.png"))
        calls = traced(lambda: write_decision(explain_decision(voters, photo), out / "explained", "greedy"))
        way = modules(calls)
        print(f"modules on the way through explain: {len(way)}: {', '.join(way)}")


def functions() -> list[tuple[int, str]]:
    """The length of every function, with where it stands."""
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path.relative_to(SOURCE)}:{node.name}"
                found.append(((node.end_lineno or node.lineno) - node.lineno + 1, name))
    return found


def twice() -> int:
    """Lines within runs that stand somewhere else too; imports, blank lines and lone brackets do not count."""
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path in SOURCE.rglob("*.py"):
        lines = [(number, line.strip()) for number, line in enumerate(path.read_text().splitlines())]
        told = [(n, line) for n, line in lines if len(line) > 3 and not line.startswith(("import ", "from ", "#"))]
        for start in range(len(told) - TWICE + 1):
            run = told[start : start + TWICE]
            places[tuple(line for _, line in run)].extend((path, number) for number, _ in run)
    return len({place for found in places.values() if len(found) > TWICE for place in found})


Call = tuple[str, str, str, str, tuple[str, ...], bool]
"""Caller's module and function, callee's module and function, the functions above, and whether it got an image."""
IMAGE_FORMS = (
    Tensor,
    np.ndarray,
    Image.Image,
    Sample,
    Photo,
    Entry,
    Inputs,
    TreeOutput,
    NearestPatches,
    DecisionExplanation,
)


def traced(work: Callable[[], Any]) -> list[Call]:
    """Every call of a function of the package while some work is done."""
    calls: list[Call] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        callee = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname
        if event != "call" or not callee.startswith("prototree.") or name == "<module>":
            return
        has_image = any(isinstance(value, IMAGE_FORMS) for value in frame.f_locals.values())
        above, names = frame.f_back, []
        caller = above
        while caller is not None and not caller.f_globals.get("__name__", "").startswith("prototree"):
            caller = caller.f_back
        while above is not None:
            names.append(above.f_code.co_qualname)
            above = above.f_back
        source = (caller.f_globals["__name__"], caller.f_code.co_qualname) if caller is not None else ("", "")
        calls.append((*source, callee, name, tuple(names), has_image))

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def modules(calls: list[Call], within: str = "") -> list[str]:
    """The modules that had a function called, below a certain one where it is named."""
    found = {callee for _, _, callee, name, above, has in calls if has and (not within or within in (*above, name))}
    ran = {callee for _, _, callee, name, above, _ in calls if not within or within in (*above, name)}
    print(f"modules of which any function ran, with or without the image: {len(ran)}")
    return sorted(name.removeprefix("prototree.") for name in found)


def seam(calls: list[Call]) -> list[str]:
    """What the pipeline calls of a recipe, and a recipe of the pipeline."""
    rooms = ("prototree.pipeline.", "prototree.training.recipes.")
    crossing = {
        name
        for caller, _, callee, name, _, _ in calls
        if (caller.startswith(rooms[0]) and callee.startswith(rooms[1]))
        or (caller.startswith(rooms[1]) and callee.startswith(rooms[0]))
    }
    return sorted(crossing)


def write_photos(folder: Path) -> Path:
    """Three classes of coloured noise."""
    random = np.random.default_rng(0)
    for label, colour in enumerate(((200, 40, 40), (40, 200, 40), (40, 40, 200))):
        (folder / str(label)).mkdir(parents=True)
        for number in range(6):
            pixels = (random.integers(0, 60, (40, 40, 3)) + colour).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


if __name__ == "__main__":
    main()
