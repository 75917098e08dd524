"""The stages of a run, each on one data set with one configuration: train, prune, project, evaluate."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.core.model import ProtoTree
from prototree.core.pruning import Pruned, prune
from prototree.data import ImageData, Sample
from prototree.data.loading import Entry, ViewDataset, derived_seed
from prototree.data.views import evaluation_views
from prototree.evaluation.classifier import ClassifierAccuracy
from prototree.evaluation.errors import ErrorCollector
from prototree.evaluation.metrics import Metrics, evaluate_all
from prototree.explain.assets import PAGES
from prototree.explain.prototype_pictures import write_pictures
from prototree.explain.prototypes import first_views
from prototree.explain.stored_histograms import count_spreads, keep_spreads
from prototree.features.batches import Batches, maps_of
from prototree.features.cache import MapCache, kept_sets
from prototree.features.registry import OWN_CACHE, USED
from prototree.files import write_json
from prototree.pipeline.results import write_results
from prototree.progress import Observer
from prototree.run import CONFIG, ERRORS, METRICS, METRICS_VERSION, NOTES, PICTURES, RESULTS, Run
from prototree.training import distributed
from prototree.training.baseline import FOLDER as CLASSIFIER
from prototree.training.baseline import Baseline, load_baseline
from prototree.training.projection import Projected, SourcePhotos, measure_again, project
from prototree.training.workshop import Workshop

STAGES = ("train", "prune", "project", "evaluate")
# The prototypes that Eq. 6 gives without class constraints, kept for comparison (Table S4).
ANY_CLASS = "projected_any_class"
OWN_FILES = (
    CONFIG,
    "log.csv",
    METRICS,
    NOTES,
    "last",
    "head",
    "held",
    CLASSIFIER,
    "pretrained",
    OWN_CACHE,
    USED,
    "teacher",
    TRAINED,
    PRUNED,
    PROJECTED,
    ANY_CLASS,
    ERRORS,
    RESULTS,
    "plots",
    PICTURES,
    PAGES,
)


@dataclass(frozen=True)
class Stages:
    """What can be done to a run. `start` is a tree that training continues, where the recipe can."""

    run: Run
    data: ImageData
    config: Config
    device: torch.device
    observer: Observer
    start: ProtoTree | None = None

    @cached_property
    def workshop(self) -> Workshop:
        """What the recipe trains with."""
        identity = json.dumps(identity_of(self.config, self.data, self.start), sort_keys=True)
        return Workshop(self.run.folder, self.data, self.config, self.device, self.observer, identity)

    def train(self) -> None:
        """Algorithm 1 up to line 14, or what the recipe has in its place."""
        torch.manual_seed(derived_seed("start", self.config.seed))
        tree = self.config.recipe.train(self.workshop, self.start)
        tree.requires_grad_(True)
        tree.leaf_logits.requires_grad_(False)
        self._save(tree, TRAINED)

    def prune(self) -> Pruned:
        """§5.1."""
        pruned = prune(self.run.tree(TRAINED), self.config.threshold)
        self.observer.stage(str(pruned))
        self._save(pruned.tree, PRUNED)
        self._drop(PROJECTED, ANY_CLASS)  # only now: a save that fails leaves all as it was
        self.run.note(
            pruning={
                "threshold": pruned.threshold,
                "leaves": [pruned.leaves_before, pruned.leaves_after],
                "prototypes": [pruned.prototypes_before, pruned.prototypes_after],
                "pruned_fraction": pruned.pruned_fraction,
            }
        )
        return pruned

    def project(self) -> Projected:
        """Eq. 6 or S1, with the other one measured beside it."""
        tree, config = self.run.tree(PRUNED).to(self.device), self.config
        self.observer.stage(f"projecting {tree.n_prototypes} prototypes onto {len(self.data.train)} training photos")
        batches = config.recipe.source_batches(self.workshop, tree)
        photos = SourcePhotos(self.data.folder, batches.entries)
        maps = maps_of(batches, tree.features, self.device)
        projected = project(tree, maps, photos, project_within_class=config.project_within_class, compare=True)
        measure_again(projected, batches.entries)
        self._save(projected.tree, PROJECTED)
        self._drop(ANY_CLASS)
        if projected.unconstrained is not None and config.project_within_class and distributed.is_first():
            other = {"prototypes": projected.unconstrained.vector.view_as(tree.prototypes)}
            checkpoint.write_state(self.run.folder / ANY_CLASS, "state.json", {"version": checkpoint.VERSION}, other)
        if distributed.is_first():
            write_pictures(projected.tree, self.data, self.run.folder / PICTURES)
        if config.recipe.keeps_maps:  # another pass costs little
            self._keep_spreads(projected.tree)
        self.run.note(
            projection={
                "constrained": config.project_within_class,
                "mean_distance": projected.mean_distance,
                "distances": projected.nearest.distance.tolist(),
                "constraint_cost": projected.constraint_cost,
                "duplicates": projected.n_duplicates,
            }
        )
        return projected

    def _keep_spreads(self, tree: ProtoTree) -> None:
        """So that the first decision that is explained already shows where its photo lies among the training photos."""
        batches = self.workshop.cached(self._maps(tree, self.data.train))
        spreads = count_spreads(tree, maps_of(batches, tree.features, self.device), first_views(batches.entries))
        if distributed.is_first():
            keep_spreads(tree, spreads, self.run.folder / PAGES)

    def evaluate(self) -> dict[str, Metrics]:
        """All stages there are, in one pass over the test photos."""
        names = [name for name in reversed(checkpoint.STAGES) if (self.run.folder / name).exists()]
        trees = {name: self.run.tree(name).to(self.device) for name in names}
        first, last = trees[names[0]], trees[names[-1]]
        if (self.run.folder / ANY_CLASS).exists():
            trees[ANY_CLASS] = self._with_any_class(last)
        self.observer.stage(f"evaluating on {len(self.data.test)} test photos")
        batches = self.test_batches(first)
        finder, beside = ErrorCollector(last), ClassifierAccuracy(self._baseline(first))
        maps = beside.watch(batches, first.features, self.device)
        metrics = evaluate_all(trees, finder.watch(maps))
        self._write_mistakes(finder, batches.entries)
        self.run.note(
            version=METRICS_VERSION,
            data={"kind": self.data.kind, "train": len(self.data.train), "test": len(self.data.test)},
            classes=list(self.data.class_names),
            stages={name: one.to_json() for name, one in metrics.items()},
            classifier=beside.accuracy(),
        )
        if distributed.is_first():
            write_results(self.run)
        return metrics

    def _baseline(self, tree: ProtoTree) -> Baseline | None:
        found = load_baseline(tree.features, tree.n_classes, self.run.folder)
        return found.to(self.device) if found is not None else None

    def test_batches(self, tree: ProtoTree, *, kept: bool = True) -> Batches:
        """Every test photo, whole; as maps that are kept, where the network never learns."""
        dataset = ViewDataset(self.data.test, evaluation_views, tree.preprocessing)
        if not kept or not self.config.recipe.keeps_maps or self.config.strict:
            return self.workshop.photos(dataset)
        return self.workshop.cached(self._maps(tree, self.data.test))

    def _maps(self, tree: ProtoTree, samples: Sequence[Sample]) -> MapCache:
        """Whole photos as the tree sees them."""
        dataset = ViewDataset(samples, evaluation_views, tree.preprocessing)
        sets = kept_sets(self.data, self.config.recipe.source_views(self.data), tree.preprocessing)
        return self.workshop.judged_maps(tree.features.backbone.unsplit(), dataset, sets)

    def _with_any_class(self, tree: ProtoTree) -> ProtoTree:
        """The tree with the prototypes that were found without class constraints."""
        other = tree.with_topology(tree.topology, np.arange(tree.topology.n_nodes), np.arange(tree.topology.n_leaves))
        found = checkpoint.read_state(self.run.folder / ANY_CLASS, "state.json")[1]["prototypes"]
        other.prototypes.data.copy_(found)
        return other

    def _write_mistakes(self, finder: ErrorCollector, entries: Sequence[Entry]) -> None:
        finder.gather()
        found = finder.to_json()
        for mistake in found["images"]:
            mistake["image"] = self.data.name(entries[mistake.pop("place")].sample)
        if distributed.is_first():
            write_json(self.run.folder / ERRORS, found)

    def _save(self, tree: ProtoTree, stage: str) -> None:
        if distributed.is_first():
            checkpoint.save(tree, self.run.folder / stage)
        distributed.wait_for_all()

    def _drop(self, *names: str) -> None:
        """Removes results that no longer fit the tree before them."""
        if distributed.is_first():
            for name in names:
                shutil.rmtree(self.run.folder / name, ignore_errors=True)


def identity_of(config: Config, data: ImageData, start: ProtoTree | None) -> dict[str, object]:
    """What must be the same for a run to be continued."""
    given = {"start": checkpoint.fingerprint(start)} if start is not None else {}
    return {"version": 3, **config.identity(), "classes": data.n_classes, "train": len(data.train), **given}
