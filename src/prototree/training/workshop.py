"""What every recipe trains with: the data, the network, cached maps, and a loop that can be interrupted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from prototree.backbones.backbone import Backbone, FeatureExtractor, check_image_size
from prototree.backbones.inference import engine_for
from prototree.backbones.preprocessing import Preprocessing
from prototree.data.dataset import ImageData, Sample
from prototree.data.loading import ViewDataset, derived_seed
from prototree.data.transforms import augmentation
from prototree.data.views import View
from prototree.features.batches import Batches, CachedBatches, PhotoBatches
from prototree.features.cache import MapCache, cache_all_borders, cache_size, kept_borders
from prototree.features.registry import note_use, shared_folder
from prototree.progress import Observer
from prototree.settings import Common
from prototree.training import distributed
from prototree.training.baseline import save_baseline
from prototree.training.loop import Objective, Options
from prototree.training.objectives import ClassifierObjective, Cosine, blend_with_start, train


@dataclass(frozen=True)
class Workshop:
    """One data set, the common settings, a folder to write to, and who listens."""

    folder: Path
    data: ImageData
    settings: Common
    device: torch.device
    observer: Observer
    identity: str = ""  # what must be the same for a training to be continued

    def unheard(self) -> "Workshop":
        """The same with nobody listening."""
        return replace(self, observer=Observer())

    def backbone(self, *, split: bool) -> Backbone:
        """The pretrained network that the settings name."""
        settings = self.settings
        weights = None if settings.weights == "none" else settings.weights
        backbone = Backbone(
            settings.backbone,
            weights,
            image_size=settings.image_size,
            feature_level=settings.feature_level,
            split=split,
        )
        resize = settings.resize or settings.image_size
        check_image_size(backbone.name, resize)
        backbone.preprocessing = replace(backbone.preprocessing, resize=resize)
        return backbone

    def features(self, backbone: Backbone) -> FeatureExtractor:
        """A fresh head on a backbone."""
        return FeatureExtractor(backbone, self.settings.prototype_dim, self.settings.head_hidden_dim)

    def pretrain(
        self, backbone: Backbone, dataset: ViewDataset, epochs: int, rate: float, pretrained_rate: float
    ) -> None:
        """The backbone as a plain classifier; one that has weights learns at a rate of its own, and half way only."""
        self.observer.stage(f"training the backbone as a plain classifier for {epochs} epochs")
        photos = self.photos(dataset, shuffle=True)
        # What was learned elsewhere is not to be lost.
        backbone_rate = pretrained_rate if backbone.weights else None
        before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
        pace = Cosine(epochs, photos.n_batches)
        objective = ClassifierObjective(backbone, self.data.n_classes, pace, rate, backbone_rate)
        self.train(objective, photos, epochs, "pretrained")
        if backbone.weights:
            blend_with_start(backbone, before)

    def views(
        self,
        views: Callable[[Sample], Sequence[View]],
        preprocessing: Preprocessing,
        *,
        augment: bool = False,
        seed: int = 0,
    ) -> ViewDataset:
        """Views of all training photos, plain or augmented as the settings say."""
        transform = augmentation(self.settings.augment, preprocessing) if augment else None
        return ViewDataset(self.data.train, views, preprocessing, transform=transform, seed=seed)

    def photos(self, dataset: ViewDataset, *, shuffle: bool = False) -> PhotoBatches:
        """Photos in batches."""
        settings = self.settings
        return PhotoBatches(
            dataset, settings.batch_size, shuffle=shuffle, workers=settings.workers, strict=settings.strict
        )

    def cached(self, maps: MapCache, *, shuffle: bool = False) -> CachedBatches:
        """Cached maps in batches."""
        return CachedBatches(maps, self.settings.batch_size, shuffle=shuffle, seed=self.settings.seed)

    @property
    def engine(self) -> str:
        """What runs a network that does not learn."""
        return engine_for(self.settings.engine, self.device, len(self.data.train) + len(self.data.test))

    def maps(self, backbone: Backbone, dataset: ViewDataset, variants: int = 1) -> MapCache:
        """What the frozen part of the backbone makes of every view: from disk, or computed now."""
        return self.all_maps(backbone, [dataset], variants)[0]

    def all_maps(self, backbone: Backbone, datasets: Sequence[ViewDataset], variants: int = 1) -> list[MapCache]:
        """The same of several sets of views of the training photos, each of which is decoded once for all."""
        every = [self._of_all_folds(dataset) for dataset in datasets]
        n_views = variants * sum(map(len, every))
        backbone.to(self.device).freeze(True)

        def begin(n_missing: int) -> None:
            gigabytes = cache_size(backbone, n_missing, 1) / 1e9
            # A stage in either case, so that an observer can count on it.
            self.observer.stage(
                f"computing feature maps of {n_missing} views, once; they are kept for all runs in the same folder "
                f"({gigabytes:.2f} GB)"
                if n_missing
                else f"the feature maps of all {n_views} views have been computed before"
            )

        found = self._kept(backbone, every, variants, begin)
        pairs = zip(found, datasets, strict=True)
        return [one if one.entries is own.entries else one.same(own.entries) for one, own in pairs]

    def judged_maps(self, backbone: Backbone, dataset: ViewDataset, among: Sequence[ViewDataset]) -> MapCache:
        """The same of whole photos, at all looks; perhaps they are there already, among those of other sets."""
        backbone.to(self.device).freeze(True)
        found = kept_borders(backbone, dataset, self.folder, among, [self.engine])
        if distributed.any_process(found is None) or found is None:
            return MapCache.stack_crops(self._kept(backbone, [dataset.looking(share) for share in backbone.crops], 1))
        for name in found.names:
            note_use(self.folder, name)
        return found

    def _kept(
        self,
        backbone: Backbone,
        datasets: Sequence[ViewDataset],
        variants: int,
        begin: Callable[[int], None] | None = None,
    ) -> list[MapCache]:
        return cache_all_borders(
            backbone,
            datasets,
            shared_folder(self.folder),
            variants=variants,
            workers=self.settings.workers,
            tick=self.observer.caching,
            run=self.folder,
            engine=self.engine,
            begin=begin,
        )

    @property
    def photos_of_all_folds(self) -> Sequence[Sample]:
        """Training photos; where parts of them are left out in turn, all photos, so that all parts share their maps."""
        return self.data.every if self.settings.fold else self.data.train

    def _of_all_folds(self, dataset: ViewDataset) -> ViewDataset:
        return dataset.over(self.photos_of_all_folds) if self.settings.fold else dataset

    def train(self, objective: Objective, batches: Batches, epochs: int, name: str) -> None:
        """Trains an objective, from the state in the folder `name` of the run where there is one."""
        train(objective, batches, epochs, self._options(name), self.observer)

    def save_baseline(self, head: nn.Module, linear: nn.Linear, folder: str = "") -> None:
        """Keeps the classifier that taught the tree, so that the two can be compared."""
        if distributed.is_first():
            save_baseline(head, linear, self.folder / folder)

    def _options(self, name: str) -> Options:
        settings, device = self.settings, self.device
        half = settings.precision == "bfloat16" or (
            settings.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        return Options(
            folder=self.folder / name,
            identity=self.identity,
            resume=True,  # the folder was emptied unless the run is to be continued
            checkpoint_minutes=settings.checkpoint_minutes,
            seed=derived_seed("train", settings.seed),
            epsilon=settings.adam_epsilon,
            autocast=torch.bfloat16 if half else None,
            channels_last=settings.channels_last,
            device=device,
        )
