"""Contract 7: two processes with the same global batch are one process, leaves and batch norm included."""

import json
import subprocess
import sys
from pathlib import Path

import safetensors.torch
import torch

from prototree.data.loading import Shard
from prototree.training import distributed
from tiny_training import write_squares

SCRIPT = Path(__file__).parent / "two_processes.py"


def test_two_processes_are_one(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "photos")
    results = []
    for n_processes in (1, 2):
        out = tmp_path / str(n_processes)
        out.mkdir()
        launcher = [sys.executable]
        if n_processes > 1:
            launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={n_processes}", "--standalone"]
        done = subprocess.run(
            [*launcher, str(SCRIPT), str(photos), str(out)], capture_output=True, text=True, timeout=3600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(
            (json.loads((out / "found.json").read_text()), safetensors.torch.load_file(out / "tree.safetensors"))
        )
    (one, weights), (two, weights_of_two) = results
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for name in weights:
        torch.testing.assert_close(weights_of_two[name], weights[name], atol=1e-5, rtol=1e-5, msg=name)
    assert not torch.equal(weights["features.backbone.net.bn1.running_mean"], torch.zeros(64)), "the trunk was trained"
    for metrics in (one["metrics"], two["metrics"]):  # sums of floats; everything else is exact
        for name in ("calibration_error", "sureness_error", "mean_sureness"):
            metrics[name] = round(metrics[name], 5)
        metrics["leaf_maxima"] = [round(value, 5) for value in metrics["leaf_maxima"]]
    assert two == one
    assert one["mistakes"], "nothing was compared"


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
