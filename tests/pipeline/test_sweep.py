"""Several runs of the same data: side by side as one after the other, with one cache of maps between them."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from killed_runs import options
from prototree.core import checkpoint
from prototree.data import open_data
from prototree.errors import ConfigError, DataError, TrainError
from prototree.features.cache import FOLDER, USED, files_used, shared_folder
from prototree.pipeline.fit import fit
from prototree.pipeline.share import clean
from prototree.pipeline.sweep import allocate, cross_validate, fit_seeds, fold_table
from prototree.run import Run
from tiny_training import TINY, TINY_DISTILL, save_weights, write_squares

FEW = TINY | {"epochs": 1, "prune_threshold": 0.34}
QUICK = {"pretrain_epochs": 0, "head_epochs": 2, "epochs": 2, "calibration_fraction": 0.0, "prune_threshold": 0.34}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("several") / "squares", train=4, test=2)


def tensors(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.load(run.folder / "trained").state_dict()


@pytest.mark.slow
def test_side_by_side_and_one_after_the_other_give_the_same_bits(images: Path, tmp_path: Path) -> None:
    # One thread each in both; no weights, so that the network, too, is another for each seed.
    both = [
        fit_seeds(images, tmp_path / str(jobs), seeds=2, settings=FEW | {"seed": 3}, jobs=jobs, threads=1)
        for jobs in (1, 2)
    ]
    for run, other in zip(both[0].runs, both[1].runs, strict=True):
        assert run.folder.name == other.folder.name
        weights, other_weights = tensors(run), tensors(other)
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert not torch.equal(*(tensors(run)["prototypes"] for run in both[0].runs))
    assert [row[0] for row in both[0].table.rows][:2] == ["seed-3", "seed-4"]
    before = (both[0].runs[0].folder / "results.md").stat().st_mtime_ns
    fit_seeds(images, tmp_path / "1", seeds=2, settings=FEW | {"seed": 3}, resume=True)
    assert (both[0].runs[0].folder / "results.md").stat().st_mtime_ns == before, "what is done stays"


def test_folds_share_their_maps_and_are_judged_together(images: Path, tmp_path: Path) -> None:
    weights = save_weights(tmp_path / "w.safetensors")  # the same network for all
    result = cross_validate(images, tmp_path / "folds", folds=2, settings=TINY_DISTILL | QUICK | {"weights": weights})
    used = [files_used(run.folder) for run in result.runs]
    assert used[0] == used[1]
    assert {path.name for path in shared_folder(result.runs[0].folder).glob("*.f16")} == set(used[0])
    assert [run.metrics["data"]["test"] for run in result.runs] == [9, 9]
    for log in (tmp_path / "folds").glob("*.log"):
        assert "computing feature maps" not in log.read_text(), "the maps are computed first, with all cores"
    tested = [{sample.path for sample in run.data().test} for run in result.runs]
    assert len(set.union(*tested)) == 18, "every image is judged once"
    assert result.runs[1].config.fold == "2/2"
    sources = [source.image for source in result.runs[0].tree().sources if source]
    assert not {images / image for image in sources} & tested[0], "no prototype is a patch of a test photo"


def test_the_table_of_folds_by_hand() -> None:
    def metrics(soft: float, prototypes: int) -> dict[str, object]:
        accuracy = {"soft": soft, "max_path": 0.5, "greedy": 0.5}
        lengths = {"greedy": {"mean": 2.0}}
        return {"accuracy": accuracy, "n_prototypes": prototypes, "n_images": 10, "path_length": lengths}

    rows = fold_table([metrics(0.5, 4), metrics(0.7, 6), metrics(0.9, 8)], [0.6, None, 0.9]).rows
    assert rows[0] == ("1", "10", "50.0 %", "50.0 %", "50.0 %", "4.0", "2.0", "10.0 + 0.0")
    assert rows[1][-1] == "–"
    assert rows[3][1:] == ("30", "70.0 % ± 20.0", "50.0 % ± 0.0", "50.0 % ± 0.0", "6.0 ± 2.0", "2.0 ± 0.0", "–")


def test_what_makes_no_sense_is_refused(images: Path, tmp_path: Path) -> None:
    for work in (
        lambda: fit_seeds(images, tmp_path, seeds=1),
        lambda: cross_validate(images, tmp_path, folds=1),
        lambda: cross_validate(images, tmp_path, folds=2, settings={"fold": "1/2"}),
        lambda: fit_seeds(open_data(images), tmp_path / "x", seeds=2),  # no data that other processes can open
    ):
        with pytest.raises(ConfigError):
            work()
    with pytest.raises(DataError, match="nowhere"):
        fit_seeds("nowhere", tmp_path / "y", seeds=2, jobs=1, threads=1)
    for name in ("config.toml", "trained/tree.json"):  # a run that stands in the way
        (tmp_path / "z" / "seed-0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "z" / "seed-0" / name).write_text("")
    with pytest.raises(TrainError, match=r"seed-0\.log"):
        fit_seeds(images, tmp_path / "z", seeds=2, settings=FEW, jobs=1, threads=1)
    assert [allocate(5, jobs=2)[0], allocate(2, jobs=9, threads=1)] == [2, (2, 1)]


def test_runs_beside_each_other_share_maps_and_cleaning_spares_those_of_others(images: Path, tmp_path: Path) -> None:
    settings = FEW | {"cache_views": 1, "pretrain_epochs": 0}
    first, second = (fit(images, tmp_path / name, settings=settings) for name in ("a", "b"))
    (name,) = files_used(first.folder)
    assert files_used(second.folder) == [name], "the same network and images"
    file = tmp_path / FOLDER / name
    size = file.stat().st_size
    assert not any(freed.path == file for freed in clean(first))
    assert file.exists(), "the other run uses it"
    (second.folder / USED).unlink()
    assert any(freed.path == file and freed.n_bytes == size for freed in clean(first))
    assert not file.exists()


@pytest.mark.slow
def test_stopping_several_stops_all_of_them_with_their_states_saved(images: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prototree", "train", str(images), "--out", str(tmp_path / "out"), "--seeds", "2"]
    command += ["--jobs", "2", "--threads", "1", *options(FEW | {"epochs": 1000})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    folders = [tmp_path / "out" / f"seed-{seed}" for seed in (0, 1)]
    deadline = time.monotonic() + 3600
    while time.monotonic() < deadline and process.poll() is None:
        if all((folder / "checkpoints" / "tree" / "state.json").exists() for folder in folders):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=3600)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    for folder in folders:
        assert (folder / "checkpoints" / "tree" / "state.json").exists()
        assert f"kept in {folder}: tree (" in " ".join(folder.with_suffix(".log").read_text().split())
