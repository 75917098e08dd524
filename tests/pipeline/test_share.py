"""One file to send to somebody: what it holds, who opens it, and what is refused."""

import io
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


def test_a_packed_tree_is_the_tree(run: Run, packed: Path) -> None:
    tree, opened = run.tree(), prototree.load(packed)
    assert same_tree(tree, opened)
    assert opened.features.state_dict().keys() == tree.features.state_dict().keys()
    photo = next(Path(run.source).rglob("*.png"))
    assert prototree.predict(packed, photo) == prototree.predict(run, photo)


def test_it_needs_neither_the_run_nor_its_data(run: Run, tmp_path: Path) -> None:
    shutil.copytree(Path(run.source).parent, tmp_path / "all")
    copy = Run(tmp_path / "all" / "run")
    copy.update_metrics(source=str(tmp_path / "all" / "squares"))
    file = pack(copy, tmp_path / "squares.prototree")
    before = explain_tree(copy, data=open_data(copy.source))
    photo = tmp_path / "photo.png"
    shutil.copy(next(Path(copy.source).rglob("*.png")), photo)
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
    assert explanation.prototypes[0].note == "a mark"
    decision = prototree.explain(opened, photo)
    step = decision.paths["greedy"].steps[0]
    assert step.right.note == "a mark"
    assert step.histogram == before.prototypes[step.node].histogram is not None
    assert opened.data_or_none() is None
    with pytest.raises(DataError, match="does not say which data"):
        opened.data()


def test_it_says_nothing_of_this_machine_and_is_no_larger_than_it_must_be(run: Run, packed: Path) -> None:
    with zipfile.ZipFile(packed) as file:
        content = {name: file.read(name) for name in file.namelist()}
        assert all(entry.date_time == (1980, 1, 1, 0, 0, 0) for entry in file.infolist())
    folder = str(run.folder.parent).encode()
    assert not any(folder in one for one in content.values())
    must = sum(len(one) for name, one in content.items() if name.endswith((".safetensors", ".webp")))
    assert packed.stat().st_size < 1.3 * must
    assert b"red" in content["README.md"]
    assert b"not fitted on held-out photos" in content["README.md"]  # too few photos for that


def test_the_same_run_gives_the_same_bytes(run: Run, packed: Path, tmp_path: Path) -> None:
    assert pack(run, tmp_path / "squares.prototree").read_bytes() == packed.read_bytes()


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


def test_a_name_may_be_as_long_as_the_file_system_takes(run: Run, tmp_path: Path) -> None:
    out = tmp_path / f"{'a' * 245}.prototree"
    assert checkpoint.load(pack(run, out, pages=False)).class_names == run.tree().class_names
    assert list(tmp_path.iterdir()) == [out]
    with pytest.raises(CheckpointError, match="choose another name"):
        pack(run, tmp_path / f"{'a' * 246}.prototree", pages=False)
    assert list(tmp_path.iterdir()) == [out]


def test_what_is_packed_stays_as_it_is(run: Run, packed: Path) -> None:
    opened = Run.open(packed)
    before = content_of(opened.folder)
    for change in (lambda: prototree.rerun(packed, "evaluate", data=run.source), lambda: clean(packed)):
        with pytest.raises(ConfigError, match="is a packed tree, which can be asked and looked at but not changed"):
            change()
    assert content_of(opened.folder) == before
    with pytest.raises(ConfigError, match=r"expected a file that ends in \.prototree, got .*x\.zip; such as x\.prot"):
        pack(run, packed.with_name("x.zip"))


def test_messages_do_not_name_where_it_was_unpacked(packed: Path) -> None:
    with pytest.raises(DataError, match=f"^the packed tree {packed.stem} does not say which data it was made with"):
        evaluate([packed, packed])


