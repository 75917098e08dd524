"""One file to send to somebody: what it holds, who opens it, and what is refused; and what cleaning a run frees."""

import json
import os
import shutil
import signal
import stat
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import prototree
from prototree import archive
from prototree.cli import app
from prototree.core import checkpoint
from prototree.core.nodes import NodeFunction
from prototree.core.topology import HARD, STRATEGIES
from prototree.data import open_data
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.explanation.assets import AssetStore, PrototypePictures
from prototree.explanation.tree import explain_tree
from prototree.io import with_checksum, write_json
from prototree.pipeline.fit import evaluate
from prototree.pipeline.share import clean, pack
from prototree.run import ASSETS, Run
from tiny_editing import content_of, same_tree, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = tiny_run(tmp_path_factory.mktemp("sharing"), NodeFunction("pairwise", 4.0))
    write_json(run.folder / "notes.json", {"1": "a mark"})
    return run


@pytest.fixture(scope="module")
def packed(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return pack(run, tmp_path_factory.mktemp("packed") / "squares.prototree")


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Run:
    """The run again, to be changed."""
    return Run(Path(shutil.copytree(run.folder, tmp_path / "run")))


def rebuilt(packed: Path, out: Path, content: dict[str, object], skip: str = "") -> Path:
    """Write the packed file again with other or more content; JSON gets its checksum."""
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(out, "w") as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in old.infolist():
            if entry.filename != skip:
                new.writestr(entry, old.read(entry))
        for name, value in content.items():
            new.writestr(name, json.dumps(with_checksum(value)) if isinstance(value, dict) else value)
    return out


def test_a_packed_tree_is_the_tree_and_the_same_bytes_each_time(run: Run, packed: Path, tmp_path: Path) -> None:
    tree, opened = run.tree(), prototree.load(packed)
    assert same_tree(tree, opened)
    assert opened.features.state_dict().keys() == tree.features.state_dict().keys()
    photo = next(Path(run.source).rglob("*.png"))
    assert prototree.predict(packed, photo) == prototree.predict(run, photo)
    assert pack(run, tmp_path / "squares.prototree").read_bytes() == packed.read_bytes()


def test_it_needs_neither_the_run_nor_its_data(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.source).parent, tmp_path / "all")
    copy = Run(tmp_path / "all" / "run")
    copy.update_metrics(source=str(tmp_path / "all" / "squares"))
    file = pack(copy, tmp_path / "squares.prototree")
    before = explain_tree(copy, data=open_data(copy.source))
    photo = shutil.copy(next(Path(copy.source).rglob("*.png")), tmp_path / "photo.png")
    shutil.rmtree(tmp_path / "all")
    opened = Run.open(file)
    explanation = explain_tree(opened)
    assert explanation.title == "squares"
    assert np.array_equal(explanation.leaf_probs, before.leaf_probs)
    for now, then in zip(explanation.prototypes, before.prototypes, strict=True):
        assert now.source.crop.tolist() == then.source.crop.tolist()
        assert now.note == then.note
        assert now.class_pass_rate == pytest.approx(then.class_pass_rate, abs=1e-4)
        assert now.histogram == then.histogram
        assert [(m.image, m.label, m.size) for m in now.nearest] == [(m.image, m.label, m.size) for m in then.nearest]
        assert [cause.name for cause in now.perturbation_effects] == [cause.name for cause in then.perturbation_effects]
        for kept, found in zip(now.source.locations, then.source.locations, strict=True):
            assert (kept.method, kept.occlusion) == (found.method, found.occlusion)
            assert kept.box.edges == pytest.approx(found.box.edges, abs=0.01)
            assert kept.heat.mean() == pytest.approx(found.heat.mean(), abs=0.02)
    step = prototree.explain(opened, photo).paths["greedy"].steps[0]
    assert step.right.note == explanation.prototypes[0].note == "a mark"
    assert step.histogram == before.prototypes[step.node].histogram is not None
    assert opened.data_or_none() is None
    with pytest.raises(DataError):
        opened.data()


