"""Views of images as deterministic batches of tensors, whatever the number of worker processes.

Random numbers are a function of (seed, epoch, index), and the order of an epoch of the first two: runs repeat, resume
in the middle of an epoch, and split over processes without any state to carry along.
"""

import copy
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from prototree.backbones.crops import CropTransform
from prototree.backbones.geometry import Preprocessing
from prototree.backbones.inference import thread_map
from prototree.data.crops import View, resize_square
from prototree.data.dataset import Sample, Unreadable
from prototree.data.images import load_image, reduction
from prototree.data.transforms import EvalTransform, Transform
from prototree.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Views = Callable[[Sample], Sequence[View]]
Position = tuple[int, int]
"""Epoch and index of an item; the sampler hands both to the workers, which are not restarted for a new epoch."""

_rng_lock = threading.Lock()  # torch's default generator is seeded for one item at a time


@dataclass(frozen=True)
class Entry:
    """What stands behind an item: a sample, by its index in the list given, and one of its views."""

    sample_index: int
    sample: Sample
    view: View


class Item(NamedTuple):
    """One view of one image; `entry` is its index in `ViewDataset.entries`."""

    image: Float[Tensor, "3 size size"]
    label: int
    entry: int


class Batch(NamedTuple):
    """Items stacked; shorter than asked for at the end of an epoch and where files could not be read, perhaps empty."""

    images: Float[Tensor, "B 3 size size"]
    labels: Int[Tensor, " B"]
    entries: Int[Tensor, " B"]


@dataclass(frozen=True)
class Shard:
    """Which process this is, of how many; each gets its part of every batch."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"expected 0 <= rank < world_size, got rank {self.rank} of {self.world_size}")

    def of(self, batch: Sequence[int]) -> Sequence[int]:
        """This process's part of a batch; parts differ by at most one in length and join to the whole."""
        return batch[len(batch) * self.rank // self.world_size : len(batch) * (self.rank + 1) // self.world_size]


class ViewDataset(Dataset[Item]):
    """Every view of every sample, in the order given: all views of the first sample, then of the second.

    `transform` gets the view as a square of `preprocessing.resize` pixels; without one the item is what the
    network sees at test time. `dataset[index]` is the item of epoch 0, `dataset[epoch, index]` of any epoch.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        views: Views,
        preprocessing: Preprocessing,
        *,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> None:
        self.preprocessing, self.seed = preprocessing, seed
        pairs = ((index, sample, view) for index, sample in enumerate(samples) for view in views(sample))
        self.entries: tuple[Entry, ...] = tuple(Entry(*pair) for pair in pairs)
        self.transform: Transform = transform if transform is not None else EvalTransform(preprocessing)
        self.is_random = not isinstance(self.transform, EvalTransform)

    def center_crop(self, fraction: float) -> "ViewDataset":
        """The same entries cropped to their centre, as the network's second crop shows them (`backbones.crops`)."""
        if fraction == 1:
            return self
        cropped = copy.copy(self)
        cropped.transform = CropTransform(self.transform, fraction)
        return cropped

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, position: int | Position) -> Item:
        return self.item(*((0, position) if isinstance(position, int) else position), {})

    def item(self, epoch: int, index: int, cache: dict[Any, Any]) -> Item:
        """An item of an epoch; `cache` keeps what views of the same image share (decoding and resizing)."""
        square, label = self._square(self.entries[index], cache), self.entries[index].sample.label
        # Threads need not wait for each other where nothing is random.
        with seeded_rng(self.seed, epoch, index) if self.is_random else nullcontext():
            return Item(self.transform(square), label, index)

    def _square(self, entry: Entry, cache: dict[Any, Any]) -> Image.Image:
        """The view as a square, cut from an image that is decoded no larger than needed."""
        view, size, side = entry.view, entry.sample.size, self.preprocessing.resize
        if (key := (view.region, self.preprocessing)) not in cache:
            needed, factor = None, 1
            if size is not None:
                region = view.region_of(size)
                needed = math.ceil(side * min(size) / max(min(region.width, region.height), 1.0))
                factor = reduction(size, needed)
            if factor not in cache:
                cache[factor] = load_image(entry.sample.path, at_least=needed)
            cache[key] = resize_square(cache[factor].image, self.preprocessing, view.region, size=cache[factor].size)
        return view.render(cache[key])


def stable_seed(*values: int | str) -> int:
    """Hash several values to one seed, as good as independent for each combination."""
    text = "/".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded_rng(*values: int) -> Iterator[None]:
    """Seed torch's default generator within the block; whoever else draws from it in this process sees no change."""
    with _rng_lock:
        # Not torch.manual_seed and fork_rng: those reach for the GPUs' generators too.
        state = torch.default_generator.get_state()
        torch.default_generator.manual_seed(stable_seed(*values))
        try:
            yield
        finally:
            torch.default_generator.set_state(state)


