"""Contract 7: two processes with the same global batch are one process, leaves and batch norm included."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from prototree.data.loading import Shard
from prototree.errors import TrainError
from prototree.features.registry import shared_folder
from prototree.training import distributed
from tiny_training import write_squares

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]


Result = tuple[dict[str, Any], dict[str, torch.Tensor]]


def with_processes(counts: Sequence[int], script: str, photos: Path, out: Path, *words: str) -> list[Result]:
    """What a script found, alone and with others."""
    run(HERE / "forked_processes.py", HERE / script, photos, out, ",".join(map(str, counts)), *words)
    return [found_in(out / str(count)) for count in counts]


def with_torchrun(script: str, photos: Path, out: Path) -> Result:
    """The same for two processes, started as people start them."""
    out.mkdir()
    run("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", HERE / script, photos, out)
    return found_in(out)


def run(*words: object) -> None:
    path = os.pathsep.join([str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "error::FutureWarning"}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def found_in(out: Path) -> Result:
    return json.loads((out / "found.json").read_text()), safetensors.torch.load_file(out / "tree.safetensors")


def test_two_processes_are_one(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "photos")
    (one, weights), (two, weights_of_two) = with_processes((1, 2), "two_processes.py", photos, tmp_path)
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for name in weights:
        torch.testing.assert_close(weights_of_two[name], weights[name], atol=1e-5, rtol=1e-5, msg=name)
    assert not torch.equal(weights["features.backbone.net.bn1.running_mean"], torch.zeros(64)), "the trunk was trained"
    for metrics in (one["metrics"], two["metrics"]):  # sums of floats; everything else is exact
        for name in ("ece", "confidence_ece", "mean_confidence"):
            metrics[name] = round(metrics[name], 5)
        metrics["leaf_max_probs"] = [round(value, 5) for value in metrics["leaf_max_probs"]]
    assert two == one
    assert one["mistakes"], "nothing was compared"


@pytest.mark.parametrize("question", ["pairwise", "presence"])
def test_two_processes_are_one_with_the_default_recipe(tmp_path: Path, question: str) -> None:
    photos = write_squares(tmp_path / "photos", train=14)
    broken = photos / "train" / "red" / "3.png"
    broken.write_bytes(broken.read_bytes()[:2000])  # its head is whole, so that it is found out while training
    processes = (1, 2, 3) if question == "pairwise" else (1, 2)
    (one, weights), *others = with_processes(processes, "two_processes_distill.py", photos, tmp_path, question)
    assert one.pop("processes") == 1
    assert one["unreadable"] == 3
    assert one["confidence"][2] >= 20, "the second tree was trained too"
    caches = [{f.name: f.read_bytes() for f in shared_folder(tmp_path / str(n) / "run").iterdir()} for n in processes]
    assert len(caches[0]) == 10, "sources and hidden places at two looks, and varied views, each with its description"
    for n_processes, (several, weights_of_several), cache in zip(processes[1:], others, caches[1:], strict=True):
        assert several.pop("processes") == n_processes
        assert several.pop("confidence") == pytest.approx(one["confidence"], rel=1e-5, abs=1e-5)
        assert several == {key: value for key, value in one.items() if key != "confidence"}
        assert cache == caches[0], "bit for bit"
        for name in weights:
            torch.testing.assert_close(weights_of_several[name], weights[name], atol=1e-5, rtol=1e-5, msg=name)


def test_processes_exchange_the_counts_that_a_batch_touched(tmp_path: Path) -> None:
    script = "two_processes_leaves.py"
    ((one, alone),) = with_processes([1], script, tmp_path, tmp_path)
    two, together = with_torchrun(script, tmp_path, tmp_path / "2")
    torch.testing.assert_close(together["leaf_logits"], alone["leaf_logits"], atol=1e-12, rtol=1e-12)
    n_leaves, n_classes = alone["leaf_logits"].shape
    few, single, all_classes = two["traffic"]
    assert few <= 3 * n_leaves + 10, "three of six images each, and how many classes they are"
    assert single <= n_leaves + 10
    assert all_classes <= n_leaves * n_classes + 10, "never more than the whole matrix"
    assert sum(one["traffic"]) == 0


def test_a_process_whose_partner_died_says_so(tmp_path: Path) -> None:
    run(HERE / "forked_processes.py", HERE / "two_processes_lost.py", tmp_path, tmp_path, "2")
    assert "process 1 of 2" in json.loads((tmp_path / "2" / "found.json").read_text())["error"]


def test_other_errors_among_processes_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**PLACE, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "_number", lambda name, otherwise: {"WORLD_SIZE": 2}.get(name, otherwise))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda backend: None)
    with pytest.raises(RuntimeError, match="out of memory") as raised, distributed.processes():
        raise RuntimeError("out of memory")
    assert not isinstance(raised.value, TrainError)


PLACE = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "not RANK; start them with torchrun"),
        ({"WORLD_SIZE": "two"}, "a whole number in"),
        ({"LOCAL_RANK": ""}, "a whole number in"),
        (PLACE | {"RANK": "abc"}, "whole number in the environment variable RANK, got 'abc'"),
        (PLACE | {"MASTER_PORT": "abc"}, "whole number in the environment variable MASTER_PORT"),
        (PLACE | {"RANK": "2"}, "expected a RANK below WORLD_SIZE in the environment, got 2 and 2"),
        (PLACE | {"WORLD_SIZE": "0"}, "expected a RANK below WORLD_SIZE in the environment, got 0 and 0"),
    ],
)
def test_an_odd_environment_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainError, match=said):
        distributed.processes().__enter__()


def test_alone_everything_is_a_no_op() -> None:
    tensor = torch.arange(3)
    assert distributed.shard() == Shard(0, 1)
    assert distributed.is_first()
    assert torch.equal(distributed.sum_over(tensor), torch.arange(3))
    assert [t.tolist() for t in distributed.gather(tensor)] == [[0, 1, 2]]
    assert distributed.any_process(True)
    assert not distributed.any_process(False)
    distributed.wait_for_all()
    layer = torch.nn.BatchNorm2d(2)
    assert distributed.synchronise_batch_norm(layer) is layer
    with distributed.processes() as device:
        assert device.type in ("cpu", "cuda")
