"""Whole runs on tiny images, from Python and from the command line, interrupted and continued."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data_files import write_classes
from killed_runs import content
from prototree.core import checkpoint
from prototree.data import open_data
from prototree.errors import CheckpointError, ConfigError, DataError, ImageSizeError, ProtoTreeError
from prototree.evaluation.tables import percent
from prototree.features.cache import FOLDER, files_used
from prototree.io import lock_folder, write_json
from prototree.pipeline.fit import evaluate, fit, rerun
from prototree.pipeline.folders import describe_progress
from prototree.pipeline.stages import STAGES
from prototree.progress import Observer
from prototree.run import Run
from tiny_training import TINY, Crash, PowerCutError, assert_same, write_squares

OPTIONS = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("data") / "squares")


def start(*words: str, cache: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "PROTOTREE_CACHE": str(cache), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "prototree", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def tensors(run: Path, stage: str = "trained") -> dict[str, torch.Tensor]:
    return checkpoint.load(run / stage).state_dict()


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return fit(images, tmp_path_factory.mktemp("runs") / "a", settings=TINY | {"prune_threshold": 0.34})


def test_two_programs_never_work_in_one_folder(finished: Run, images: Path) -> None:
    before = content(finished.folder)
    settings = TINY | {"prune_threshold": 0.34}
    with lock_folder(finished.folder):
        for work in (
            lambda: fit(images, finished.folder, settings=settings, resume=True),
            lambda: fit(images, finished.folder, settings=settings, overwrite=True),
            lambda: rerun(finished.folder, "prune"),
        ):
            with pytest.raises(ConfigError, match="another prototree is at work in"):
                work()
    assert content(finished.folder) == before


def test_a_run_leaves_everything_it_should(finished: Run) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    assert {"config.toml", "log.csv", "metrics.json", "checkpoints", "trained", "pruned", "projected"} <= names
    metrics = finished.metrics
    assert set(metrics["stages"]) == {"trained", "pruned", "projected", "projected_any_class"}
    assert metrics["stages"]["trained"]["n_prototypes"] == 7
    assert metrics["stages"]["projected"]["n_prototypes"] == metrics["pruning"]["prototypes"][1]
    assert set(metrics["seconds"]) == set(STAGES)
    assert len((finished.folder / "log.csv").read_text().splitlines()) == 4
    tree = finished.tree()
    assert all(source is not None and source.image.startswith("train/") for source in tree.sources)
    assert finished.config.recipe.values()["height"] == 3


def test_the_same_settings_give_the_same_run(images: Path, finished: Run, tmp_path: Path) -> None:
    fit(images, tmp_path / "b", settings=TINY | {"prune_threshold": 0.34}, stages=["train"])
    assert_same(tensors(finished.folder), tensors(tmp_path / "b"))


def test_stages_can_be_done_again_alone(finished: Run) -> None:
    run = rerun(finished.folder, "prune", settings={"prune_threshold": 0.35})
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
    assert all(title in text for title in ("accuracy by class", "nodes with the most errors", "wrong predictions"))
    wrong = json.loads((finished.folder / "errors.json").read_text())["images"]
    assert len(wrong) == round((1 - metrics["accuracy"]["max_path"]) * metrics["n_images"])
    for plot in ("leaf_max_probs_trained.png", "leaf_max_probs_projected.png", "confusion.png"):
        with Image.open(finished.folder / "plots" / plot) as picture:
            assert len(picture.getcolors(2**24) or []) > 10, "the plot is blank"


def test_results_of_an_older_tree_do_not_outlive_it(images: Path, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=TINY | {"prune_threshold": 0.34, "epochs": 1})
    assert {"projected", "projected_any_class"} <= set(run.metrics["stages"])
    other = checkpoint.read_state(run.folder / "projected_any_class", "state.json")[1]["prototypes"]
    assert other.shape == run.tree().prototypes.shape
    rerun(run.folder, "prune", settings={"prune_threshold": 0.335})
    assert not (run.folder / "projected").exists()
    rerun(run.folder, "project", settings={"project_within_class": False})
    assert not (run.folder / "projected_any_class").exists()
    assert set(rerun(run.folder, "evaluate").metrics["stages"]) == {"trained", "pruned", "projected"}


def test_a_run_a_path_and_a_tree_are_evaluated_alike(images: Path, finished: Run, tmp_path: Path) -> None:
    stored = finished.metrics["stages"]["projected"]["accuracy"]
    tree, images = finished.tree(), open_data(images)
    before = finished.metrics
    found = [evaluate(finished), evaluate(str(finished.folder)), evaluate(tree, images), evaluate(tree, images)]
    assert [one.accuracy for one in found] == [stored] * 4
    assert finished.metrics == before, "nothing is written"
    with pytest.raises(ConfigError, match="a tree by itself"):
        evaluate(tree)
    other = write_classes(tmp_path / "other", {"crow": 12, "wren": 12})
    for given in (tree, finished):
        with pytest.raises(DataError, match="classes"):
            evaluate(given, other)


def test_bagging_learns_from_a_sample_of_the_images(images: Path, finished: Run, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=TINY | {"prune_threshold": 0.34, "bootstrap": True, "seed": 5})
    drawn = {str(sample.path) for sample in open_data(images).bootstrap(5).train}
    used = {str(images / source.image) for source in run.tree().sources if source}
    assert used <= drawn
    votes = evaluate([finished.folder, run.tree()])
    assert (votes.n_images, votes.ensembles[0].accuracy) == (9, evaluate(finished).accuracy)
    assert votes.all_trees.n_prototypes == sum(r.tree().topology.n_nodes for r in (finished, run))


def test_a_folder_that_is_taken_is_refused_unless_told(images: Path, finished: Run, tmp_path: Path) -> None:
    settings = TINY | {"epochs": 1}
    fit(images, tmp_path / "run", settings=settings, stages=["train"])
    with pytest.raises(ConfigError, match=r"already holds a run .*--resume.*--overwrite"):
        fit(images, tmp_path / "run", settings=settings)
    (tmp_path / "run" / "notes.txt").write_text("mine")
    fit(images, tmp_path / "run", settings=settings, stages=["train"], overwrite=True)
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_run_that_cannot_begin_replaces_nothing(images: Path, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=TINY | {"epochs": 1, "prune_threshold": 0.34})
    write_json(run.folder / "notes.json", {"0": "red"})
    before = content(run.folder)
    for wrong in ({"weights": str(tmp_path / "typo.safetensors")}, {"backbone": "resnet5"}):
        with pytest.raises(ProtoTreeError):
            fit(images, run.folder, settings=TINY | {"epochs": 1} | wrong, overwrite=True)
        assert content(run.folder) == before


def test_a_replaced_run_goes_when_the_new_one_is_finished(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TINY | {"epochs": 2}
    run = fit(images, tmp_path / "run", settings=settings, stages=["train"])
    old = tensors(run.folder)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stop)
        with pytest.raises(KeyboardInterrupt):  # when both epochs are saved as states, but no tree is
            fit(images, run.folder, settings=settings | {"seed": 1}, stages=["train"], overwrite=True)
    assert tensors(run.folder / "replaced").keys() == old.keys()
    assert "replaced" in describe_progress(run.folder)
    fit(images, run.folder, settings=settings | {"seed": 1}, stages=["train"], resume=True)
    assert not (run.folder / "replaced").exists()
    assert any(not torch.equal(old[name], new) for name, new in tensors(run.folder).items())


@pytest.mark.parametrize("settings", [{"image_size": 1536}, {"resize": 1536}])
def test_training_has_the_same_limit_of_image_size_as_opening(
    images: Path, tmp_path: Path, settings: dict[str, int]
) -> None:
    with pytest.raises(ImageSizeError, match="PROTOTREE_MAX_IMAGE_SIZE=1536"):
        fit(images, tmp_path / "run", settings=TINY | settings)


def test_unknown_stages_and_other_data(finished: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown stage 'dance'"):
        fit("anything", tmp_path, stages=["dance"])
    other = write_squares(tmp_path / "other")
    for split in ("train", "test"):
        (other / split / "red").rename(other / split / "crimson")
    with pytest.raises(DataError, match="expected the classes of the run"):
        rerun(finished.folder, "evaluate", data=other)


def test_interrupted_in_the_middle_and_resumed_it_ends_with_the_same_weights(
    images: Path, finished: Run, tmp_path: Path
) -> None:
    settings = TINY | {"prune_threshold": 0.34}
    with pytest.raises(PowerCutError):
        fit(images, tmp_path / "run", settings=settings, observer=Crash("batch", 4))
    assert json.loads((tmp_path / "run" / "checkpoints" / "tree" / "state.json").read_text())["epoch"] == 1
    assert "tree (1 epochs)" in describe_progress(tmp_path / "run")
    with pytest.raises(CheckpointError, match="seed 0 then, 5 now"):
        fit(images, tmp_path / "run", settings=settings | {"seed": 5}, resume=True)
    fit(images, tmp_path / "run", settings=settings, resume=True)
    assert_same(tensors(finished.folder), tensors(tmp_path / "run"))
    stages: list[str] = []
    listener = Observer()
    listener.stage = stages.append  # type: ignore[method-assign]
    fit(images, tmp_path / "run", settings=settings, resume=True, observer=listener)
    assert len(stages) == 1, "there is nothing to do"


def test_sigterm_saves_says_how_to_go_on_and_exits(images: Path, tmp_path: Path) -> None:
    words = ["train", str(images), "--out", str(tmp_path / "run"), *OPTIONS, "--epochs", "1000"]
    process = start(*words, cache=tmp_path)
    deadline = time.monotonic() + 3600
    while time.monotonic() < deadline and not (tmp_path / "run" / "log.csv").exists() and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    _, errors = process.communicate(timeout=3600)
    assert process.returncode == 130, errors[-2000:]
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_a_backbone_without_weights_can_be_pretrained(images: Path, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=TINY | {"pretrain_epochs": 2, "epochs": 1}, stages=["train"])
    assert (run.folder / "checkpoints" / "backbone" / "state.json").exists()
    plain = fit(images, tmp_path / "plain", settings=TINY | {"epochs": 1}, stages=["train"])
    key = "features.backbone.net.conv_stem.weight"
    assert not torch.equal(tensors(run.folder)[key], tensors(plain.folder)[key])


def test_a_cache_while_frozen_and_images_after(images: Path, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=TINY | {"cache_views": 2}, stages=["train"])
    (name,) = files_used(run.folder)
    assert [path.name for path in (tmp_path / FOLDER).glob("*.f16")] == [name]
    assert len((run.folder / "log.csv").read_text().splitlines()) == 4


def test_images_from_python_are_learned_from_and_found_again(images: Path, tmp_path: Path) -> None:
    paths = sorted(images.rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    labels = [path.parent.name for path in paths]
    run = fit((pixels, labels), tmp_path / "run", settings=TINY | {"epochs": 1, "prune_threshold": 0.34})
    assert run.tree().class_names == ("blue", "green", "red")
    data = Run.open(run.folder).data()
    assert len(data.train) + len(data.test) == len(paths)
    assert Path(run.source).is_relative_to(tmp_path / "prototree-data")
    again = fit((pixels, labels), tmp_path / "again", settings=TINY | {"epochs": 1}, stages=["train"])
    assert again.source == run.source, "the images are written once"
    assert_same(tensors(run.folder), tensors(again.folder))