@pytest.mark.parametrize("classes", ["own", "others"])
def test_a_packed_tree_opens_no_folder_by_its_own_word(packed: Path, tmp_path: Path, classes: str) -> None:
    """A stranger's file may name any folder of this machine as its data."""
    folder = tmp_path / "private"
    names = prototree.load(packed).class_names if classes == "own" else ("cat", "dog")
    for name in names:
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(folder / name / "0.png")
    with zipfile.ZipFile(packed) as file:
        metrics = json.loads(file.read("metrics.json"))
    text = json.dumps(with_checksum({**metrics, "source": str(folder)}))
    (tmp_path / "x.prototree").write_bytes(rebuilt(packed, lambda z: z.writestr("metrics.json", text), "metrics.json"))
    run = Run.open(tmp_path / "x.prototree")
    assert "source" not in run.metrics
    assert run.data_or_none() is None
    assert not run.has_data
    assert explain_tree(run).prototypes
    with pytest.raises(DataError, match="--data"):
        run.data()


def test_without_pictures_and_data_packing_says_what_to_do(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    copy = Run(tmp_path / "run")
    shutil.rmtree(copy.folder / ASSETS, ignore_errors=True)
    copy.update_metrics(source=str(tmp_path / "gone"))
    with pytest.raises(CheckpointError, match=r"has no pictures of its prototypes.*prototree report"):
        pack(copy, tmp_path / "x.prototree")
    AssetStore(copy.tree(), copy.folder / ASSETS).save_pictures(open_data(run.source))
    assert PrototypePictures(
        copy.tree(), stored=Run.open(pack(copy, tmp_path / "x.prototree")).folder / ASSETS
    ).complete


@pytest.mark.parametrize(
    "damage",
    [
        {"class_pass_rate": [1.0]},
        {"nearest": [{}]},
        {"locations": "x"},
        {"perturbation_effects": 5},
        {"histogram": [[1], [2]]},
    ],
)
def test_pages_that_make_no_sense_are_left_out(
    run: Run, packed: Path, tmp_path: Path, damage: dict[str, object]
) -> None:
    with zipfile.ZipFile(packed) as file:
        content = json.loads(file.read("assets/assets.json"))
    if "histogram" in damage:
        content["histograms"][1] = damage["histogram"]
    else:
        content["pages"]["prototypes"][1] |= damage
    text = json.dumps(with_checksum(content))
    change = rebuilt(packed, lambda z: z.writestr("assets/assets.json", text), "assets/assets.json")
    (tmp_path / "x.prototree").write_bytes(change)
    prototypes = explain_tree(Run.open(tmp_path / "x.prototree")).prototypes
    assert prototypes[0].nearest
    assert prototypes[1].nearest == ()


def rebuilt(packed: Path, change: Callable[[zipfile.ZipFile], None], skip: str = "") -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(content, "w") as new, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for entry in old.infolist():
            if entry.filename != skip:
                new.writestr(entry, old.read(entry))
        change(new)
    return content.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = (stat.S_IFLNK | 0o777) << 16
    return entry


HOSTILE: dict[str, tuple[Callable[[zipfile.ZipFile], None], str]] = {
    "up": (lambda z: z.writestr("assets/../../evil.webp", b"x"), "leads out of the folder"),
    "absolute": (lambda z: z.writestr("/tmp/evil", b"x"), "leads out of the folder"),
    "drive": (lambda z: z.writestr("C:evil", b"x"), "leads out of the folder"),
    "backslash": (lambda z: z.writestr("..\\evil", b"x"), "leads out of the folder"),
    "link": (lambda z: z.writestr(link("assets/999.webp"), "/etc/passwd"), "is a link or a device"),
    "twice": (lambda z: z.writestr("metrics.json", b"{}"), "is there twice"),
    "twice but for case": (lambda z: z.writestr("Metrics.JSON", b"{}"), "is there twice"),
    "text bomb": (
        lambda z: z.writestr("notes.json", b" " * ((4 << 20) + 1), zipfile.ZIP_DEFLATED),
        "claims more than 4 MiB of text",
    ),
    "bomb": (
        lambda z: z.writestr("assets/999.webp", bytes(24 << 20), zipfile.ZIP_DEFLATED),
        "more than a file of its size can hold",
    ),
    "other compression": (
        lambda z: z.writestr("assets/999.webp", bytes(1000), zipfile.ZIP_BZIP2),
        "is compressed in a way we do not read",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_before_anything_is_written(
    packed: Path, tmp_path: Path, own_cache: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 4 << 20)
    change, message = HOSTILE[kind]
    skip = "notes.json" if kind == "text bomb" else ""
    if kind == "bomb":  # the weights are so large that they would hide it
        skip = "projected/weights.safetensors"
    (tmp_path / "x.prototree").write_bytes(rebuilt(packed, change, skip))
    with pytest.raises(CheckpointError, match=message):
        Run.open(tmp_path / "x.prototree")
    assert not [path for path in own_cache.rglob("*") if path.is_file()]
    assert not list(tmp_path.parent.glob("evil*"))


def test_unknown_files_in_it_are_left_where_they_are(packed: Path, tmp_path: Path) -> None:
    (tmp_path / "x.prototree").write_bytes(rebuilt(packed, lambda z: z.writestr("later/thing.bin", b"x")))
    assert not (Run.open(tmp_path / "x.prototree").folder / "later").exists()


@pytest.mark.parametrize("name", ["...prototree", ".....prototree", ".hidden.prototree"])
def test_a_name_of_dots_leads_nowhere_else(packed: Path, tmp_path: Path, own_cache: Path, name: str) -> None:
    other = Run.open(packed).folder
    shutil.copyfile(packed, tmp_path / name)
    with zipfile.ZipFile(tmp_path / name, "a") as file:
        file.writestr("later.bin", name)  # another content, so another place
    opened = Run.open(tmp_path / name).folder
    assert other.exists(), "what else is in the cache stays"
    assert opened.parent.parent == other.parent.parent
    assert prototree.load(opened).n_classes == 3


def test_a_huge_file_of_nothing_is_not_read_to_its_end(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was hashed")

    monkeypatch.setattr(archive.hashlib, "sha256", lambda: type("", (), {"update": never})())
    for size, message in ((4 << 30, "no tree that `prototree pack` made"), (20 << 30, "cannot be opened")):
        with open(tmp_path / "x.prototree", "wb") as file:
            file.truncate(size)
        with pytest.raises(CheckpointError, match=message):
            Run.open(tmp_path / "x.prototree")


def test_what_could_not_be_opened_again_is_not_packed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MAX_TEXT_BYTES", 100)
    with pytest.raises(CheckpointError, match="would not open again"):
        pack(run, tmp_path / "x.prototree", pages=False)
    assert not list(tmp_path.iterdir())


def test_names_that_are_no_unicode_are_packed_too(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    copy, odd = Run(tmp_path / "run"), "gr\udcfcn"
    copy.update_metrics(classes=[odd, "green", "red"])
    opened = Run.open(pack(copy, tmp_path / "x.prototree", pages=False))
    assert opened.metrics["classes"][0] == odd


def test_files_of_this_machine_are_not_named(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    config = run.config.replace({"weights": "/home/me/my.safetensors"})
    (tmp_path / "run" / "config.toml").write_text(config.to_toml())
    with zipfile.ZipFile(pack(tmp_path / "run", tmp_path / "x.prototree", pages=False)) as file:
        assert not any(b"/home/me" in file.read(name) for name in file.namelist())


def test_photos_that_lie_elsewhere_do_not_tell_where(run: Run, tmp_path: Path) -> None:
    photos, folder = tmp_path / "home" / "me" / "secret" / "squares", tmp_path / "lists" / "deep"
    shutil.copytree(run.source, photos)
    folder.mkdir(parents=True)
    rows = [(path, path.parent.name, path.parts[-3]) for path in sorted(photos.rglob("*.png"))]
    (folder / "data.csv").write_text("path,label,split\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    shutil.copytree(run.folder, tmp_path / "run")
    copy, tree = Run(tmp_path / "run"), run.tree()
    copy.update_metrics(source=str(folder / "data.csv"))
    by_name = {path.relative_to(photos).as_posix(): os.path.relpath(path, folder) for path, *_ in rows}
    tree.sources = tuple(source and replace(source, image=by_name[source.image]) for source in tree.sources)
    checkpoint.save(tree, copy.folder / "projected")
    file = pack(copy, tmp_path / "x.prototree")
    with zipfile.ZipFile(file) as inside:
        assert not any(b"secret" in inside.read(name) for name in inside.namelist())
    opened = explain_tree(Run.open(file))
    for one in opened.prototypes:
        assert one.source.image.count("/") == 1
        assert one.source.crop.std() > 0, "its picture is found under the new name"
        assert one.nearest
        assert all(match.image.count("/") == 1 for match in one.nearest)


def test_too_many_files_are_refused(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 3)
    with pytest.raises(CheckpointError, match="the limit is 3"):
        Run.open(packed)


@pytest.mark.parametrize("kind", ["cut", "garbage", "empty", "longer than it says", "other zip"])
def test_a_damaged_file_is_named_as_such(packed: Path, tmp_path: Path, kind: str, own_cache: Path) -> None:
    file, content = tmp_path / "x.prototree", bytearray(packed.read_bytes())
    if kind == "longer than it says":
        with zipfile.ZipFile(packed) as old:
            name = next(n for n in old.namelist() if n.endswith("tree.json"))
            at, size = old.getinfo(name).header_offset, old.getinfo(name).file_size
        content[at : at + 8] = b"PK\x03\x04\x14\x00\x00\x00"
        where = content.rindex(name.encode()) - 46  # in the list at the end
        content[where + 24 : where + 28] = (size - 5).to_bytes(4, "little")
    changed = {
        "cut": content[:-100],
        "garbage": b"x" * 1000,
        "empty": b"",
        "other zip": rebuilt(packed, lambda z: None, "packed.json"),
    }
    file.write_bytes(changed.get(kind, bytes(content)))
    with pytest.raises(CheckpointError, match=r"is damaged|no tree that `prototree pack` made"):
        Run.open(file)
    assert not [path for path in own_cache.rglob("*") if path.is_file()]


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTOTREE_CACHE", str(tmp_path / "file"))
    assert prototree.load(packed).n_classes == 3


def test_tidying_keeps_what_cannot_be_made_again(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    copy = Run(tmp_path / "run")
    states, features = ("checkpoints/tree/weights.safetensors", "checkpoints/head/x"), "prototree-features/a.f16"
    for name in (*states, features, "report/index.html"):
        (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (copy.folder / name).write_bytes(bytes(1000))
    os.link(copy.folder / features, tmp_path / "shared.f16")
    (tmp_path / "run-edits" / "maps").mkdir(parents=True)
    (tmp_path / "run-edits" / "maps" / "b.f32").write_bytes(bytes(500))
    write_json(tmp_path / "run-edits" / "history.json", {})
    with pytest.raises(ConfigError, match="is not finished"):
        clean(copy)
    lengths = {"mean": 2.0, "std": 0.0, "min": 2, "max": 2}
    figures = {"n_images": 4, "accuracy": dict.fromkeys(STRATEGIES, 0.5), "n_prototypes": 6}
    zeros = ("top5", "ece", "confidence_ece", "mean_confidence", "coverage", "selective_accuracy")
    lists = {"class_accuracy": [1.0] * 3, "confusion": [], "leaf_max_probs": [], "leaf_max_hist": []}
    figures |= {"fidelity": dict.fromkeys(HARD, 1.0), "n_leaves": 2, **dict.fromkeys(zeros, 0.0), **lists}
    copy.update_metrics(stages={"projected": {**figures, "path_length": dict.fromkeys(HARD, lengths)}})
    freed = clean(copy)
    assert sum(one.n_bytes for one in freed) == 2500, "a file that another run uses gives nothing back"
    assert (tmp_path / "shared.f16").exists()
    assert (copy.folder / "report" / "index.html").exists()
    assert (tmp_path / "run-edits" / "history.json").exists()
    assert not (copy.folder / "checkpoints").exists()
    assert torch.equal(copy.tree().prototypes, run.tree().prototypes)
    assert clean(copy) == []


def test_the_commands_open_a_packed_tree(run: Run, packed: Path, tmp_path: Path) -> None:
    file = tmp_path / "squares.prototree"
    shutil.copy(packed, file)
    photo = next(Path(run.source).rglob("*.png"))

    def command(*words: str) -> str:
        done = CliRunner(env={"COLUMNS": "60"}).invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    expected = prototree.predict(run, photo).predicted_class
    said = command("explain", str(file), str(photo))
    assert said.startswith(f"{photo.name}: {expected} (")
    assert (tmp_path / "squares-explained" / photo.stem / "decision.html").exists()
    command("report", str(file))
    rules = json.loads((tmp_path / "squares-report" / "rules.json").read_text())
    assert rules["title"] == "squares"
    assert expected in command("predict", str(file), str(photo))
