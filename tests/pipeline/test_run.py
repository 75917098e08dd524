"""Whole runs on tiny photos, from Python and from the command line, interrupted and continued."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from data_files import write_classes
from killed_runs import commands, content
from prototree.config import preset
from prototree.core import checkpoint
from prototree.data import open_data
from prototree.errors import ConfigError, DataError, ImageSizeError, ProtoTreeError
from prototree.evaluation.tables import percent
from prototree.features.registry import maps_used
from prototree.files import write_json
from prototree.locks import held
from prototree.pipeline.fit import derived, evaluate, evaluate_ensemble, fit, rerun
from prototree.pipeline.folders import what_is_kept
from prototree.pipeline.stages import STAGES, Stages
from prototree.run import Run
from prototree.training.recipes.paper import Paper
from tiny_training import NETWORK, TINY, write_squares

OPTIONS = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("data") / "squares")


def start(*words: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PROTOTREE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "prototree", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def tensors(run: Path, stage: str = "trained") -> dict[str, torch.Tensor]:
    return checkpoint.load(run / stage).state_dict()


def assert_same(one: Path, other: Path) -> None:
    expected, found = tensors(one), tensors(other)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return fit(photos, tmp_path_factory.mktemp("runs") / "a", settings=TINY | {"threshold": 0.34})


def test_two_programs_never_work_in_one_folder(finished: Run, photos: Path) -> None:
    before = content(finished.folder)
    settings = TINY | {"threshold": 0.34}
    with held(finished.folder):
        for work in (
            lambda: fit(photos, finished.folder, settings=settings, resume=True),
            lambda: fit(photos, finished.folder, settings=settings, overwrite=True),
            lambda: rerun(finished.folder, "prune"),
        ):
            with pytest.raises(ConfigError, match="another prototree is at work in"):
                work()
    assert content(finished.folder) == before


def test_a_run_leaves_everything_it_should(finished: Run) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    assert {"config.toml", "log.csv", "metrics.json", "last", "trained", "pruned", "projected"} <= names
    metrics = finished.metrics
    assert set(metrics["stages"]) == {"trained", "pruned", "projected", "projected_any_class"}
    assert metrics["stages"]["trained"]["n_prototypes"] == 7
    assert metrics["stages"]["projected"]["n_prototypes"] == metrics["pruning"]["prototypes"][1]
    assert set(metrics["seconds"]) == set(STAGES)
    assert len((finished.folder / "log.csv").read_text().splitlines()) == 4
    tree = finished.tree()
    assert all(source is not None and source.image.startswith("train/") for source in tree.sources)
    assert finished.config.recipe.values()["height"] == 3


def test_the_same_settings_give_the_same_run(photos: Path, finished: Run, tmp_path: Path) -> None:
    fit(photos, tmp_path / "b", settings=TINY | {"threshold": 0.34}, stages=["train"])
    assert_same(finished.folder, tmp_path / "b")


def test_stages_can_be_done_again_alone(finished: Run) -> None:
    run = rerun(finished.folder, "prune", settings={"threshold": 0.35})
    assert run.metrics["pruning"]["threshold"] == 0.35
    rerun(finished.folder, "project", settings={"project_within_class": False})
    rerun(finished.folder, "evaluate")


@pytest.mark.usefixtures("with_plots")
def test_results_are_written_for_people(finished: Run) -> None:
    rerun(finished.folder, "evaluate")
    text = (finished.folder / "results.md").read_text()
    metrics = finished.metrics["stages"]["projected"]
    soft, max_path = (percent(metrics["accuracy"][strategy], 1) for strategy in ("soft", "max_path"))
    row = next(line for line in text.splitlines() if "projected" in line)
    assert f" | {soft} | {max_path} |" in row
    assert all(title in text for title in ("accuracy by class", "nodes with the most wrong turns", "wrong answers"))
    wrong = json.loads((finished.folder / "errors.json").read_text())["images"]
    assert len(wrong) == round((1 - metrics["accuracy"]["max_path"]) * metrics["n_images"])
    for plot in ("leaf_max_probs_trained.png", "leaf_max_probs_projected.png", "confusion.png"):
        with Image.open(finished.folder / "plots" / plot) as picture:
            assert len(picture.getcolors(2**24) or []) > 10, "the plot is blank"


def test_results_of_an_older_tree_do_not_outlive_it(photos: Path, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=TINY | {"threshold": 0.34, "epochs": 1})
    assert {"projected", "projected_any_class"} <= set(run.metrics["stages"])
    other = checkpoint.read_state(run.folder / "projected_any_class", "state.json")[1]["prototypes"]
    assert other.shape == run.tree().prototypes.shape
    rerun(run.folder, "prune", settings={"threshold": 0.335})
    assert not (run.folder / "projected").exists()
    rerun(run.folder, "project", settings={"project_within_class": False})
    assert not (run.folder / "projected_any_class").exists()
    assert set(rerun(run.folder, "evaluate").metrics["stages"]) == {"trained", "pruned", "projected"}


def test_a_run_a_path_and_a_tree_are_evaluated_alike(photos: Path, finished: Run, tmp_path: Path) -> None:
    stored = finished.metrics["stages"]["projected"]["accuracy"]
    tree, images = finished.tree(), open_data(photos)
    before = finished.metrics
    found = [evaluate(finished), evaluate(str(finished.folder)), evaluate(tree, photos), evaluate(tree, images)]
    assert [one.accuracy for one in found] == [stored] * 4
    assert finished.metrics == before, "nothing is written"
    with pytest.raises(ConfigError, match="a tree by itself"):
        evaluate(tree)
    other = write_classes(tmp_path / "other", {"crow": 12, "wren": 12})
    for given in (tree, finished):
        with pytest.raises(DataError, match="classes"):
            evaluate(given, other)


def test_an_ensemble_has_at_least_two_runs(finished: Run) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        evaluate_ensemble([finished.folder])


def test_bagging_learns_from_a_sample_of_the_photos(photos: Path, finished: Run, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=TINY | {"threshold": 0.34, "bootstrap": True, "seed": 5})
    drawn = {str(sample.path) for sample in open_data(photos).bootstrap(5).train}
    used = {str(photos / source.image) for source in run.tree().sources if source}
    assert used <= drawn
    votes = evaluate_ensemble([finished.folder, run.folder])
    assert votes.n_images == 9
    assert votes.all_trees.n_prototypes == sum(r.tree().topology.n_nodes for r in (finished, run))


def test_a_folder_that_is_taken_is_refused_unless_told(photos: Path, finished: Run, tmp_path: Path) -> None:
    settings = TINY | {"epochs": 1}
    fit(photos, tmp_path / "run", settings=settings, stages=["train"])
    with pytest.raises(ConfigError, match=r"already holds a run .*--resume.*--overwrite"):
        fit(photos, tmp_path / "run", settings=settings)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fit(photos, tmp_path / "run", settings=settings, stages=["train"], overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_run_that_cannot_begin_replaces_nothing(photos: Path, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=TINY | {"epochs": 1, "threshold": 0.34})
    write_json(run.folder / "notes.json", {"0": "red"})
    before = content(run.folder)
    for wrong in ({"weights": str(tmp_path / "typo.safetensors")}, {"backbone": "resnet5"}):
        with pytest.raises(ProtoTreeError):
            fit(photos, run.folder, settings=TINY | {"epochs": 1} | wrong, overwrite=True)
        assert content(run.folder) == before


def test_a_replaced_run_goes_when_the_new_one_is_finished(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TINY | {"epochs": 2}
    run = fit(photos, tmp_path / "run", settings=settings, stages=["train"])
    old = tensors(run.folder)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Stages, "_save", stop)
        with pytest.raises(KeyboardInterrupt):  # when both epochs are saved as states, but no tree is
            fit(photos, run.folder, settings=settings | {"seed": 1}, stages=["train"], overwrite=True)
    assert tensors(run.folder / "replaced").keys() == old.keys()
    assert "replaced" in what_is_kept(run.folder)
    fit(photos, run.folder, settings=settings | {"seed": 1}, stages=["train"], resume=True)
    assert not (run.folder / "replaced").exists()
    assert any(not torch.equal(old[name], new) for name, new in tensors(run.folder).items())


@pytest.mark.parametrize("settings", [{"image_size": 1536}, {"resize": 1536}])
def test_training_has_the_same_limit_of_image_size_as_opening(
    photos: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    with pytest.raises(ImageSizeError, match="PROTOTREE_MAX_IMAGE_SIZE=1536"):
        fit(photos, tmp_path / "run", settings=TINY | settings)


def test_unknown_stages_and_other_data(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown stage 'dance'"):
        fit("anything", tmp_path, stages=["dance"])
    other = write_squares(tmp_path / "other")
    for split in ("train", "test"):
        (other / split / "red").rename(other / split / "crimson")
    with pytest.raises(DataError, match="expected the classes of the run"):
        rerun(finished.folder, "evaluate", data=other)


def test_killed_in_the_middle_and_continued_it_ends_with_the_same_weights(
    photos: Path, finished: Run, tmp_path: Path
) -> None:
    words = ["train", photos, "--out", tmp_path / "run", *OPTIONS, "--threshold", "0.34", "--checkpoint-minutes", "0"]
    with commands(tmp_path / "commands") as do:
        killed = do.run(*words, at=(1, 56))  # of the 119 events of the training, when an epoch and a batch are saved
        assert killed.code == -signal.SIGKILL, killed.err
        saved = json.loads((tmp_path / "run" / "last" / "state.json").read_text())
        assert (1, 1) <= (saved["epoch"], saved["batch"]) < (2, 0)
        assert not (tmp_path / "run" / "trained").exists()
        continued = do.run(*words, "--resume")
    assert continued.code == 0, continued.err
    assert "projected" in continued.out
    assert_same(finished.folder, tmp_path / "run")


def test_sigterm_saves_says_how_to_go_on_and_exits(photos: Path, tmp_path: Path) -> None:
    words = ["train", str(photos), "--out", str(tmp_path / "run"), *OPTIONS, "--epochs", "1000"]
    process = start(*words, cache=tmp_path)
    deadline = time.monotonic() + 3600
    while time.monotonic() < deadline and not (tmp_path / "run" / "log.csv").exists() and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=3600)
    assert process.returncode == 130, errors[-2000:]
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_a_backbone_without_weights_can_be_pretrained(photos: Path, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=TINY | {"pretrain_epochs": 2, "epochs": 1}, stages=["train"])
    assert (run.folder / "pretrained" / "state.json").exists()
    plain = fit(photos, tmp_path / "plain", settings=TINY | {"epochs": 1}, stages=["train"])
    key = "features.backbone.net.conv_stem.weight"
    assert not torch.equal(tensors(run.folder)[key], tensors(plain.folder)[key])


@pytest.mark.parametrize("kind", ["run", "ensemble", "network"])
def test_teachers_of_every_kind(photos: Path, finished: Run, tmp_path: Path, kind: str) -> None:
    teacher = {"run": str(finished.folder), "ensemble": f"{finished.folder},{finished.folder / 'trained'}"}.get(kind)
    if teacher is None:
        torch.save(timm.create_model(NETWORK, num_classes=3).state_dict(), tmp_path / "teacher.pth")
        teacher = f"{NETWORK}={tmp_path / 'teacher.pth'}"
    run = fit(photos, tmp_path / "run", settings=TINY | {"teacher": teacher, "epochs": 1}, stages=["train"])
    probs = checkpoint.read_state(run.folder / "teacher", "teacher.json")[1]["probs"]
    torch.testing.assert_close(probs.sum(dim=1), torch.ones(24))


def test_a_cache_while_frozen_and_photos_after(photos: Path, tmp_path: Path) -> None:
    run = fit(photos, tmp_path / "run", settings=TINY | {"cache_views": 2}, stages=["train"])
    (name,) = maps_used(run.folder)
    assert [path.name for path in (tmp_path / "prototree-maps").glob("*.f16")] == [name]
    assert len((run.folder / "log.csv").read_text().splitlines()) == 4


def test_what_follows_from_the_data(photos: Path) -> None:
    config = derived(preset("paper-cub").changed({"height": 0, "threshold": 0}), open_data(photos))
    assert isinstance(config.recipe, Paper)
    assert (config.recipe.height, config.resize) == (3, config.image_size)
    assert config.threshold == pytest.approx(2 / 3)


def test_photos_from_python_are_learned_from_and_found_again(photos: Path, tmp_path: Path) -> None:
    paths = sorted(photos.rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    labels = [path.parent.name for path in paths]
    run = fit((pixels, labels), tmp_path / "run", settings=TINY | {"epochs": 1, "threshold": 0.34})
    assert run.tree().class_names == ("blue", "green", "red")
    data = Run.open(run.folder).data()
    assert len(data.train) + len(data.test) == len(paths)
    assert Path(run.source).is_relative_to(tmp_path / "prototree-data")
    again = fit((pixels, labels), tmp_path / "again", settings=TINY | {"epochs": 1}, stages=["train"])
    assert again.source == run.source, "the photos are written once"
    assert_same(run.folder, again.folder)
