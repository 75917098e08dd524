"""The stages of a run, each on one data set with one configuration, and the folder they are written to."""

import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prototree import files
from prototree.config import Config, read_config
from prototree.data import ImageData
from prototree.data.augment import augmentation
from prototree.data.loading import Entry, ViewDataset, derived_seed
from prototree.data.samples import name_in
from prototree.data.views import evaluation_views, projection_views, source_views, training_views, varied_views
from prototree.errors import CheckpointError, DataError
from prototree.evaluation import plots
from prototree.evaluation.metrics import Metrics, evaluate_all
from prototree.evaluation.mistakes import MistakeFinder
from prototree.evaluation.tables import blame_table, class_table, detail_table, mistake_table, stage_table
from prototree.explain.prototype_pictures import write_pictures
from prototree.network.backbone import Backbone, FeatureExtractor
from prototree.network.preprocessing import Preprocessing
from prototree.training import distributed
from prototree.training.batches import (
    Batches,
    BorderCache,
    CachedBatches,
    PhasedBatches,
    PhotoBatches,
    cache_borders,
    cache_size,
    maps_of,
)
from prototree.training.engine import Listener, Options
from prototree.training.leaf_training import LEAF_TRAINERS, refit_leaves
from prototree.training.objectives import (
    ClassifierObjective,
    Cosine,
    Schedule,
    SoftTargets,
    TreeObjective,
    go_back,
    train,
)
from prototree.training.projection import Places, Projected, project, settle
from prototree.training.recipes.warm import (
    SHARE_ON,
    AnchoredObjective,
    HeadObjective,
    calibrate,
    given,
    grow,
    head_epochs,
    some_maps,
    standardise,
    tree_epochs,
)
from prototree.training.teacher import open_teacher, teach
from prototree.tree import checkpoint
from prototree.tree.model import ProtoTree
from prototree.tree.pruning import Pruned, prune
from prototree.tree.topology import Topology

STAGES = ("train", "prune", "project", "evaluate")
TRAINED, PRUNED, PROJECTED = "trained", "pruned", "projected"
# The prototypes that Eq. 6 gives without class constraints, kept for comparison (Table S4).
ANY_CLASS = "projected_any_class"
PICTURES = "prototypes"
OWN_FILES = (
    "config.toml",
    "log.csv",
    "metrics.json",
    "last",
    "head",
    "pretrained",
    "cache",
    "teacher",
    TRAINED,
    PRUNED,
    PROJECTED,
    ANY_CLASS,
    "mistakes.json",
    "results.md",
    "plots",
    PICTURES,
)
# Settings that say how a run is done, not what comes out of it: a run may be continued with others.
_FREE = ("workers", "save_minutes", "compile", "strict")


class Observer(Listener):
    """Hears of every step of a run; does nothing by itself."""

    def stage(self, text: str) -> None:
        """A stage begins, or has something to say."""

    def caching(self, done: int, total: int) -> None:
        """Photos that have gone through the frozen trunk."""


@dataclass(frozen=True)
class Run:
    """A folder of results."""

    folder: Path

    def tree(self, stage: str | None = None) -> ProtoTree:
        """The tree after a stage; by default the last one there is."""
        stages = [stage] if stage else [s for s in (PROJECTED, PRUNED, TRAINED) if (self.folder / s).exists()]
        if not stages:
            raise CheckpointError(f"expected a run with a trained tree in {self.folder}, found none; train one first")
        return checkpoint.load(self.folder / stages[0])

    @property
    def config(self) -> Config:
        return read_config(self.folder / "config.toml")

    @property
    def metrics(self) -> dict[str, Any]:
        """The content of metrics.json; empty before the first evaluation."""
        path = self.folder / "metrics.json"
        return files.read_json(path) if path.exists() else {}

    @property
    def source(self) -> str:
        """What the data that the run was made with was opened by."""
        source = self.metrics.get("source")
        if source is None:
            raise DataError(f"{self.folder} does not say which data it was made with; name it with --data")
        return str(source)

    @property
    def notes(self) -> dict[int, str]:
        """The user's words about prototypes, by node: the content of notes.json."""
        path = self.folder / "notes.json"
        try:
            return {int(node): str(text) for node, text in (files.read_json(path) if path.exists() else {}).items()}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error}); expected node numbers and texts") from error

    def note(self, **values: Any) -> None:
        """Adds to metrics.json."""
        if distributed.is_first():
            content = json.dumps({**self.metrics, **values}, indent=1).encode()
            files.write_file(self.folder / "metrics.json", content)


