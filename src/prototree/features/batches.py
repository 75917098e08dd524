"""Batches to train on and to look at: photos through the whole network, or cached maps through the rest of it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from prototree.backbones.backbone import FeatureExtractor
from prototree.backbones.inference import frozen_features
from prototree.data.loading import BatchOrder, Entry, ViewDataset, make_loader
from prototree.features.cache import Inputs, MapBatch, MapCache, kept_borders
from prototree.training import distributed

_PHOTOS_AT_ONCE = 32


@runtime_checkable
class Batches(Protocol):
    """Batches for training, the same for the same seed and epoch; in several processes, this one's share of each."""

    @property
    def n_batches(self) -> int: ...
    @property
    def entries(self) -> Sequence[Entry]: ...
    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        """The batches of one epoch, from batch `start` on."""

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        """Inputs to feature maps."""


class PhotoBatches:
    """Photos through the whole network."""

    def __init__(
        self, dataset: ViewDataset, batch_size: int, *, shuffle: bool, workers: int = 0, strict: bool = False
    ) -> None:
        self._loader = make_loader(
            dataset, batch_size, shuffle=shuffle, shard=distributed.shard(), workers=workers, strict=strict
        )
        self.entries: Sequence[Entry] = dataset.entries

    @property
    def n_batches(self) -> int:
        return len(self._loader)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for batch in self._loader.epoch(epoch, start=start):
            yield Inputs(batch.images, batch.labels, batch.entries)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return features(values)  # type: ignore[no-any-return]


class CachedBatches:
    """Borders from a cache through the tail. Epoch e uses the photos as augmented in epoch e mod V."""

    def __init__(self, cache: MapCache, batch_size: int, *, shuffle: bool, seed: int = 0) -> None:
        self._cache = cache
        n_items = len(cache.entries)
        self._n_batches = -(-n_items // batch_size)
        shuffle_seed = seed if shuffle else None
        self._order = BatchOrder(n_items, batch_size, shuffle_seed=shuffle_seed, shard=distributed.shard())
        self.entries: Sequence[Entry] = cache.entries

    @property
    def n_batches(self) -> int:
        return self._n_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        for positions in self._order.positions(epoch, start):
            yield self._cache.read([index for _, index in positions], epoch)

    def inputs(self, indices: Sequence[int], epoch: int = 0) -> Inputs:
        """The borders of some entries."""
        return self._cache.read(indices, epoch)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return features.from_border(values)


class PhasedBatches:
    """One kind of batches until an epoch, another from then on: borders while the trunk is frozen, photos after."""

    def __init__(self, first: Batches, then: Batches, switch: int) -> None:
        assert first.n_batches == then.n_batches
        self._first, self._then, self._switch = first, then, switch
        self._current = first
        self.entries: Sequence[Entry] = first.entries

    @property
    def n_batches(self) -> int:
        return self._first.n_batches

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Inputs]:
        self._current = self._first if epoch < self._switch else self._then
        return self._current.epoch(epoch, start)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return self._current.encode(features, values)


class FrozenBatches(PhotoBatches):
    """Photos through a network that does not learn, run by an engine."""

    def __init__(self, dataset: ViewDataset, features: FeatureExtractor, *, workers: int = 0) -> None:
        super().__init__(dataset, _PHOTOS_AT_ONCE, shuffle=False, workers=workers)
        self._frozen = frozen_features(features)

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return self._frozen(values)


class KeptBatches(CachedBatches):
    """Kept maps of a whole backbone."""

    def encode(self, features: FeatureExtractor, values: Tensor) -> Float[Tensor, "B D H W"]:
        return features.from_map(values)


def looking(
    features: FeatureExtractor,
    dataset: ViewDataset,
    *,
    run: Path | None = None,
    among: Sequence[ViewDataset] = (),
    workers: int = 0,
) -> Batches:
    """Every view in order, for looking at a finished tree: from what its run kept, else through the network."""
    kept = kept_borders(features.backbone, dataset, run, among) if run is not None else None
    if kept is not None:
        return KeptBatches(kept, _PHOTOS_AT_ONCE, shuffle=False)
    return FrozenBatches(dataset, features, workers=workers)


def maps_of(batches: Batches, features: FeatureExtractor, device: torch.device | None = None) -> Iterator[MapBatch]:
    """All feature maps of epoch 0, in evaluation mode, with labels and places: for projection and evaluation."""
    features.eval()
    for inputs in batches.epoch(0):
        if len(inputs.labels):
            with torch.inference_mode():
                feature_map = batches.encode(features, inputs.values.to(device))
            yield feature_map.clone(), inputs.labels.to(device), inputs.entries.to(device)
