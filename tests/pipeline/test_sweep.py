"""Several runs of the same data: side by side as one after the other, with one cache of maps between them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from prototree.config import preset
from prototree.core import checkpoint
from prototree.data import open_data
from prototree.errors import ConfigError, DataError, TrainError
from prototree.features.cache import MapCache
from prototree.features.registry import OWN_CACHE, USED, maps_used, shared_folder
from prototree.pipeline.fit import fit
from prototree.pipeline.share import clean
from prototree.pipeline.sweep import Machine, cross_validate, fit_seeds, fold_table
from prototree.run import Run
from tiny_training import NETWORK, TINY, TINY_DISTILL, write_squares

DISTILL = TINY_DISTILL | {"pretrain_epochs": 0, "head_epochs": 2, "epochs": 2, "hold_out": 0, "threshold": 0.34}
FEW = TINY | {"epochs": 1, "threshold": 0.34}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("several") / "squares", train=4, test=2)


def tensors(run: Run) -> dict[str, torch.Tensor]:
    return checkpoint.load(run.folder / "trained").state_dict()


@pytest.mark.slow
def test_side_by_side_and_one_after_the_other_give_the_same_bits(photos: Path, tmp_path: Path) -> None:
    # One thread each in both; no weights, so that the network, too, is another for each seed.
    both = [
        fit_seeds(photos, tmp_path / str(jobs), seeds=2, settings=FEW | {"seed": 3}, machine=Machine(jobs, threads=1))
        for jobs in (1, 2)
    ]
    for one, other in zip(both[0].runs, both[1].runs, strict=True):
        assert one.folder.name == other.folder.name
        expected, found = tensors(one), tensors(other)
        assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [run.folder.name for run in both[0].runs] == ["seed-3", "seed-4"]
    assert not torch.equal(*(tensors(run)["prototypes"] for run in both[0].runs))
    assert [row[0] for row in both[0].table.rows] == ["seed-3", "seed-4", "the first 2 together"]
    assert "the first 2 together" in (tmp_path / "1" / "results.md").read_text()
    before = (both[0].runs[0].folder / "results.md").stat().st_mtime_ns
    fit_seeds(photos, tmp_path / "1", seeds=2, settings=FEW | {"seed": 3}, resume=True)
    assert (both[0].runs[0].folder / "results.md").stat().st_mtime_ns == before, "what is done stays"
    with pytest.raises(TrainError, match=r"seed-3 failed: .*already holds a run"):
        fit_seeds(photos, tmp_path / "1", seeds=2, settings=FEW | {"seed": 3})


def test_folds_share_their_maps_and_are_judged_together(photos: Path, tmp_path: Path) -> None:
    # The same random network for all, as pretrained weights would be.
    torch.manual_seed(0)
    from safetensors.torch import save_file

    from prototree.backbones.backbone import Backbone

    state = Backbone(NETWORK, None, image_size=32).net.state_dict()
    save_file({name: one.contiguous() for name, one in state.items()}, tmp_path / "w.safetensors")
    settings = DISTILL | {"weights": str(tmp_path / "w.safetensors")}
    found = cross_validate(photos, tmp_path / "folds", folds=2, settings=settings)
    used = [maps_used(run.folder) for run in found.runs]
    assert used[0] == used[1]
    assert {path.name for path in shared_folder(found.runs[0].folder).glob("*.f16")} == set(used[0])
    assert [run.metrics["data"]["test"] for run in found.runs] == [9, 9]
    for log in (tmp_path / "folds").glob("*.log"):
        assert "have been computed before" in log.read_text(), "the maps are computed first, with all cores"
        assert "computing feature maps" not in log.read_text()
    assert not list((tmp_path / "folds").glob("preparing*"))
    tested = [{sample.path for sample in run.data().test} for run in found.runs]
    assert len(set.union(*tested)) == 18, "every photo is judged once"
    assert found.table.rows[-1][0] == "mean ± standard deviation"
    assert found.runs[1].config.fold == "2/2"
    sources = [source.image for source in found.runs[0].tree().sources if source]
    assert not {photos / image for image in sources} & tested[0], "no prototype is a patch of a test photo"


def test_the_table_of_folds_by_hand() -> None:
    def metrics(soft: float, prototypes: int) -> dict[str, object]:
        accuracy = {"soft": soft, "max_path": 0.5, "greedy": 0.5}
        lengths = {"greedy": {"mean": 2.0}}
        return {"accuracy": accuracy, "n_prototypes": prototypes, "n_images": 10, "path_length": lengths}

    rows = fold_table([metrics(0.5, 4), metrics(0.7, 6), metrics(0.9, 8)]).rows
    assert rows[0] == ("1", "10", "50.0 %", "50.0 %", "50.0 %", "4.0", "2.0")
    assert rows[3][1:] == ("30", "70.0 % ± 20.0", "50.0 % ± 0.0", "50.0 % ± 0.0", "6.0 ± 2.0", "2.0 ± 0.0")


def test_what_makes_no_sense_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected at least 2 seeds"):
        fit_seeds(photos, tmp_path, seeds=1)
    with pytest.raises(ConfigError, match="expected at least 2 folds"):
        cross_validate(photos, tmp_path, folds=1)
    with pytest.raises(ConfigError, match="expected either all folds or the one named 1/2"):
        cross_validate(photos, tmp_path, folds=2, settings={"fold": "1/2"})
    with pytest.raises(ConfigError, match="expected data that other processes can open"):
        fit_seeds(open_data(photos), tmp_path / "x", seeds=2)
    with pytest.raises(DataError, match="nowhere does not exist"):
        fit_seeds("nowhere", tmp_path / "y", seeds=2, machine=Machine(1, 1))
    (tmp_path / "z" / "seed-0").mkdir(parents=True)
    (tmp_path / "z" / "seed-0" / "config.toml").write_text("")
    with pytest.raises(TrainError, match=r"seed-0 failed: .*already holds a run.*seed-0\.log"):
        fit_seeds(photos, tmp_path / "z", seeds=2, settings=FEW, machine=Machine(1, 1))
    assert [Machine(jobs=2).shared_out(5)[0], Machine(jobs=9, threads=1).shared_out(2)] == [2, (2, 1)]


def test_runs_beside_each_other_share_maps_and_tidying_spares_those_of_others(photos: Path, tmp_path: Path) -> None:
    settings = FEW | {"cache_views": 1, "pretrain_epochs": 0}
    first, second = (fit(photos, tmp_path / name, settings=settings) for name in ("a", "b"))
    (name,) = maps_used(first.folder)
    assert maps_used(second.folder) == [name], "the same network and photos"
    file = tmp_path / "prototree-maps" / name
    size = file.stat().st_size
    assert not any(one.path == file for one in clean(first))
    assert file.exists(), "the other run uses it"
    (second.folder / USED).unlink()
    assert any(one.path == file and one.n_bytes == size for one in clean(first))
    assert not file.exists()


def test_a_run_of_an_earlier_version_goes_on_with_its_own_maps(photos: Path, tmp_path: Path) -> None:
    settings = FEW | {"cache_views": 1}
    run = fit(photos, tmp_path / "a", settings=settings, stages=["train"])
    (tmp_path / "prototree-maps").rename(run.folder / OWN_CACHE)
    (run.folder / USED).unlink()
    # A setting that it did not know:
    lines = (run.folder / "config.toml").read_text().splitlines()
    (run.folder / "config.toml").write_text("\n".join(line for line in lines if not line.startswith("fold")))
    fit(photos, run.folder, settings=settings, resume=True)
    assert not (tmp_path / "prototree-maps").exists()
    assert "fold" not in preset("default").identity()


def test_where_nothing_may_be_written_beside_a_run_it_keeps_its_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_folder(tmp_path / "run") == tmp_path.resolve() / "prototree-maps"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert shared_folder(tmp_path / "run") == tmp_path / "run" / OWN_CACHE


def test_maps_of_maps() -> None:
    import numpy as np

    from prototree.data.dataset import Sample
    from prototree.data.loading import Entry
    from prototree.data.views import FULL

    def cache(first: int, count: int, unreadable: frozenset[int] = frozenset()) -> MapCache:
        numbers = np.arange(first, first + count, dtype=np.float16).reshape(1, count, 1, 1, 1)
        entries = tuple(Entry(i, Sample(Path(f"{first + i}.png"), 0), FULL) for i in range(count))
        return MapCache((numbers,), entries, unreadable)

    some = cache(0, 5, frozenset({3})).only([4, 3, 1])
    joined = some.join(cache(10, 3).only([2, 0]))
    assert joined.read(range(5), 0).values.flatten().tolist() == [4, 1, 12, 10]
    assert joined.only([3, 0]).read([0, 1], 0).values.flatten().tolist() == [12, 4]
    assert [entry.sample.path.name for entry in joined.entries] == ["4.png", "3.png", "1.png", "12.png", "10.png"]


@pytest.mark.slow
def test_stopping_several_stops_all_of_them_with_their_states_saved(photos: Path, tmp_path: Path) -> None:
    options = [
        word for key, value in (FEW | {"epochs": 1000}).items() for word in (f"--{key.replace('_', '-')}", str(value))
    ]
    command = [sys.executable, "-m", "prototree", "train", str(photos), "--out", str(tmp_path / "out"), "--seeds", "2"]
    process = subprocess.Popen(
        [*command, "--jobs", "2", "--threads", "1", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    logs = [tmp_path / "out" / f"seed-{seed}" / "log.csv" for seed in (0, 1)]
    deadline = time.monotonic() + 3600
    while time.monotonic() < deadline and not all(log.exists() for log in logs) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=3600)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    for seed in (0, 1):
        folder = tmp_path / "out" / f"seed-{seed}"
        assert (folder / "last" / "state.json").exists()
        assert f"kept in {folder}: last (" in " ".join(folder.with_suffix(".log").read_text().split())
