"""The plain classifier beside the tree: what reading the features as a tree costs."""

from collections.abc import Iterator

import torch

from prototree.backbones.backbone import FeatureExtractor
from prototree.features.batches import Batches, CachedBatches
from prototree.features.cache import MapBatch
from prototree.training import distributed
from prototree.training.baseline import Baseline


class ClassifierAccuracy:
    """Measures a classifier on the backbone's maps in the same pass as the tree; does nothing without a classifier."""

    def __init__(self, baseline: Baseline | None) -> None:
        self._baseline = baseline
        self._counts = torch.zeros(2, dtype=torch.long)  # right answers, photos

    @torch.inference_mode()
    def watch(self, batches: Batches, features: FeatureExtractor, device: torch.device) -> Iterator[MapBatch]:
        """Every photo once through the backbone; gives the tree's feature maps with labels and places."""
        features.eval()
        for inputs in batches.epoch(0):
            if len(inputs.labels):
                labels = inputs.labels.to(device)
                values = inputs.values.to(device)
                is_cached = isinstance(batches, CachedBatches)
                backbone_map = features.backbone.tail(values) if is_cached else features.backbone(values)
                if self._baseline is not None:
                    right = self._baseline(backbone_map).argmax(dim=1) == labels
                    self._counts += torch.tensor([int(right.sum()), len(labels)])
                yield features.from_map(backbone_map).clone(), labels, inputs.entries.to(device)

    def accuracy(self) -> float | None:
        """Over the photos of all processes; None where there is no classifier."""
        right, photos = torch.cat(distributed.gather(self._counts[None])).sum(dim=0).tolist()
        return right / photos if self._baseline is not None and photos else None