def test_it_says_nothing_of_this_machine_and_is_no_larger_than_it_must_be(run: Run, packed: Path, copy: Run) -> None:
    with zipfile.ZipFile(packed) as file:
        content = {name: file.read(name) for name in file.namelist()}
        assert all(entry.date_time == (1980, 1, 1, 0, 0, 0) for entry in file.infolist())
    assert str(run.folder.parent).encode() not in b"".join(content.values())
    must = sum(len(part) for name, part in content.items() if name.endswith((".safetensors", ".webp")))
    assert packed.stat().st_size < 1.3 * must
    assert b"red" in content["README.md"]
    config = run.config.replace({"weights": "/home/me/my.safetensors"})
    (copy.folder / "config.toml").write_text(config.to_toml())
    with zipfile.ZipFile(pack(copy, copy.folder.with_suffix(".prototree"), pages=False)) as file:
        assert not any(b"/home/me" in file.read(name) for name in file.namelist())


def test_photos_that_lie_elsewhere_do_not_tell_where(run: Run, copy: Run, tmp_path: Path) -> None:
    photos, folder = tmp_path / "home" / "me" / "secret" / "squares", tmp_path / "lists" / "deep"
    shutil.copytree(run.source, photos)
    folder.mkdir(parents=True)
    rows = [(path, path.parent.name, path.parts[-3]) for path in sorted(photos.rglob("*.png"))]
    (folder / "data.csv").write_text("path,label,split\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    tree = run.tree()
    copy.update_metrics(source=str(folder / "data.csv"))
    by_name = {path.relative_to(photos).as_posix(): os.path.relpath(path, folder) for path, *_ in rows}
    tree.sources = tuple(source and replace(source, image=by_name[source.image]) for source in tree.sources)
    checkpoint.save(tree, copy.folder / "projected")
    file = pack(copy, tmp_path / "x.prototree")
    with zipfile.ZipFile(file) as inside:
        assert not any(b"secret" in inside.read(name) for name in inside.namelist())
    for prototype in explain_tree(Run.open(file)).prototypes:
        assert prototype.source.image.count("/") == 1
        assert prototype.source.crop.std() > 0, "its picture is found under the new name"
        assert prototype.nearest
        assert all(match.image.count("/") == 1 for match in prototype.nearest)


@pytest.mark.parametrize("work", ["pack", "open"])
def test_a_killed_process_leaves_nothing_for_good(
    run: Run, packed: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = Path(shutil.copy(packed, tmp_path / "a.prototree"))
    place = own_cache / "packed" if work == "open" else tmp_path

    def do() -> object:
        return pack(run, file, pages=False) if work == "pack" else prototree.load(file)

    if (killed := os.fork()) == 0:
        monkeypatch.setattr(shutil, "copyfileobj", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        try:
            do()
        finally:
            os._exit(1)
    assert os.waitpid(killed, 0)[1] == signal.SIGKILL
    assert list(place.rglob(".a.*")), "it was killed in the middle"
    do()
    assert list(place.rglob(".*")) == []
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_names_of_files_and_classes(run: Run, copy: Run, tmp_path: Path) -> None:
    out = tmp_path / f"{'a' * 245}.prototree"  # as long as the file system takes
    assert checkpoint.load(pack(run, out, pages=False)).class_names == run.tree().class_names
    for name, error in ((f"{'a' * 246}.prototree", CheckpointError), ("x.zip", ConfigError)):
        with pytest.raises(error):
            pack(run, tmp_path / name, pages=False)
    assert sorted(tmp_path.iterdir()) == [out, copy.folder]
    odd = "gr\udcfcn"  # no Unicode
    copy.update_metrics(classes=[odd, "green", "red"])
    assert Run.open(pack(copy, tmp_path / "x.prototree", pages=False)).metrics["classes"][0] == odd


def test_what_is_packed_stays_as_it_is_and_is_named_by_its_file(run: Run, packed: Path) -> None:
    opened = Run.open(packed)
    before = content_of(opened.folder)
    for change in (lambda: prototree.rerun(packed, "evaluate", data=run.source), lambda: clean(packed)):
        with pytest.raises(ConfigError):
            change()
    assert content_of(opened.folder) == before
    with pytest.raises(DataError, match=f"^the packed tree {packed.stem} "):
        evaluate([packed, packed])


@pytest.mark.parametrize("names", [("blue", "green", "red"), ("cat", "dog")])
def test_a_packed_tree_opens_no_folder_by_its_own_word(packed: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """A stranger's file may name any folder of this machine as its data."""
    for name in names:
        (tmp_path / "private" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "private" / name / "0.png")
    metrics = {**Run.open(packed).metrics, "source": str(tmp_path / "private")}
    run = Run.open(rebuilt(packed, tmp_path / "x.prototree", {"metrics.json": metrics}, "metrics.json"))
    assert "source" not in run.metrics
    assert run.data_or_none() is None
    assert not run.has_data
    assert explain_tree(run).prototypes
    with pytest.raises(DataError, match="--data"):
        run.data()


def test_without_pictures_and_data_nothing_is_packed(run: Run, copy: Run, tmp_path: Path) -> None:
    shutil.rmtree(copy.folder / ASSETS, ignore_errors=True)
    copy.update_metrics(source=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match="prototree report"):
        pack(copy, tmp_path / "x.prototree")
    AssetStore(copy.tree(), copy.folder / ASSETS).save_pictures(open_data(run.source))
    opened = Run.open(pack(copy, tmp_path / "x.prototree"))
    assert PrototypePictures(copy.tree(), stored=opened.folder / ASSETS).complete


@pytest.mark.parametrize(
    "damage",
    [{"class_pass_rate": [1.0]}, {"nearest": [{}]}, {"locations": "x"}, {"histogram": [[1], [2]]}],
    ids=lambda damage: next(iter(damage)),
)
def test_pages_that_make_no_sense_are_left_out(packed: Path, tmp_path: Path, damage: dict[str, object]) -> None:
    with zipfile.ZipFile(packed) as file:
        content = json.loads(file.read("assets/assets.json"))
    if "histogram" in damage:
        content["histograms"][1] = damage["histogram"]
    else:
        content["pages"]["prototypes"][1] |= damage
    out = rebuilt(packed, tmp_path / "x.prototree", {"assets/assets.json": content}, "assets/assets.json")
    prototypes = explain_tree(Run.open(out)).prototypes
    assert prototypes[0].nearest
    assert prototypes[1].nearest == ()


LINK = zipfile.ZipInfo("assets/999.webp")
LINK.external_attr = (stat.S_IFLNK | 0o777) << 16
HOSTILE: dict[str, tuple[Callable[[zipfile.ZipFile], None], str]] = {
    "up": (lambda z: z.writestr("assets/../../evil.webp", b"x"), "out of the folder"),
    "absolute": (lambda z: z.writestr("/tmp/evil", b"x"), "out of the folder"),
    "drive": (lambda z: z.writestr("C:evil", b"x"), "out of the folder"),
    "backslash": (lambda z: z.writestr("..\\evil", b"x"), "out of the folder"),
    "link": (lambda z: z.writestr(LINK, "/etc/passwd"), "link"),
    "twice": (lambda z: z.writestr("metrics.json", b"{}"), "twice"),
    "twice but for case": (lambda z: z.writestr("Metrics.JSON", b"{}"), "twice"),
    "text bomb": (lambda z: z.writestr("notes.json", b" " * ((4 << 20) + 1), zipfile.ZIP_DEFLATED), "4 MiB"),
    "bomb": (lambda z: z.writestr("assets/999.webp", bytes(24 << 20), zipfile.ZIP_DEFLATED), "can hold"),
    "other compression": (lambda z: z.writestr("assets/999.webp", bytes(1000), zipfile.ZIP_BZIP2), "compressed"),
    "too many": (lambda z: [z.writestr(f"assets/{i}.webp", b"") for i in range(900, 1000)] and None, "limit"),
}
SKIPPED = {"text bomb": "notes.json", "bomb": "projected/weights.safetensors"}  # weights would hide it


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_written(
    packed: Path, tmp_path: Path, own_cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 4 << 20)
    monkeypatch.setattr(archive, "MAX_FILES", 100)
    change, token = HOSTILE[kind]
    file = rebuilt(packed, tmp_path / "x.prototree", {}, SKIPPED.get(kind, ""))
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(file, "a") as archived:
        change(archived)
    with pytest.raises(CheckpointError, match=token):
        Run.open(file)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert not list(tmp_path.parent.glob("evil*"))


@pytest.mark.parametrize("name", ["...prototree", ".....prototree", ".hidden.prototree"])
def test_unknown_files_stay_inside_and_a_name_of_dots_leads_nowhere_else(
    packed: Path, tmp_path: Path, name: str
) -> None:
    other = Run.open(packed).folder
    opened = Run.open(rebuilt(packed, tmp_path / name, {"later/thing.bin": name})).folder
    assert not (opened / "later").exists()
    assert other.exists(), "what else is in the cache stays"
    assert opened.parent.parent == other.parent.parent
    assert prototree.load(opened).n_classes == 3


@pytest.mark.parametrize("size", [4 << 30, 20 << 30])
def test_a_huge_file_of_nothing_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was hashed")

    monkeypatch.setattr(archive.hashlib, "sha256", lambda: type("", (), {"update": never})())
    (tmp_path / "x.prototree").touch()
    os.truncate(tmp_path / "x.prototree", size)
    with pytest.raises(CheckpointError):
        Run.open(tmp_path / "x.prototree")


def test_what_could_not_be_opened_again_is_not_packed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 100)
    with pytest.raises(CheckpointError):
        pack(run, tmp_path / "x.prototree", pages=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["cut", "garbage", "empty", "longer than it says", "other zip"])
def test_a_damaged_file_is_named_as_such(packed: Path, tmp_path: Path, kind: str, own_cache: Path) -> None:
    file, content = tmp_path / "x.prototree", bytearray(packed.read_bytes())
    if kind == "longer than it says":
        with zipfile.ZipFile(packed) as old:
            entry = next(entry for entry in old.infolist() if entry.filename.endswith("tree.json"))
        content[entry.header_offset : entry.header_offset + 8] = b"PK\x03\x04\x14\x00\x00\x00"
        where = content.rindex(entry.filename.encode()) - 46  # in the list at the end
        content[where + 24 : where + 28] = (entry.file_size - 5).to_bytes(4, "little")
    changed = {"cut": content[:-100], "garbage": b"x" * 1000, "empty": b""}
    file.write_bytes(changed.get(kind, content))
    if kind == "other zip":
        rebuilt(packed, file, {}, "packed.json")
    with pytest.raises(CheckpointError):
        Run.open(file)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTOTREE_CACHE", str(tmp_path / "file"))
    assert prototree.load(packed).n_classes == 3


def test_cleaning_keeps_what_cannot_be_made_again(run: Run, copy: Run, tmp_path: Path) -> None:
    features = "prototree-features/a.f16"
    for name in ("checkpoints/tree/weights.safetensors", "checkpoints/head/x", features, "report/index.html"):
        (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (copy.folder / name).write_bytes(bytes(1000))
    os.link(copy.folder / features, tmp_path / "shared.f16")
    (tmp_path / "run-edits" / "maps").mkdir(parents=True)
    (tmp_path / "run-edits" / "maps" / "b.f32").write_bytes(bytes(500))
    write_json(tmp_path / "run-edits" / "history.json", {})
    with pytest.raises(ConfigError):
        clean(copy)  # it is not finished
    lengths = {"mean": 2.0, "std": 0.0, "min": 2, "max": 2}
    figures = {"n_images": 4, "accuracy": dict.fromkeys(STRATEGIES, 0.5), "n_prototypes": 6}
    zeros = ("top5", "ece", "confidence_ece", "mean_confidence", "coverage", "selective_accuracy")
    lists = {"class_accuracy": [1.0] * 3, "confusion": [], "leaf_max_probs": [], "leaf_max_hist": []}
    figures |= {"fidelity": dict.fromkeys(HARD, 1.0), "n_leaves": 2, **dict.fromkeys(zeros, 0.0), **lists}
    copy.update_metrics(stages={"projected": {**figures, "path_length": dict.fromkeys(HARD, lengths)}})
    assert sum(freed.n_bytes for freed in clean(copy)) == 2500, "a file that another run uses gives nothing back"
    for path in ("shared.f16", "run/report/index.html", "run-edits/history.json"):
        assert (tmp_path / path).exists()
    assert not (copy.folder / "checkpoints").exists()
    assert torch.equal(copy.tree().prototypes, run.tree().prototypes)
    assert clean(copy) == []


def test_the_commands_open_a_packed_tree(run: Run, packed: Path, tmp_path: Path) -> None:
    file = shutil.copy(packed, tmp_path / "squares.prototree")
    photo = next(Path(run.source).rglob("*.png"))

    def command(*words: object) -> str:
        done = CliRunner(env={"COLUMNS": "60"}).invoke(app, list(map(str, words)))
        assert done.exit_code == 0, done.output
        return done.stdout

    expected = prototree.predict(run, photo).predicted_class
    assert command("explain", file, photo).startswith(f"{photo.name}: {expected} (")
    assert (tmp_path / "squares-explained" / photo.stem / "decision.html").exists()
    command("report", file)
    assert json.loads((tmp_path / "squares-report" / "rules.json").read_text())["title"] == "squares"
    assert expected in command("predict", file, photo)
