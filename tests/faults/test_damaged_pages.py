"""What a run shows, damaged in one place: it is refused, left out or as it was, never shown as if nothing were."""

import random
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_damaged_folders import DAMAGES, change_a_value, swap_with_another

from prototree.errors import CheckpointError
from prototree.evaluation.schema import read_errors
from prototree.explanation.assets import AssetStore, PrototypePictures, SourcePictures
from prototree.io import write_json
from prototree.pipeline.fit import rerun
from prototree.pipeline.share import pack
from prototree.run import Run
from tiny_editing import tiny_run

LEFT_OUT = "left out"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run without its data: all that it shows is in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = tiny_run(tmp_path_factory.mktemp("made"))
        rerun(made.folder, "evaluate")
        write_json(made.folder / "notes.json", {"1": "red", "2": "a corner"})
        folder = tmp_path_factory.mktemp("run") / "run"
        shutil.copytree(Run.open(pack(made, folder.with_name("x.prototree"))).folder, folder)
        shutil.copy(made.folder / "errors.json", folder)
        return Run(folder)


def facts(run: Run) -> dict[str, Any]:
    """Everything that tables and pages take from the folder."""
    tree = run.tree()
    store, pictures = AssetStore(tree, run.folder / "assets"), PrototypePictures(tree, stored=run.folder / "assets")
    sources = [pictures.of(number) for number in range(tree.n_prototypes)]
    found: dict[str, Callable[[], Any]] = {
        "metrics": lambda: run.metrics,
        "notes": lambda: run.notes,
        "errors": lambda: read_errors(run.folder / "errors.json", tree.n_classes),
        "histograms": lambda: store.histograms() or LEFT_OUT,
        "class photos": lambda: [[one.tolist() for one in photos] for photos in store.class_pictures()],
    }
    for number, source in enumerate(sources):
        found[f"picture {number}"] = partial(_plain, vars(source)) if source.found else lambda: LEFT_OUT
        found[f"page {number}"] = partial(_page, store, number, source)
    return {name: _value(look) for name, look in found.items()}


def _page(store: AssetStore, number: int, source: SourcePictures) -> Any:
    page = store.prototype(number, source, "")
    if not page.nearest:
        return LEFT_OUT
    return _plain(
        [page.nearest, page.class_pass_rate, page.perturbation_effects, page.histogram, page.source.locations]
    )


def _value(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except CheckpointError:
        return LEFT_OUT


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return _plain(list(vars(value).values())) if hasattr(value, "__dataclass_fields__") else value


def is_fair(name: str, shown: Any, expected: Any) -> bool:
    if name == "class photos":  # of each class by itself
        return all(one in ([], wanted) for one, wanted in zip(shown, expected, strict=True))
    return bool(shown in (LEFT_OUT, expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [60, pytest.param(900, marks=pytest.mark.slow)])
def test_no_damaged_file_is_shown_as_if_nothing_were(
    run: Run, tmp_path: Path, count: int, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    expected, found = facts(Run(folder)), Counter[str]()
    assert LEFT_OUT not in map(str, expected.values())
    names = [
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".json", ".webp") and path.name not in ("tree.json", "packed.json")
    ]
    damages = [one for one in DAMAGES if one not in (change_a_value, swap_with_another)]
    for seed in range(count):
        chance = random.Random(seed)
        name, damage = names[seed % len(names)], damages[seed % len(damages)]
        before = (folder / name).read_bytes()
        damage(chance, folder / name)
        shown = facts(Run(folder))
        wrong = [what for what in expected if not is_fair(what, shown[what], expected[what])]
        assert wrong == [], f"seed {seed}: {damage.__name__} in {name}"
        found["as it was" if shown == expected else "noticed"] += 1
        (folder / name).write_bytes(before)
    assert found["noticed"] > count / 2
    record_property("counted", f"{count} damaged files: {found['noticed']} noticed, {found['as it was']} harmless")