@dataclass(frozen=True)
class Work:
    """The stages, on one data set with one configuration."""

    run: Run
    data: ImageData
    config: Config
    device: torch.device
    observer: Observer

    def train(self) -> None:
        """Algorithm 1 up to line 14."""
        torch.manual_seed(derived_seed("start", self.config.seed))
        tree = self._train_warm() if self.config.recipe == "warm" else self._train_as_published()
        tree.requires_grad_(True)
        tree.leaf_logits.requires_grad_(False)
        _save(tree, self.run.folder / TRAINED)

    def _train_as_published(self) -> ProtoTree:
        features = self.features()
        size = (self.config.prototype_height, self.config.prototype_width)
        tree = ProtoTree(Topology.full(self.config.height), features, self.data.class_names, size)
        if self.config.compile:
            features.backbone.compile()
        batches = self._training_batches(tree)
        schedule = _schedule(self.config)
        leaf_trainer = LEAF_TRAINERS[self.config.leaves]()
        objective = TreeObjective(tree, batches, schedule, leaf_trainer, self._soft_targets())
        self.observer.stage(f"training {tree.topology.n_nodes} prototypes for {self.config.epochs} epochs")
        train(objective, batches, self.config.epochs, self._options("last"), self.observer)
        return tree

    def _train_warm(self) -> ProtoTree:
        config, given_tree = self.config, Run(Path(self.config.start)).tree() if self.config.start else None
        features = self.features() if given_tree is None else self._fresh_head(given_tree.features.backbone.unsplit())
        plain = self._cache(features.backbone, self._source_set(features.backbone.preprocessing))
        cache = plain
        if config.cache_views > 2:
            cache = plain.join(self._cache(features.backbone, self._varied_set(features.backbone.preprocessing)))
        sources = CachedBatches(plain, config.batch_size, shuffle=False)
        batches = CachedBatches(cache, config.batch_size, shuffle=True, seed=config.seed)
        maps, labels = some_maps(sources)
        standardise(features.to("cpu"), maps)
        targets = self._taught(features, batches)
        epochs = tree_epochs(len(cache.entries), 1.0 if given_tree is None else SHARE_ON)
        if given_tree is None:
            generator = torch.Generator().manual_seed(derived_seed("grow", config.seed))
            features.to("cpu")  # where the maps are; it takes seconds
            calibrate(features, maps[:: max(1, len(maps) // 200)], generator)
            start = grow(features, maps, labels, generator)
            tree = ProtoTree(start.topology, features, self.data.class_names)
        else:
            tree, start = given_tree, given(given_tree, sources, self.data.root)
        schedule = dataclasses.replace(_schedule(config), epochs=config.epochs or epochs)
        objective = AnchoredObjective(tree, batches, schedule, targets, start, sources)
        self.observer.stage(f"training {tree.topology.n_nodes} prototypes for {schedule.epochs} epochs")
        train(objective, batches, schedule.epochs, self._options("last"), self.observer)
        objective.settle()
        refit_leaves(tree, objective.sweep_labels, n_sweeps=3)
        return tree

    def _taught(self, features: FeatureExtractor, batches: CachedBatches) -> SoftTargets:
        """What the head, trained as a plain classifier, says of every view."""
        config = self.config
        epochs = config.head_epochs or head_epochs(len(batches.entries))
        head = HeadObjective(features, self.data.n_classes, epochs, batches.n_batches)
        self.observer.stage(f"training the head as a plain classifier for {epochs} epochs")
        train(head, batches, epochs, self._options("head"), self.observer)
        return SoftTargets(head.probs(batches, config.temperature), config.teacher_weight)

    def prune(self) -> Pruned:
        """§5.1."""
        pruned = prune(self.run.tree(TRAINED), self.config.threshold)
        self.observer.stage(str(pruned))
        self._drop(PROJECTED, ANY_CLASS)
        _save(pruned.tree, self.run.folder / PRUNED)
        self.run.note(
            pruning={
                "threshold": pruned.threshold,
                "leaves": [pruned.leaves_before, pruned.leaves_after],
                "prototypes": [pruned.prototypes_before, pruned.prototypes_after],
                "share_pruned": pruned.share_pruned,
            }
        )
        return pruned

    def project(self) -> Projected:
        """Eq. 6 or S1, with the other one measured beside it."""
        tree = self.run.tree(PRUNED).to(self.device)
        self.observer.stage(
            f"projecting {tree.topology.n_nodes} prototypes onto {len(self.data.train)} training photos"
        )
        dataset = self._projection_set(tree.preprocessing)
        batches = self._projection_batches(tree, dataset)
        places = Places(self.data.root, batches.entries)
        maps = maps_of(batches, tree.features, self.device)
        projected = project(tree, maps, places, constrain_classes=self.config.constrain_classes, compare=True)
        if isinstance(batches, CachedBatches):
            settle(projected, dataset)
        self._drop(ANY_CLASS)
        _save(projected.tree, self.run.folder / PROJECTED)
        if projected.unconstrained is not None and self.config.constrain_classes and distributed.is_first():
            other = {"prototypes": projected.unconstrained.vector.view_as(tree.prototypes)}
            checkpoint.write_state(self.run.folder / ANY_CLASS, "state.json", {"version": checkpoint.VERSION}, other)
        if distributed.is_first():
            write_pictures(projected.tree, self.data, self.run.folder / PICTURES)
        self.run.note(
            projection={
                "constrained": self.config.constrain_classes,
                "mean_distance": projected.mean_distance,
                "distances": projected.nearest.distance.tolist(),
                "constraint_cost": projected.constraint_cost,
                "duplicates": projected.n_duplicates,
            }
        )
        return projected

    def evaluate(self) -> dict[str, Metrics]:
        """All stages there are, in one pass over the test photos."""
        names = [name for name in (TRAINED, PRUNED, PROJECTED) if (self.run.folder / name).exists()]
        trees = {name: self.run.tree(name).to(self.device) for name in names}
        first, last = trees[names[0]], trees[names[-1]]
        if (self.run.folder / ANY_CLASS).exists():
            trees[ANY_CLASS] = self._with_other_prototypes(last)
        self.observer.stage(f"evaluating on {len(self.data.test)} test photos")
        batches = self.test_batches(first)
        finder = MistakeFinder(last)
        metrics = evaluate_all(trees, finder.watch(maps_of(batches, first.features, self.device)))
        self._write_mistakes(finder, batches.entries)
        self.run.note(
            version=1,
            data={"kind": self.data.kind, "train": len(self.data.train), "test": len(self.data.test)},
            classes=list(self.data.class_names),
            stages={name: m.to_json() for name, m in metrics.items()},
        )
        if distributed.is_first():
            self._write_results(names)
        return metrics

    def _with_other_prototypes(self, tree: ProtoTree) -> ProtoTree:
        other = tree.with_topology(tree.topology, np.arange(tree.topology.n_nodes), np.arange(tree.topology.n_leaves))
        found = checkpoint.read_state(self.run.folder / ANY_CLASS, "state.json")[1]["prototypes"]
        other.prototypes.data.copy_(found)
        return other

    def _drop(self, *names: str) -> None:
        """Removes results that no longer fit the tree before them."""
        if distributed.is_first():
            for name in names:
                shutil.rmtree(self.run.folder / name, ignore_errors=True)

    def _write_results(self, stages: Sequence[str]) -> None:
        """Tables for people, and plots where matplotlib is installed."""
        metrics, folder = self.run.metrics, self.run.folder
        mistakes = files.read_json(folder / "mistakes.json")
        found = [
            stage_table(metrics, folder.name),
            detail_table(metrics),
            class_table(metrics, stages[-1]),
            blame_table(mistakes),
            mistake_table(mistakes, metrics["classes"]),
        ]
        files.write_file(folder / "results.md", "\n".join(table.to_markdown() for table in found).encode())
        if plots.available():
            (folder / "plots").mkdir(exist_ok=True)
            for stage in stages:
                values, title = metrics["stages"][stage], f"{folder.name}, {stage}"
                leaves = plots.leaf_maxima(values["leaf_maxima"], self.data.n_classes, title)
                files.write_file(folder / "plots" / f"leaf_maxima_{stage}.png", plots.png(leaves))
            matrix = plots.confusion(values["confusion"], metrics["classes"], title)
            files.write_file(folder / "plots" / "confusion.png", plots.png(matrix))

    def _write_mistakes(self, finder: MistakeFinder, entries: Sequence[Entry]) -> None:
        finder.gather()
        found = finder.to_json()
        for mistake in found["images"]:
            mistake["image"] = name_in(self.data.root, entries[mistake.pop("place")].sample.path)
        if distributed.is_first():
            files.write_json(self.run.folder / "mistakes.json", found)

    def features(self) -> FeatureExtractor:
        """A fresh head on a backbone that was pretrained somewhere, or is now."""
        config = self.config
        backbone = Backbone(
            config.backbone,
            None if config.weights == "none" else config.weights,
            image_size=config.image_size,
            level=config.level,
            split=config.train_tail,
        )
        preprocessing = dataclasses.replace(backbone.preprocessing, resize=config.resize)
        backbone.preprocessing = preprocessing
        if config.pretrain_epochs:
            self._pretrain(backbone)
        return self._fresh_head(backbone)

    def _fresh_head(self, backbone: Backbone) -> FeatureExtractor:
        return FeatureExtractor(backbone, self.config.depth, self.config.head_width)

    def _training_set(self, preprocessing: Preprocessing) -> ViewDataset:
        """Every training view, augmented."""
        views = partial(training_views, kind=self.data.kind)
        transform = augmentation(self.config.augment, preprocessing)
        return ViewDataset(self.data.train, views, preprocessing, transform=transform, seed=self.config.seed)

    def _pretraining_set(self, preprocessing: Preprocessing) -> ViewDataset:
        """What the backbone learns from as a classifier; views as the recipe has them, but new in every epoch."""
        if self.config.recipe == "paper":
            return self._training_set(preprocessing)
        transform = augmentation("light", preprocessing)
        return ViewDataset(self.data.train, source_views, preprocessing, transform=transform, seed=self.config.seed)

    def _source_set(self, preprocessing: Preprocessing) -> ViewDataset:
        """The plain views that the recipe `warm` learns from and takes its prototypes from."""
        return ViewDataset(self.data.train, source_views, preprocessing)

    def _varied_set(self, preprocessing: Preprocessing) -> ViewDataset:
        """The others that it learns from; the same for every seed, so that runs can share the cache."""
        views = partial(varied_views, count=self.config.cache_views - 2, seed=0)
        transform = augmentation(self.config.augment, preprocessing)
        return ViewDataset(self.data.train, views, preprocessing, transform=transform)

    def _projection_set(self, preprocessing: Preprocessing) -> ViewDataset:
        """Plain views of every training photo."""
        if self.config.recipe == "warm":
            return self._source_set(preprocessing)
        return ViewDataset(self.data.train, partial(projection_views, kind=self.data.kind), preprocessing)

    def _projection_batches(self, tree: ProtoTree, dataset: ViewDataset) -> Batches:
        if self.config.recipe == "warm":  # all of its maps are there already
            cache = self._cache(tree.features.backbone.unsplit(), dataset)
            return CachedBatches(cache, self.config.batch_size, shuffle=False)
        return self._plain(dataset)

    def test_batches(self, tree: ProtoTree) -> Batches:
        """Every test photo, whole."""
        return self._plain(ViewDataset(self.data.test, evaluation_views, tree.preprocessing))

    def _plain(self, dataset: ViewDataset) -> Batches:
        return self._photos(dataset, shuffle=False)

    def _photos(self, dataset: ViewDataset, *, shuffle: bool) -> PhotoBatches:
        config = self.config
        return PhotoBatches(dataset, config.batch_size, shuffle=shuffle, workers=config.workers, strict=config.strict)

    def _training_batches(self, tree: ProtoTree) -> Batches:
        config, dataset = self.config, self._training_set(tree.preprocessing)
        photos = self._photos(dataset, shuffle=True)
        if not config.cache_views or not config.freeze_epochs:
            return photos
        cache = self._cache(tree.features.backbone, dataset, config.cache_views)
        cached = CachedBatches(cache, config.batch_size, shuffle=True, seed=config.seed)
        return PhasedBatches(cached, photos, config.freeze_epochs)

    def _cache(self, backbone: Backbone, dataset: ViewDataset, variants: int = 1) -> BorderCache:
        backbone.to(self.device).freeze(True)
        gigabytes = cache_size(backbone, len(dataset), variants) / 1e9
        self.observer.stage(
            f"running the frozen trunk once over {len(dataset) * variants} views: {gigabytes:.2f} GB of cache"
        )
        folder, tick = self.run.folder / "cache", self.observer.caching
        return cache_borders(backbone, dataset, folder, variants=variants, workers=self.config.workers, tick=tick)

    def _pretrain(self, backbone: Backbone) -> None:
        config = self.config
        self.observer.stage(f"training the backbone as a plain classifier for {config.pretrain_epochs} epochs")
        photos = self._photos(self._pretraining_set(backbone.preprocessing), shuffle=True)
        # What was learned elsewhere is not to be lost.
        backbone_rate = config.lr_trunk if backbone.weights else None
        before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
        pace = Cosine(config.pretrain_epochs, photos.n_batches)
        objective = ClassifierObjective(backbone, self.data.n_classes, pace, config.lr_tail, backbone_rate)
        train(objective, photos, config.pretrain_epochs, self._options("pretrained"), self.observer)
        if backbone.weights:
            go_back(backbone, before)

    def _soft_targets(self) -> SoftTargets | None:
        config = self.config
        if not config.teacher:
            return None
        teacher = open_teacher(config.teacher, self.data.n_classes, config.image_size)
        self.observer.stage("asking the teacher")
        views = partial(training_views, kind=self.data.kind)
        plain = ViewDataset(self.data.train, views, teacher.preprocessing)
        return SoftTargets(
            teach(teacher, plain, config.temperature, self.run.folder / "teacher"), config.teacher_weight
        )

    def _options(self, folder: str) -> Options:
        config, device = self.config, self.device
        half = config.precision == "bfloat16" or (
            config.precision == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        return Options(
            folder=self.run.folder / folder,
            identity=_identity(config, self.data),
            resume=True,  # the folder was emptied unless the run is to be continued
            save_minutes=config.save_minutes,
            seed=derived_seed("train", config.seed),
            autocast=torch.bfloat16 if half else None,
            channels_last=config.channels_last,
            device=device,
        )


def _schedule(config: Config) -> Schedule:
    names = [field.name for field in dataclasses.fields(Schedule)]
    return Schedule(**{name: getattr(config, name) for name in names})


def _identity(config: Config, data: ImageData) -> str:
    """What must be the same for a run to be continued."""
    values = {key: value for key, value in dataclasses.asdict(config).items() if key not in _FREE}
    return json.dumps({**values, "classes": data.n_classes, "train": len(data.train)}, sort_keys=True)


def _save(tree: ProtoTree, folder: Path) -> None:
    if distributed.is_first():
        checkpoint.save(tree, folder)
    distributed.wait_for_all()
