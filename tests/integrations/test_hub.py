"""A run goes to the hub and comes back; the hub is a server on this machine."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch
from hub_server import Hub, serving

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

# The hub client's own, about the HTTP library below it.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hub")
    photos = write_squares(folder / "photos", train=4, test=2)
    made = fit(photos, folder / "run", settings={**TINY, "epochs": 1, "height": 2, "prune_threshold": 0.01})
    (folder / "run" / "notes.json").write_text('{"1": "a red corner"}')
    return made


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.chdir(tmp_path)  # where no folder has a user's name
    with serving() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        yield running


def test_there_and_back(run: Run, server: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    command(run.folder, "me/squares", "mit", True)
    assert "sent to http://127.0.0.1" in capsys.readouterr().out
    assert "private" in (server.created[0].get("visibility"), server.created[0].get("private") and "private")
    tree, original = load("me/squares"), run.tree()
    for name, tensor in original.state_dict().items():
        assert torch.equal(tensor, tree.state_dict()[name]), name
    assert tree.class_names == original.class_names
    fetched = Run.open("me/squares")
    assert fetched.notes == {0: "a red corner"}
    own, sent = (pictures_of(one).crop(0) for one in (run, fetched))
    assert np.array_equal(own, sent)
    assert own.std() > 1  # no grey square
    assert all(word in server.files["me/squares"]["README.md"].decode() for word in ("license: mit", "tree.png"))


def test_nothing_about_the_machine_goes_out(run: Run, server: Hub) -> None:
    push(run, "me/squares")
    sent = server.files["me/squares"]
    assert str(run.folder.parent).encode() not in b"".join(sent.values())
    assert not any(name.startswith(("last", "cache", "trained", "log", "tensorboard")) for name in sent)


def test_sending_again_replaces(run: Run, server: Hub) -> None:
    server.files["me/squares"] = {"assets/999-0.webp": b"old", "my-notes.md": b"kept"}
    push(run, "me/squares")
    assert "assets/999-0.webp" not in server.files["me/squares"]
    assert server.files["me/squares"]["my-notes.md"] == b"kept"


def test_only_files_of_a_tree_are_fetched(run: Run, server: Hub) -> None:
    push(run, "me/squares")
    server.files["me/squares"] |= {"pickle.pkl": b"x", "assets/run.py": b"x", "model.safetensors": b"x"}
    folder = pull("me/squares")
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "projected/weights.safetensors" in found
    assert not found & {"pickle.pkl", "assets/run.py", "model.safetensors"}


def test_without_the_hub_the_last_one_is_used(
    run: Run, server: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push(run, "me/squares")
    load("me/squares")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert load("me/squares").class_names == run.tree().class_names
    assert "cannot be reached" in caplog.text


def test_what_is_not_there_or_no_tree_is_named(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="you/nothing"):
        load("you/nothing")
    server.files["you/text"] = {"README.md": b"a language model"}
    with pytest.raises(CheckpointError):
        load("you/text")
    server.files["you/huge"] = {"projected/tree.json": b"{}", "packed.json": b"{}"}
    monkeypatch.setattr(archive, "_MAX_HUB_BYTES", 1)
    with pytest.raises(CheckpointError):
        load("you/huge")


def test_a_folder_that_is_here_is_never_looked_for_on_the_hub(server: Hub, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError):
        load("runs/mistyped")
    with pytest.raises(CheckpointError):
        load("a/b/c")
    with pytest.raises(CheckpointError):
        load("single")
    assert server.asked == []


def test_names_licences_and_unfinished_runs_are_checked_first(run: Run, server: Hub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        push(run, "no-user")
    with pytest.raises(ConfigError):
        push(run, "me/squares", license="MIT\n---\nevil: true")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.toml").write_text("version = 2\n")
    with pytest.raises(CheckpointError):
        push(tmp_path / "bare", "me/bare")
    assert server.asked == []


def test_a_hub_that_refuses_is_one_clear_error(run: Run, server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{server.address}/nothing-here")
    with pytest.raises(ProtoTreeError):
        push(run, "me/squares")


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


def test_the_card_tells_what_was_measured(run: Run, tmp_path: Path) -> None:
    stage(run, tmp_path, "me/squares", "cc-by-4.0")
    card = (tmp_path / "README.md").read_text()
    greedy = run.metrics["stages"]["projected"]["accuracy"]["greedy"]
    assert f"{greedy:.1%}".replace("%", " %") in card
    assert "blue, green, red" in card
    assert "trained on 12 photos" in card
    assert 'prototree.load("me/squares")' in card
    assert (tmp_path / "tree.png").stat().st_size > 1000
    assert "source" not in json.loads((tmp_path / "metrics.json").read_text())


def test_the_card_says_whether_the_tree_abstains_and_names_are_text(run: Run) -> None:
    tree = run.tree()
    tree.class_names = ("<script>alert(1)</script>", "a | b", "[x](http://y)")
    card = model_card("me/squares", tree, {}, license="mit")
    assert "It always predicts" in card
    assert "not been evaluated" in card
    assert "<script>" not in card
    assert "[x](" not in card
    tree.calibration = Calibration(1.0, 0.0, 9, min_confidence=0.4)
    assert "It always predicts" not in model_card("squares", tree, run.metrics)
    assert "license" not in model_card("squares", tree, run.metrics)
