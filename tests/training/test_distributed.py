"""Distributed data parallel: two processes with the same global batch are one process, leaves included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from prototree.data.loader import Shard
from prototree.errors import TrainError
from prototree.training import distributed
from tiny_training import write_squares

SCRIPT = Path(__file__).parent / "two_processes.py"


def run(scenario: str, images: Path, out: Path, counts: str) -> None:
    path = os.pathsep.join([str(SCRIPT.parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "error::FutureWarning"}
    command = [sys.executable, str(SCRIPT), scenario, str(images), str(out), counts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_close(out: Path, file: str, tolerance: float) -> None:
    one, two = (safetensors.torch.load_file(out / count / file) for count in "12")
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=tolerance, rtol=tolerance, msg=f"{file} {name}")


SLOW = [pytest.param(leaf_update, marks=pytest.mark.slow) for leaf_update in ("two_pass", "gradient")]


@pytest.mark.parametrize("leaf_update", ["interleaved", *SLOW])
def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf_update: str) -> None:
    monkeypatch.setenv("LEAVES", leaf_update)
    run("train_paper", write_squares(tmp_path / "images"), tmp_path, "1,2")
    assert_close(tmp_path, "run/trained/weights.safetensors", 1e-5)
    logs = [(tmp_path / count / "run" / "log.csv").read_text().count("\n") for count in "12"]
    assert logs == [3, 3], "one process writes"


def test_the_main_process_does_all_but_gradient_descent_on_images(tmp_path: Path) -> None:
    run("train_distill", write_squares(tmp_path / "images", train=4, test=2), tmp_path, "1,2")
    assert_close(tmp_path, "run/projected/weights.safetensors", 0.0)
    results = [json.loads((tmp_path / path).read_text()) for path in ("1/0.json", "2/0.json", "2/1.json")]
    assert results[0] == results[1] == results[2]


def test_a_process_whose_partner_died_says_so(tmp_path: Path) -> None:
    run("lose_partner", tmp_path, tmp_path, "2")
    assert "process 1 of 2" in json.loads((tmp_path / "2" / "0.json").read_text())["error"]


PLACE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "token"),
    [
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        (PLACE | {"RANK": "abc"}, "RANK"),
        (PLACE | {"MASTER_PORT": "abc"}, "MASTER_PORT"),
        (PLACE | {"RANK": "2"}, "RANK"),
        (PLACE | {"WORLD_SIZE": "0"}, "RANK"),
    ],
)
def test_an_odd_environment_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], token: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match=token):
        distributed.process_group().__enter__()


def test_other_errors_among_processes_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend, timeout: None)
    with pytest.raises(RuntimeError, match="out of memory") as raised, distributed.process_group():
        raise RuntimeError("out of memory")
    assert not isinstance(raised.value, TrainError)


def test_alone_everything_is_a_no_op() -> None:
    layer = torch.nn.BatchNorm2d(2)
    layer.weight.grad = torch.ones(2)
    assert distributed.shard() == Shard(0, 1)
    assert distributed.is_main()
    assert distributed.all_reduce_sum(torch.arange(3)).tolist() == [0, 1, 2]
    distributed.barrier()
    distributed.average_gradients(layer.parameters())
    assert layer.weight.grad.tolist() == [1, 1]
    assert distributed.convert_sync_bn(layer) is layer
    with distributed.process_group() as device, distributed.main_process_only() as is_main, distributed.main_first():
        assert device.type in ("cpu", "cuda")
        assert is_main
