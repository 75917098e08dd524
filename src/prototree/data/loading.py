"""Views of photos as batches of tensors, the same ones whatever the number of worker processes.

Chance is a function of (seed, epoch, index): each item is augmented under a generator seeded with the three,
and the order of an epoch depends on the first two. So runs repeat, resume in the middle of an epoch, and
split over processes without any state to carry along. The sampler hands (epoch, index) pairs to the workers,
which therefore need not be restarted to learn of a new epoch.
"""

import copy
import hashlib
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from prototree.backbones.crops import CropTransform, look
from prototree.backbones.geometry import Box, Size
from prototree.backbones.preprocessing import Preprocessing
from prototree.backbones.thread_map import side_by_side
from prototree.data.dataset import Problem, Sample
from prototree.data.images import Photo, read_photo, reduction
from prototree.data.transforms import Colours, Plain, Transform
from prototree.data.views import View, region_of, squared, squash
from prototree.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_CHANCE = threading.Lock()  # one item at a time is given its own chance
Result = TypeVar("Result")

Views = Callable[[Sample], Sequence[View]]
Position = tuple[int, int]
"""Epoch and index of an item."""


@dataclass(frozen=True)
class Entry:
    """What stands behind an item: a sample, by its place in the list given, and one of its views."""

    sample_index: int
    sample: Sample
    view: View


class Item(NamedTuple):
    """One view of one photo; `entry` is its place in `ViewDataset.entries`."""

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
    """Which process this is, of how many; each gets its share of every batch."""

    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"expected 0 <= rank < world_size, got rank {self.rank} of {self.world_size}")

    def of(self, batch: Sequence[int]) -> Sequence[int]:
        """This process's stretch of a batch; stretches differ by at most one in length and join to the whole."""
        return batch[self.stretch(len(batch))]

    def stretch(self, length: int) -> slice:
        """Where this process's stretch of so many items lies."""
        start, stop = (length * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return slice(start, stop)


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
        self.preprocessing = preprocessing
        self.seed = seed
        self.entries: tuple[Entry, ...] = tuple(
            Entry(index, sample, view) for index, sample in enumerate(samples) for view in views(sample)
        )
        self.transform: Transform = transform if transform is not None else Plain(preprocessing)
        self._leaves_to_chance = not isinstance(self.transform, Plain)
        self._views = views

    def over(self, samples: Sequence[Sample]) -> "ViewDataset":
        """The same views of other samples."""
        return ViewDataset(samples, self._views, self.preprocessing, transform=self.transform, seed=self.seed)

    def looking(self, share: float) -> "ViewDataset":
        """The same entries as the network is shown them at a look (`network.crops`)."""
        if share == 1:
            return self
        closer = copy.copy(self)
        closer.transform = CropTransform(self.transform, share)
        return closer

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, position: int | Position) -> Item:
        epoch, index = (0, position) if isinstance(position, int) else position
        return self.item(epoch, index, read_photo(self.entries[index].sample.path, at_least=self.pixels_needed(index)))

    def item(self, epoch: int, index: int, photo: Photo) -> Item:
        """An item of an epoch, given its photo."""
        return self.shown(
            epoch, index, squash(photo.image, self.preprocessing, self.entries[index].view, size=photo.size)
        )

    def shown(self, epoch: int, index: int, square: Image.Image) -> Item:
        """An item of an epoch, given its view as a square."""
        label = self.entries[index].sample.label
        if not self._leaves_to_chance:  # so threads need not wait for each other
            return Item(self.transform(square), label, index)
        with _chance_of(self.seed, epoch, index):
            if not isinstance(self.transform, Colours):  # which draws while it works
                return Item(self.transform(square), label, index)
            chosen = self.transform.drawn()
        return Item(chosen(square), label, index)

    def pixels_needed(self, index: int) -> int | None:
        """How long the shorter side of an item's photo must stay for its view to keep all pixels."""
        entry = self.entries[index]
        return _pixels_needed(entry.view, entry.sample.size, self.preprocessing.resize)


def _pixels_needed(view: View, size: Size | None, side: int) -> int | None:
    """How long the photo's shorter side must stay for the region to keep `side` pixels each way."""
    if size is None:
        return None
    region = region_of(view, size)
    return math.ceil(side * min(size) / max(min(region.width, region.height), 1.0))


def derived_seed(*values: int | str) -> int:
    """One seed out of several values, as good as independent for each combination."""
    text = "/".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


@contextmanager
def _chance_of(*values: int) -> Iterator[None]:
    """Seeds torch's default generator for a moment; whoever else draws from it in this process sees no change."""
    with _CHANCE:
        # Not torch.manual_seed and fork_rng: those reach for the GPUs' generators too.
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(derived_seed(*values))
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


