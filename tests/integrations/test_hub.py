"""A run goes to the hub and comes back, and a model card says what was measured."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_hub import Hub, use_fake_hub

from prototree import archive
from prototree.archive import pull
from prototree.cli.predict import push as command
from prototree.core.checkpoint import load
from prototree.core.confidence import Calibration
from prototree.errors import CheckpointError, ConfigError, ProtoTreeError
from prototree.explanation.tree import pictures_of
from prototree.integrations.hub import push, stage
from prototree.io import write_json
from prototree.pipeline.fit import fit
from prototree.pipeline.model_card import model_card
from prototree.run import Run
from tiny_training import TINY, write_squares


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hub")
    photos = write_squares(folder / "photos", train=4, test=2)
    made = fit(photos, folder / "run", settings={**TINY, "epochs": 1, "height": 2, "prune_threshold": 0.01})
    (folder / "run" / "notes.json").write_text('{"1": "a red corner"}')
    return made


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.chdir(tmp_path)  # where no folder has a user's name
    return use_fake_hub(monkeypatch, tmp_path / "hub-cache")


def test_there_and_back(run: Run, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files["me/squares"] = {"assets/999-0.webp": b"old", "my-notes.md": b"kept"}
    command(run.folder, "me/squares", "mit", True)
    assert "https://hub.example/me/squares" in capsys.readouterr().out
    assert hub.private["me/squares"]
    sent = hub.files["me/squares"]
    assert "assets/999-0.webp" not in sent
    assert sent["my-notes.md"] == b"kept"
    assert str(run.folder.parent).encode() not in b"".join(sent.values()), "nothing about this machine"
    assert not any(name.startswith(("last", "cache", "trained", "log", "tensorboard")) for name in sent)
    assert all(word in sent["README.md"].decode() for word in ("license: mit", "tree.png"))
    sent |= {"pickle.pkl": b"x", "assets/run.py": b"x", "model.safetensors": b"x"}
    tree, original = load("me/squares"), run.tree()
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, tree.state_dict()[name]), name
    assert tree.class_names == original.class_names
    folder = pull("me/squares")
    fetched = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "projected/weights.safetensors" in fetched
    assert not fetched & {"pickle.pkl", "assets/run.py", "model.safetensors"}, "only files of a tree are fetched"
    opened = Run.open("me/squares")
    assert opened.notes == {0: "a red corner"}
    crop, sent_crop = (pictures_of(model).crop(0) for model in (run, opened))
    assert np.array_equal(crop, sent_crop)
    assert crop.std() > 1  # no grey square


def test_without_the_hub_the_last_one_is_used(run: Run, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    push(run, "me/squares")
    load("me/squares")
    hub.is_down = True
    assert load("me/squares").class_names == run.tree().class_names
    assert "cannot be reached" in caplog.text
    with pytest.raises(ProtoTreeError):
        push(run, "me/squares")


def test_what_is_no_tree_is_not_fetched_and_what_is_here_not_looked_for(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    for name in ("runs/mistyped", "a/b/c", "single"):
        with pytest.raises(CheckpointError):
            load(name)
    assert hub.asked == []
    hub.files["you/text"] = {"README.md": b"a language model"}
    hub.files["you/huge"] = {"projected/tree.json": b"{}", "packed.json": b"{}"}
    monkeypatch.setattr(archive, "_MAX_HUB_BYTES", 1)
    for name in ("you/nothing", "you/text", "you/huge"):
        with pytest.raises(CheckpointError, match=name):
            load(name)


def test_names_licences_and_unfinished_runs_are_checked_first(run: Run, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.toml").write_text("version = 2\n")
    with pytest.raises(ConfigError):
        push(run, "no-user")
    with pytest.raises(ConfigError):
        push(run, "me/squares", license="MIT\n---\nevil: true")
    with pytest.raises(CheckpointError):
        push(tmp_path / "bare", "me/bare")
    assert hub.asked == []


def test_pictures_are_made_from_the_photos_where_the_run_has_none(run: Run, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "assets")
    (tmp_path / "out").mkdir()
    stage(Run.open(tmp_path / "run"), tmp_path / "out", "me/squares")
    assert np.array_equal(pictures_of(Run(tmp_path / "out")).crop(0), pictures_of(run).crop(0))
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    write_json(tmp_path / "run" / "metrics.json", {**metrics, "source": str(tmp_path / "gone")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="pictures"):
        stage(Run.open(tmp_path / "run"), tmp_path / "empty", "me/squares")


def test_the_card_tells_what_was_measured_and_names_are_text(run: Run, tmp_path: Path) -> None:
    stage(run, tmp_path, "me/squares", "cc-by-4.0")
    card, greedy = (tmp_path / "README.md").read_text(), run.metrics["stages"]["projected"]["accuracy"]["greedy"]
    for text in (f"{100 * greedy:.1f} %", "blue, green, red", "12 images", 'prototree.load("me/squares")'):
        assert text in card
    assert (tmp_path / "tree.png").stat().st_size > 1000
    tree = run.tree()
    tree.class_names = ("<script>alert(1)</script>", "a | b", "[x](http://y)")
    card = model_card("me/squares", tree, {}, license="mit")
    assert "It always predicts" in card
    assert not [text for text in ("<script>", "[x](") if text in card]
    tree.calibration = Calibration(1.0, 0.0, 9, min_confidence=0.4)
    card = model_card("squares", tree, run.metrics, notes={0: "a <b>red</b> chest"})
    name = tree.patch_name(0)
    assert f"## Named patches\n\n- {name}: a &lt;b&gt;red&lt;/b&gt; chest\n" in card
    assert not [text for text in ("It always predicts", "license") if text in card]
