"""Run by `test_distributed` alone and with others: a small training, projection and evaluation."""

import json
import sys
from functools import partial
from pathlib import Path

import safetensors.torch
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.ensemble import Ensemble
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import open_data
from prototree.data.loading import ViewDataset
from prototree.data.transforms import augmentation
from prototree.data.views import evaluation_views, training_views
from prototree.evaluation.ensembles import ensemble_metrics
from prototree.evaluation.errors import ErrorCollector
from prototree.evaluation.metrics import evaluate
from prototree.features.batches import PhotoBatches, maps_of
from prototree.features.cache import cache_borders
from prototree.training import distributed
from prototree.training.loop import Options
from prototree.training.objectives import Schedule, TreeObjective, train
from prototree.training.projection import project


def main(photos: Path, out: Path) -> None:
    torch.set_num_threads(1)
    data = open_data(photos)
    with distributed.processes() as device:
        torch.manual_seed(0)
        # In float64, so that what differs is wrong and not rounding.
        features = FeatureExtractor(Backbone("resnet18", None, image_size=32, feature_level=-2), 8)
        tree = ProtoTree(Topology.full(3), features, data.class_names).double()
        views, preprocessing = partial(training_views, kind=data.kind), tree.preprocessing
        dataset = ViewDataset(data.train, views, preprocessing, transform=augmentation("light", preprocessing))
        batches = Doubles(dataset, 7, shuffle=True)  # 24 photos: the last batch has 3, shared out as 1 and 2
        schedule = Schedule(3, freeze_epochs=1, lr_prototypes=1e-3, lr_backbone=1e-4)
        train(TreeObjective(tree, batches, schedule), batches, 3, Options(device=device))
        plain = Doubles(ViewDataset(data.train, evaluation_views, preprocessing), 7, shuffle=False)
        projected = project(tree, maps_of(plain, tree.features))
        test = Doubles(ViewDataset(data.test, evaluation_views, preprocessing), 7, shuffle=False)
        finder = ErrorCollector(projected.tree)
        metrics = evaluate(projected.tree, finder.watch(maps_of(test, tree.features)))
        finder.gather()
        photos_once = ((one.values.double(), one.labels) for one in test.epoch(0))
        votes = ensemble_metrics(Ensemble([tree, projected.tree]), photos_once)
        cache = cache_borders(Backbone("resnet18", None, image_size=32).float(), dataset, out / "cache", variants=2)
        if distributed.is_first():
            safetensors.torch.save_file(
                {k: v.contiguous() for k, v in tree.state_dict().items()}, out / "tree.safetensors"
            )
            found = {
                "place": projected.nearest.place.tolist(),
                "patch": projected.nearest.patch.tolist(),
                "metrics": metrics.to_json(),
                "votes": votes.to_json(),
                "mistakes": [(m.place, m.label, m.answer, m.node, m.goes_right) for m in finder.mistakes],
                "cached": len(cache.entries) - len(cache.unreadable),
                "processes": distributed.shard().world_size,
            }
            (out / "found.json").write_text(json.dumps(found))


class Doubles(PhotoBatches):
    def encode(self, features: FeatureExtractor, values: torch.Tensor) -> torch.Tensor:
        return features(values.double())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