class BatchOrder:
    """This process's part of an epoch, as positions; tells the loader which epoch it is in.

    That is a share of each batch; where processes take `turns`, every n-th batch, whole.
    """

    def __init__(
        self, n_items: int, batch_size: int, *, shuffle_seed: int | None, shard: Shard, turns: bool = False
    ) -> None:
        self._n_items = n_items
        self._batch_size = batch_size
        self._shuffle_seed = shuffle_seed
        self._shard, self._turns = shard, turns
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        return len(self._batches(self.start))

    def __iter__(self) -> Iterator[list[Position]]:
        # Fixed now, not when the first batch is drawn: a prefetching loader draws late.
        return self.positions(self.epoch, self.start)

    def positions(self, epoch: int, start: int) -> Iterator[list[Position]]:
        """This process's part of an epoch, from batch `start` on."""
        order = self._order(epoch)
        for number in self._batches(start):
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            yield [(epoch, index) for index in (batch if self._turns else self._shard.of(batch))]

    def _batches(self, start: int) -> range:
        """The numbers of the batches that this process has a part in."""
        numbers = range(start, math.ceil(self._n_items / self._batch_size))
        return numbers[self._shard.rank :: self._shard.world_size] if self._turns else numbers

    def _order(self, epoch: int) -> list[int]:
        if self._shuffle_seed is None:
            return list(range(self._n_items))
        generator = torch.Generator().manual_seed(derived_seed("order", self._shuffle_seed, epoch))
        return torch.randperm(self._n_items, generator=generator).tolist()


class _Guarded(Dataset["Item | Problem"]):
    """The dataset for worker processes: a file that cannot be read comes back as a problem, not as a crash."""

    def __init__(self, dataset: ViewDataset) -> None:
        self._dataset = dataset

    def __getitem__(self, position: Position) -> Item | Problem:
        try:
            return self._dataset[position]
        except DataError as error:
            return Problem(self._dataset.entries[position[1]].sample.path, str(error))


class _ByPhoto(Dataset["list[Item | Problem]"]):
    """All views that some data sets have of one photo, decoded once; entries are counted over the sets in turn."""

    def __init__(self, datasets: Sequence[ViewDataset]) -> None:
        self._datasets = tuple(datasets)
        photos: dict[Path, list[tuple[int, int, int]]] = {}
        number = 0
        for which, dataset in enumerate(datasets):
            for index, entry in enumerate(dataset.entries):
                photos.setdefault(entry.sample.path, []).append((which, index, number))
                number += 1
        self._photos = list(photos.values())

    def __len__(self) -> int:
        return len(self._photos)

    @property
    def views_each(self) -> int:
        """Of the photo that has the most."""
        return max(map(len, self._photos), default=1)

    def __getitem__(self, position: Position) -> list[Item | Problem]:
        epoch, photo = position
        done = _Done({}, {}, {})
        return [self._view(epoch, *view, done) for view in self._photos[photo]]

    def _view(self, epoch: int, which: int, index: int, number: int, done: "_Done") -> Item | Problem:
        dataset = self._datasets[which]
        try:
            return done.item(dataset, epoch, index)._replace(entry=number)
        except DataError as error:
            return Problem(dataset.entries[index].sample.path, str(error))


@dataclass(frozen=True)
class _Done:
    """What has been made of one photo so far, for all views and looks that share it."""

    decoded: dict[int, Photo]  # by how much they are reduced
    squares: dict[tuple[Box | None, Preprocessing], Image.Image]  # by their region
    inputs: dict[tuple[View, Plain], Tensor]  # of the network, where nothing is left to chance

    def item(self, dataset: ViewDataset, epoch: int, index: int) -> Item:
        """An item of a data set that shows this photo."""
        entry, transform = dataset.entries[index], dataset.transform
        plain = transform.plain if isinstance(transform, CropTransform) else transform
        if not isinstance(plain, Plain):
            return dataset.shown(epoch, index, self._square(dataset, index))
        key = entry.view, plain
        if key not in self.inputs:
            self.inputs[key] = plain(self._square(dataset, index))
        image = self.inputs[key]
        shown = look(image, transform.share) if isinstance(transform, CropTransform) else image
        return Item(shown, entry.sample.label, index)

    def _square(self, dataset: ViewDataset, index: int) -> Image.Image:
        view, preprocessing = dataset.entries[index].view, dataset.preprocessing
        key = view.region, preprocessing
        if key not in self.squares:
            photo = self._photo(dataset.entries[index].sample, dataset.pixels_needed(index))
            self.squares[key] = squared(photo.image, preprocessing, view.region, size=photo.size)
        return view.finished(self.squares[key])

    def _photo(self, sample: Sample, needed: int | None) -> Photo:
        reduced = reduction(sample.size, needed) if sample.size is not None else 1
        if reduced not in self.decoded:
            self.decoded[reduced] = read_photo(sample.path, at_least=needed)
        return self.decoded[reduced]


