"""Whole runs on tiny images, interrupted and continued, evaluated again, and overwritten."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import prototree
from data_files import write_classes
from killed_runs import content
from prototree.config import load_preset
from prototree.core import checkpoint
from prototree.data import open_data
from prototree.errors import CheckpointError, ConfigError, DataError, ImageSizeError, ProtoTreeError
from prototree.evaluation.tables import percent
from prototree.features.cache import FOLDER, files_used
from prototree.io import lock_folder, write_json
from prototree.pipeline.fit import evaluate, fit, rerun
from prototree.pipeline.folders import describe_progress
from prototree.pipeline.stages import STAGES
from prototree.pipeline.sweep import fit_seeds
from prototree.run import Run
from tiny_training import TINY, Crash, PowerCutError, assert_same, write_squares

SETTINGS = TINY | {"prune_threshold": 0.34}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("data") / "squares")


@pytest.fixture(scope="module")
def finished(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return fit(images, tmp_path_factory.mktemp("runs") / "a", settings=SETTINGS)


@pytest.fixture
def copy(finished: Run, tmp_path: Path) -> Run:
    """The finished run again, to be changed."""
    return Run(Path(shutil.copytree(finished.folder, tmp_path / "run")))


def tensors(run: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run / "trained").state_dict()


def test_two_programs_never_work_in_one_folder(finished: Run, images: Path) -> None:
    before = content(finished.folder)
    with lock_folder(finished.folder):
        for work in (
            lambda: fit(images, finished.folder, settings=SETTINGS, resume=True),
            lambda: fit(images, finished.folder, settings=SETTINGS, overwrite=True),
            lambda: rerun(finished.folder, "prune"),
        ):
            with pytest.raises(ConfigError, match="another prototree"):
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
    assert all(source is not None and source.image.startswith("train/") for source in finished.tree().sources)
    assert finished.config.recipe.values()["height"] == 3


@pytest.mark.usefixtures("with_plots")
def test_results_are_written_for_people(copy: Run) -> None:
    rerun(copy.folder, "evaluate")
    text = (copy.folder / "results.md").read_text()
    metrics = copy.metrics["stages"]["projected"]
    soft, max_path = (percent(metrics["accuracy"][strategy], 1) for strategy in ("soft", "max_path"))
    row = next(line for line in text.splitlines() if "projected" in line)
    assert f" | {soft} | {max_path} |" in row
    wrong = json.loads((copy.folder / "errors.json").read_text())["images"]
    assert len(wrong) == round((1 - metrics["accuracy"]["max_path"]) * metrics["n_images"])
    for plot in ("leaf_max_probs_trained.png", "leaf_max_probs_projected.png", "confusion.png"):
        with Image.open(copy.folder / "plots" / plot) as picture:
            assert len(picture.getcolors(2**24) or []) > 10, "the plot is blank"


def test_names_stay_with_their_prototypes_when_pruning_renumbers_nodes(copy: Run) -> None:
    rerun(copy.folder, "prune", settings={"prune_threshold": 0})  # all nodes stay
    full = copy.tree()
    write_json(copy.folder / "notes.json", {str(node + 1): f"name {node}" for node in range(full.n_prototypes)})
    vectors = [vector.tolist() for vector in full.prototypes]
    largest = full.leaf_logits.softmax(dim=1).amax(dim=1).sort().values
    smaller = rerun(copy.folder, "prune", settings={"prune_threshold": float(largest[2])}).tree()
    assert smaller.n_prototypes < full.n_prototypes
    names = {row: f"name {vectors.index(vector.tolist())}" for row, vector in enumerate(smaller.prototypes)}
    assert Run(copy.folder).notes == copy.notes == names


def test_stages_are_done_again_and_results_of_an_older_tree_do_not_outlive_it(copy: Run) -> None:
    other = checkpoint.read_state(copy.folder / "projected_any_class", "state.json")[1]["prototypes"]
    assert other.shape == copy.tree().prototypes.shape
    pruned = rerun(copy.folder, "prune", settings={"prune_threshold": 0.335})
    assert pruned.metrics["pruning"]["threshold"] == 0.335
    assert not (copy.folder / "projected").exists()
    rerun(copy.folder, "project", settings={"project_within_class": False})
    assert not (copy.folder / "projected_any_class").exists()
    assert set(rerun(copy.folder, "evaluate").metrics["stages"]) == {"trained", "pruned", "projected"}


def test_a_run_a_path_and_a_tree_are_evaluated_alike(images: Path, finished: Run, tmp_path: Path) -> None:
    stored = finished.metrics["stages"]["projected"]["accuracy"]
    tree, before = finished.tree(), finished.metrics
    results = [evaluate(finished), evaluate(str(finished.folder)), evaluate(tree, open_data(images))]
    assert [result.accuracy for result in results] == [stored] * 3
    assert finished.metrics == before, "nothing is written"
    with pytest.raises(ConfigError):
        evaluate(tree)
    other = write_classes(tmp_path / "other", {"crow": 12, "wren": 12})
    for work in (evaluate, lambda model, data: rerun(model.folder, "evaluate", data=data)):
        with pytest.raises(DataError, match="classes"):
            work(finished, other)


def test_bagging_learns_from_a_sample_of_the_images(images: Path, finished: Run, tmp_path: Path) -> None:
    run = fit(images, tmp_path / "run", settings=SETTINGS | {"bootstrap": True, "seed": 5})
    drawn = {str(sample.path) for sample in open_data(images).bootstrap(5).train}
    used = {str(images / source.image) for source in run.tree().sources if source}
    assert used <= drawn
    votes = evaluate([finished.folder, run.tree()])
    assert (votes.n_images, votes.ensembles[0].accuracy) == (9, evaluate(finished).accuracy)
    assert votes.all_trees.n_prototypes == sum(r.tree().topology.n_nodes for r in (finished, run))


def test_a_start_that_failed_does_not_stand_in_the_way(images: Path, tmp_path: Path) -> None:
    with pytest.raises(ProtoTreeError):
        fit(images, tmp_path / "run", settings=SETTINGS | {"backbone": "resnet5"})
    fit(images, tmp_path / "run", settings=TINY | {"epochs": 1}, stages=["train"])


def test_stages_that_are_none_or_have_no_tree_are_refused(finished: Run, images: Path, tmp_path: Path) -> None:
    for stage in ("foo", "context", "batches"):
        with pytest.raises(ConfigError, match="train, prune"):
            rerun(finished.folder, stage)
    with pytest.raises(ConfigError, match="list of stages"):
        fit(images, tmp_path / "run", stages="train")
    with pytest.raises(ConfigError, match="run the stage train first"):
        fit(images, tmp_path / "run", settings=SETTINGS, stages=["evaluate"])


def test_a_folder_that_is_taken_is_refused_unless_told(images: Path, copy: Run, tmp_path: Path) -> None:
    (copy.folder / "mine.txt").write_text("mine")
    before = content(copy.folder)
    with pytest.raises(ConfigError, match="--overwrite"):
        fit(images, copy.folder, settings=SETTINGS)
    for wrong in ({"weights": str(tmp_path / "typo.safetensors")}, {"backbone": "resnet5"}):
        with pytest.raises(ProtoTreeError):
            fit(images, copy.folder, settings=SETTINGS | wrong, overwrite=True)
    assert content(copy.folder) == before, "a run that cannot begin replaces nothing"
    fit(images, copy.folder, settings=TINY | {"epochs": 1}, stages=["train"], overwrite=True)
    assert (copy.folder / "mine.txt").read_text() == "mine"


def test_a_start_that_fails_leaves_nothing(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "new"
    with pytest.raises(ProtoTreeError):
        fit(images, out, settings=SETTINGS | {"weights": str(tmp_path / "typo.safetensors")})
    assert not out.exists()
    out.mkdir(parents=True)
    (out / "mine.txt").write_text("mine")
    with pytest.raises(ProtoTreeError):
        fit(images, out, settings=SETTINGS | {"weights": str(tmp_path / "typo.safetensors")})
    assert [path.name for path in out.iterdir()] == ["mine.txt"]


def test_a_run_inside_the_images_is_refused(images: Path) -> None:
    before = content(images)
    for start in (fit, partial(fit_seeds, seeds=2)):
        with pytest.raises(ConfigError, match="outside"):
            start(images, images / "run", settings=SETTINGS)
    assert content(images) == before


def test_what_is_no_run_or_unfinished_is_named_so(images: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.toml"):
        prototree.predict(images, images)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(load_preset("default").to_toml())
    with pytest.raises(CheckpointError, match="--resume"):
        prototree.predict(tmp_path / "run", images)


def test_a_replaced_run_goes_when_the_new_one_is_finished(
    images: Path, copy: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, settings = tensors(copy.folder), TINY | {"epochs": 1, "seed": 1}

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", stop)
        with pytest.raises(KeyboardInterrupt):  # when the epoch is saved as a state, but no tree is
            fit(images, copy.folder, settings=settings, stages=["train"], overwrite=True)
    assert tensors(copy.folder / "replaced").keys() == old.keys()
    assert "replaced" in describe_progress(copy.folder)
    fit(images, copy.folder, settings=settings, stages=["train"], resume=True)
    assert not (copy.folder / "replaced").exists()
    assert any(not torch.equal(old[name], new) for name, new in tensors(copy.folder).items())


@pytest.mark.parametrize("key", ["image_size", "resize"])
def test_training_has_the_same_limit_of_image_size_as_opening(images: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(ImageSizeError, match="PROTOTREE_MAX_IMAGE_SIZE=1536"):
        fit(images, tmp_path / "run", settings=TINY | {key: 1536})


def test_interrupted_in_the_middle_and_resumed_it_ends_with_the_same_weights(
    images: Path, finished: Run, tmp_path: Path
) -> None:
    with pytest.raises(PowerCutError):
        fit(images, tmp_path / "run", settings=SETTINGS, observer=Crash("batch", 4))
    assert json.loads((tmp_path / "run" / "checkpoints" / "tree" / "state.json").read_text())["epoch"] == 1
    assert "tree (1 epochs)" in describe_progress(tmp_path / "run")
    with pytest.raises(CheckpointError, match="seed"):
        fit(images, tmp_path / "run", settings=SETTINGS | {"seed": 5}, resume=True)
    fit(images, tmp_path / "run", settings=SETTINGS, resume=True)
    assert_same(tensors(finished.folder), tensors(tmp_path / "run"))


def test_a_pretrained_backbone_and_a_cache_while_it_is_frozen(images: Path, tmp_path: Path) -> None:
    settings = TINY | {"cache_views": 2, "pretrain_epochs": 1, "epochs": 2}
    run = fit(images, tmp_path / "run", settings=settings, stages=["train"])
    assert (run.folder / "checkpoints" / "backbone" / "state.json").exists()
    (name,) = files_used(run.folder)
    assert [path.name for path in (tmp_path / FOLDER).glob("*.f16")] == [name]


def test_images_from_python_are_learned_from_and_found_again(images: Path, tmp_path: Path) -> None:
    paths = sorted(images.rglob("*.png"))
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths])
    labels = [path.parent.name for path in paths]
    runs = [
        fit((pixels, labels), tmp_path / name, settings=TINY | {"epochs": 1}, stages=["train"]) for name in ("a", "b")
    ]
    assert runs[0].tree().class_names == ("blue", "green", "red")
    data = Run.open(runs[0].folder).data()
    assert len(data.train) + len(data.test) == len(paths)
    assert Path(runs[0].source).is_relative_to(tmp_path / "prototree-data")
    assert runs[0].source == runs[1].source, "the images are written once"
    assert_same(tensors(runs[0].folder), tensors(runs[1].folder))