class BatchOrder:
    """Batch sampler: this process's part of each batch of an epoch; tells the loader which epoch it is in."""

    def __init__(self, n_items: int, batch_size: int, *, shuffle_seed: int | None, shard: Shard) -> None:
        self._n_items, self._batch_size, self._shuffle_seed, self._shard = n_items, batch_size, shuffle_seed, shard
        self.n_batches = math.ceil(n_items / batch_size)
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return self.n_batches - self.start

    def __iter__(self) -> Iterator[list[Position]]:
        # Fixed now, not when the first batch is drawn: a prefetching loader draws late.
        return self.positions(self.epoch, self.start)

    def positions(self, epoch: int, start: int) -> Iterator[list[Position]]:
        """This process's part of an epoch, from batch `start` on."""
        order = list(range(self._n_items))
        if self._shuffle_seed is not None:
            generator = torch.Generator().manual_seed(stable_seed("order", self._shuffle_seed, epoch))
            order = torch.randperm(self._n_items, generator=generator).tolist()
        for number in range(start, self.n_batches):
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            yield [(epoch, index) for index in self._shard.of(batch)]


class _Groups(Dataset["list[Item | Unreadable]"]):
    """Groups of views, each loaded together: single views, or all views of an image, which is then decoded once."""

    def __init__(self, datasets: Sequence[ViewDataset], *, by_image: bool) -> None:
        self._size = datasets[0].preprocessing.size
        groups: dict[object, list[tuple[int, ViewDataset, int]]] = {}
        entries = ((dataset, index) for dataset in datasets for index in range(len(dataset)))
        for number, (dataset, index) in enumerate(entries):
            key = dataset.entries[index].sample.path if by_image else number
            groups.setdefault(key, []).append((number, dataset, index))
        self.groups = list(groups.values())

    def __getitem__(self, position: Position) -> list[Item | Unreadable]:
        """The views of a group; a file that cannot be read comes back as `Unreadable`, not as a crash."""
        (epoch, group), cache = position, dict[Any, Any]()
        items: list[Item | Unreadable] = []
        for number, dataset, index in self.groups[group]:
            try:
                items.append(dataset.item(epoch, index, cache)._replace(entry=number))
            except DataError as error:
                items.append(Unreadable(dataset.entries[index].sample.path, str(error)))
        return items

    def collate(self, groups: list[list[Item | Unreadable]]) -> tuple[Batch, list[Unreadable]]:
        items = [item for group in groups for item in group if isinstance(item, Item)]
        images = torch.stack([item.image for item in items]) if items else torch.empty(0, 3, self._size, self._size)
        labels, entries = (torch.tensor([item[k] for item in items], dtype=torch.int64) for k in (1, 2))
        unreadable = [item for group in groups for item in group if isinstance(item, Unreadable)]
        return Batch(images, labels, entries), unreadable


class Loader:
    """Batches of views: `for batch in loader.epoch(3)`, or from its batch 10 on, `loader.epoch(3, start=10)`.

    A file that cannot be read is skipped with one warning; with `strict` it is a `DataError`.
    """

    def __init__(self, groups: _Groups, order: BatchOrder, *, workers: int = 0, strict: bool = False) -> None:
        self._groups, self._order, self._strict = groups, order, strict
        self.unreadable: set[str] = set()
        self._loader: DataLoader[Any] = DataLoader(
            groups,
            batch_sampler=order,
            collate_fn=groups.collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, or each epoch would draw from the default one
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return self._order.n_batches

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        self._order.epoch, self._order.start = epoch, start
        batches = iter(self._loader)
        while True:
            try:
                batch, unreadable = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise DataError(
                    "a process that loads images has died, perhaps because memory ran out; try again with fewer of "
                    f"them, such as --workers 0 ({str(error).strip()})"
                ) from error
            self._report(unreadable)
            yield batch

    def map(self, epoch: int, function: Callable[[Batch], Result]) -> Iterator[Result]:
        """Apply a function to each batch of an epoch, in order, in threads that load a batch each (no processes)."""

        def load(positions: list[Position]) -> tuple[list[Unreadable], Result]:
            batch, unreadable = self._groups.collate([self._groups[position] for position in positions])
            return unreadable, function(batch)

        for unreadable, result in thread_map(load, self._order.positions(epoch, 0)):
            self._report(unreadable)
            yield result

    def _report(self, unreadable: Sequence[Unreadable]) -> None:
        for file in unreadable:
            if self._strict:
                raise DataError(file.reason)
            if str(file.path) not in self.unreadable:
                self.unreadable.add(str(file.path))
                logger.warning("%s; skipped", file.reason)


def make_loader(
    dataset: ViewDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    shard: Shard | None = None,
    workers: int = 0,
    strict: bool = False,
) -> Loader:
    """Make a loader of batches of `batch_size`, counted over all processes; a short last batch is kept.

    The k-th batches of all shards join, in order of rank, to the k-th batch of a single process.
    """
    if batch_size < 1 or workers < 0:
        raise ConfigError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {workers}")
    shuffle_seed = dataset.seed if shuffle else None
    order = BatchOrder(len(dataset), batch_size, shuffle_seed=shuffle_seed, shard=shard or Shard())
    return Loader(_Groups([dataset], by_image=False), order, workers=workers, strict=strict)


def image_loader(datasets: Sequence[ViewDataset], n_views: int, *, workers: int = 0) -> Loader:
    """Make a loader of all views of several data sets in batches of whole images, about `n_views` in each.

    An image is decoded once for all its views, if they want it equally large. `Batch.entries` counts over the data sets
    one after the other.
    """
    groups = _Groups(datasets, by_image=True)
    batch_size = max(1, n_views // max(map(len, groups.groups), default=1))
    order = BatchOrder(len(groups.groups), batch_size, shuffle_seed=None, shard=Shard())
    return Loader(groups, order, workers=workers)