class _Packet(NamedTuple):
    batch: Batch
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class _Collate:
    size: int

    def __call__(self, results: list[Item | Problem]) -> _Packet:
        items = [result for result in results if isinstance(result, Item)]
        images = torch.stack([item.image for item in items]) if items else torch.empty(0, 3, self.size, self.size)
        labels = torch.tensor([item.label for item in items], dtype=torch.int64)
        entries = torch.tensor([item.entry for item in items], dtype=torch.int64)
        problems = tuple(result for result in results if isinstance(result, Problem))
        return _Packet(Batch(images, labels, entries), problems)


@dataclass(frozen=True)
class _CollatePhotos(_Collate):
    def __call__(self, results: list[list[Item | Problem]]) -> _Packet:  # type: ignore[override]
        return super().__call__([view for photo in results for view in photo])


class Loader:
    """Batches of a `ViewDataset`; `for batch in loader.epoch(3)`, or from its batch 10 on: `loader.epoch(3,
    start=10)`.

    `problems` lists the files that turned out unreadable on the way, `n_skipped` counts the items lost by
    them.
    """

    def __init__(
        self,
        dataset: "Dataset[Item | Problem] | Dataset[list[Item | Problem]]",
        collate: _Collate,
        batches: BatchOrder,
        *,
        workers: int = 0,
        strict: bool = False,
    ) -> None:
        self.problems: dict[str, Problem] = {}
        self.n_skipped = 0
        self._strict = strict
        self._dataset, self._collate, self._batches = dataset, collate, batches
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=workers > 0,
            prefetch_factor=2 if workers > 0 else None,
            pin_memory=torch.cuda.is_available(),
            generator=torch.Generator(),  # its own, or each epoch would draw from the default one
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._batches) + self._batches.start

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, epoch: int, *, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""
        self._batches.epoch, self._batches.start = epoch, start
        with _no_alarm():
            packets = iter(self._loader)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise DataError(
                    "a process that loads photos has died, perhaps because memory ran out; try again with fewer of "
                    f"them, such as --workers 0 ({str(error).strip()})"
                ) from error
            self._note(packet.problems)
            yield packet.batch

    def each(self, epoch: int, work: Callable[[Batch], Result]) -> Iterator[Result]:
        """What `work` makes of each batch of an epoch. Threads load a batch each and work on it, as many as torch has;
        there are no worker processes.
        """

        def loaded(positions: list[Position]) -> tuple[_Packet, Result]:
            packet = self._collate([self._dataset[position] for position in positions])  # type: ignore[misc]
            return packet, work(packet.batch)

        for packet, result in side_by_side(loaded, self._batches.positions(epoch, 0)):
            self._note(packet.problems)
            yield result

    def _note(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if self._strict:
                raise DataError(problem.reason)
            self.n_skipped += 1
            if str(problem.path) not in self.problems:
                self.problems[str(problem.path)] = problem
                logger.warning("%s; skipped", problem.reason)


@contextmanager
def _no_alarm() -> Iterator[None]:
    """Keeps torch from raising an error the moment a worker dies: it would interrupt the main process anywhere, in the
    middle of other work, while it holds locks. The next batch still raises the error within seconds.
    """
    before = getattr(signal_handling, "_SIGCHLD_handler_set", None)
    if before is None:  # another version of torch
        yield
        return
    signal_handling._SIGCHLD_handler_set = True
    try:
        yield
    finally:
        signal_handling._SIGCHLD_handler_set = before


def make_loader(
    dataset: ViewDataset,
    batch_size: int,
    *,
    shuffle: bool = False,
    shard: Shard | None = None,
    turns: bool = False,
    workers: int = 0,
    strict: bool = False,
) -> Loader:
    """A loader of batches of `batch_size`, counted over all processes; a short last batch is kept.

    The k-th batches of all shards join, in order of rank, to the k-th batch of a single process; where they take
    `turns`, each batch is whole and belongs to one of them. A file that cannot be read any more is skipped with one
    warning; with `strict` it is a `DataError`.
    """
    if batch_size < 1 or workers < 0:
        raise ConfigError(f"expected batch_size >= 1 and workers >= 0, got {batch_size} and {workers}")
    batches = BatchOrder(
        len(dataset), batch_size, shuffle_seed=dataset.seed if shuffle else None, shard=shard or Shard(), turns=turns
    )
    return Loader(_Guarded(dataset), _Collate(dataset.preprocessing.size), batches, workers=workers, strict=strict)


def photo_loader(datasets: Sequence[ViewDataset], n_views: int, *, shard: Shard, workers: int = 0) -> Loader:
    """A loader of all views of some data sets in batches of whole photos, about `n_views` in each.

    A photo is decoded once for all its views, if they want it equally large. `Batch.entries` counts over the data sets
    one after the other. Processes take turns.
    """
    photos = _ByPhoto(datasets)
    at_once = max(1, n_views // photos.views_each)
    batches = BatchOrder(len(photos), at_once, shuffle_seed=None, shard=shard, turns=True)
    return Loader(photos, _CollatePhotos(datasets[0].preprocessing.size), batches, workers=workers)
