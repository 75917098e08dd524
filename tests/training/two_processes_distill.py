"""Run by `test_distributed` alone and with others: the default recipe on tiny photos, but for the frozen network in
float64, so that what differs is wrong and not rounding."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch

from prototree.config import preset
from prototree.data import open_data
from prototree.features.cache import Inputs, MapCache
from prototree.progress import Observer
from prototree.training import distributed
from prototree.training.anchored import FEWEST_OF_HEAD
from prototree.training.baseline import load_baseline
from prototree.training.recipes.distill import Distill
from prototree.training.workshop import Workshop
from tiny_training import TINY_DISTILL

# 126 entries: the last batch has one, which one process alone gets. 64 patches, of which a step sees 60.
SETTINGS = TINY_DISTILL | {"backbone": "test_efficientnet", "image_size": 64, "feature_level": -3, "batch_size": 25}


def main(photos: Path, out: Path, question: str) -> None:
    torch.set_num_threads(1)
    data = open_data(photos)
    chosen = {"pretrain_epochs": 0, "head_epochs": 3, "epochs": 4, "hold_out": 2, "question": question}
    if question == "presence":  # one of the two keeps its teacher's answers in a file
        chosen |= {"memory": 0.0}
    config = preset("default").changed(SETTINGS | chosen)
    recipe = config.recipe.derived(data)
    assert isinstance(recipe, Distill)
    with distributed.processes() as device:
        workshop = Workshop(out / "run", data, config, device, Observer())
        torch.manual_seed(0)
        backbone = recipe._backbone(workshop)
        maps = recipe._maps(workshop, backbone, recipe._looks())
        torch.set_default_dtype(torch.float64)
        MapCache.read = _read_as_doubles(MapCache.read)  # type: ignore[method-assign]
        tree = recipe._learn(workshop, backbone, maps, "")
        tree = recipe._how_sure(workshop, backbone, maps, recipe._held(maps)).taught(tree)
        classifier = load_baseline(tree.features, tree.n_classes, out / "run")
        assert classifier is not None
        assert maps.plain.read([0], 0).values[0, 0].numel() > FEWEST_OF_HEAD, "patches are chosen"
        if distributed.is_first():
            tensors = {**tree.state_dict(), **{f"classifier.{k}": v for k, v in classifier.state_dict().items()}}
            safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, out / "tree.safetensors")
            found = {
                "processes": distributed.shard().world_size,
                "topology": [tree.topology.left.tolist(), tree.topology.right.tolist()],
                "confidence": [*dataclasses.astuple(tree.calibration), tree.question.sharpness],
                "unreadable": len(maps.every.unreadable),
            }
            (out / "found.json").write_text(json.dumps(found))


def _read_as_doubles(read):
    def read_as_doubles(self: MapCache, indices: Sequence[int], epoch: int) -> Inputs:
        inputs = read(self, indices, epoch)
        return dataclasses.replace(inputs, values=inputs.values.double())

    return read_as_doubles


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
