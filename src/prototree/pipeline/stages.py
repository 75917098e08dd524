"""The stages of a run, each on one data set with one configuration: train, prune, project, evaluate."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prototree.config import Config
from prototree.core import checkpoint
from prototree.core.checkpoint import PROJECTED, PRUNED, TRAINED
from prototree.core.model import ProtoTree
from prototree.core.projection import Projection, project
from prototree.core.pruning import Pruned, prune
from prototree.data import ImageData, Sample
from prototree.data.crops import evaluation_views
from prototree.data.dataset import class_counts
from prototree.data.loader import Entry, ViewDataset, Views, stable_seed
from prototree.errors import ConfigError
from prototree.evaluation import plots
from prototree.evaluation.metrics import BaselineAccuracy, ErrorCollector, evaluate_all
from prototree.evaluation.published import UNCONSTRAINED
from prototree.evaluation.schema import Metrics
from prototree.evaluation.tables import (
    baseline_text,
    class_table,
    confusion_pairs,
    detail_table,
    image_error_table,
    imbalance_text,
    node_error_table,
    ood_table,
    quality_table,
    quality_text,
    stage_table,
)
from prototree.explanation.assets import AssetStore
from prototree.explanation.neighbours import count_histograms, first_views
from prototree.features.cache import EvalBatches
from prototree.io import make_folder, read_json, write_file, write_json
from prototree.progress import Observer
from prototree.run import ASSETS, ERRORS, METRICS_VERSION, NOTES, RESULTS, Run, move_notes, notes_by_patch
from prototree.training import RECIPES, distributed
from prototree.training.finetuned import load_finetuned
from prototree.training.head import load_baseline
from prototree.training.loop import Context
from prototree.training.sources import attach_sources, prototype_views

STAGES = ("train", "prune", "project", "evaluate")


@dataclass(frozen=True)
class RunStages:
    """The four stages of a run. `start` is a tree that training continues, where the recipe can."""

    run: Run
    data: ImageData
    config: Config
    device: torch.device
    observer: Observer
    start: ProtoTree | None = None

    @property
    def context(self) -> Context:
        """Make the context that the recipe trains with."""
        key = json.dumps(resume_key(self.config, self.data, self.start), sort_keys=True)
        return Context(self.run.folder, self.data, self.config, self.device, self.observer, key)

    def train(self) -> None:
        """Algorithm 1 up to line 14, or what the recipe has in its place."""
        torch.manual_seed(stable_seed("start", self.config.seed))
        tree = RECIPES[self.config.recipe.name](self.context, self.config.recipe, self.start)
        tree.requires_grad_(True)
        tree.leaf_logits.requires_grad_(False)
        if distributed.is_main():
            checkpoint.save(tree, self.run.folder / TRAINED)

    def prune(self) -> Pruned:
        """Remove leaves without a clear class, and the nodes above them (§5.1)."""
        notes = self.run.notes
        before = self.run.tree(PRUNED if (self.run.folder / PRUNED).exists() else None) if notes else None
        pruned = prune(self.run.tree(TRAINED), self.config.prune_threshold)
        self.observer.stage(str(pruned))
        checkpoint.save(pruned.tree, self.run.folder / PRUNED)
        self._drop(PROJECTED, UNCONSTRAINED)  # only now: a save that fails leaves all as it was
        if before is not None:
            moved = move_notes(notes, before, pruned.tree, _vectors)
            write_json(self.run.folder / NOTES, notes_by_patch(moved, pruned.tree))
        self.run.update_metrics(
            pruning={
                "threshold": pruned.threshold,
                "leaves": [pruned.leaves_before, pruned.leaves_after],
                "prototypes": [pruned.prototypes_before, pruned.tree.n_prototypes],
                "pruned_fraction": pruned.pruned_fraction,
            }
        )
        return pruned

    def project(self) -> Projection:
        """Replace prototypes by training patches (Eq. 6 or S1, the other one measured beside it)."""
        tree, config, folder = self.run.tree(PRUNED).to(self.device), self.config, self.run.folder
        self.observer.stage(f"projecting {tree.n_prototypes} prototypes onto {len(self.data.train)} training images")
        batches = self.batches(tree, self.data.train, prototype_views(config.recipe, self.data))
        within, maps = config.project_within_class, batches.encoded(tree.features, self.device)
        projection = project(tree, maps, project_within_class=within, compare=True)
        attach_sources(projection, batches.entries, self.data.folder)
        checkpoint.save(projection.tree, folder / PROJECTED)
        self._drop(UNCONSTRAINED)
        if projection.unconstrained is not None and within:
            other = {"prototypes": projection.unconstrained.vector.view_as(tree.prototypes)}
            checkpoint.write_state(folder / UNCONSTRAINED, "state.json", {"version": checkpoint.VERSION}, other)
        assets = AssetStore(projection.tree, folder / ASSETS)
        assets.save_pictures(self.data)
        if config.recipe.frozen_backbone:  # another pass costs little, and the first decision shows its histograms
            own = self.batches(projection.tree, self.data.train, evaluation_views)
            maps = own.encoded(projection.tree.features, self.device)
            assets.save_histograms(count_histograms(projection.tree, maps, first_views(own.entries)))
        self.run.update_metrics(
            projection={
                "constrained": within,
                "mean_distance": projection.mean_distance,
                "distances": projection.nearest.distance.tolist(),
                "class_constraint_gap": projection.class_constraint_gap,
                "duplicates": projection.n_duplicates,
            }
        )
        return projection

    def evaluate(self) -> dict[str, Metrics]:
        """Evaluate the tree after every stage in one pass over the test images."""
        names = [name for name in reversed(checkpoint.STAGES) if (self.run.folder / name).exists()]
        if not names:
            raise ConfigError(f"expected a trained tree in {self.run.folder}, got none; run the stage train first")
        trees = {name: self.run.tree(name).to(self.device) for name in names}
        first, last = trees[names[0]], trees[names[-1]]
        if (self.run.folder / UNCONSTRAINED).exists():
            trees[UNCONSTRAINED] = self._unconstrained(last)
        self.observer.stage(f"evaluating on {len(self.data.test)} test images")
        batches = self.batches(first, self.data.test, evaluation_views)
        own = (first.features, first.n_classes, self.run.folder)
        baseline = load_baseline(*own) or load_finetuned(*own)
        errors, beside = ErrorCollector(last), BaselineAccuracy(baseline.to(self.device) if baseline else None)
        maps = beside.watch(batches, first.features, self.device)
        metrics = evaluate_all(trees, errors.watch(maps))
        self._write_errors(errors, batches.entries)
        self.run.update_metrics(
            version=METRICS_VERSION,
            data={
                "kind": self.data.kind,
                "train": len(self.data.train),
                "test": len(self.data.test),
                "train_per_class": class_counts(self.data.train, self.data.n_classes),
                "oversampled": self.config.recipe.oversamples,
            },
            classes=list(self.data.class_names),
            stages={name: stage.to_json() for name, stage in metrics.items()},
            baseline_accuracy=beside.accuracy(),
        )
        write_results(self.run)
        return metrics

    def batches(self, tree: ProtoTree, samples: Sequence[Sample], views: Views) -> EvalBatches:
        """Load views of images for a finished tree, as cached feature maps where the backbone is frozen."""
        config, dataset = self.config, ViewDataset(samples, views, tree.preprocessing)
        maps = None
        if config.recipe.frozen_backbone and not config.fail_on_bad_images:
            backbone = tree.features.backbone.merge_last_block().to(self.device)
            backbone.freeze(True)
            maps = self.context.cache.full(backbone, dataset)
        strict = config.fail_on_bad_images
        return EvalBatches(dataset.entries, maps, dataset, config.batch_size, config.workers, strict)

    def _unconstrained(self, tree: ProtoTree) -> ProtoTree:
        """Copy the tree with the prototypes that were found without class constraints."""
        other = tree.with_topology(tree.topology, np.arange(tree.topology.n_nodes), np.arange(tree.topology.n_leaves))
        other.prototypes.data.copy_(
            checkpoint.read_state(self.run.folder / UNCONSTRAINED, "state.json")[1]["prototypes"]
        )
        return other

    def _write_errors(self, errors: ErrorCollector, entries: Sequence[Entry]) -> None:
        content = errors.to_json()
        for image in content["images"]:
            image["image"] = self.data.name(entries[image.pop("index")].sample)
        write_json(self.run.folder / ERRORS, content)

    def _drop(self, *names: str) -> None:
        """Remove results that no longer fit the tree before them."""
        for name in names:
            shutil.rmtree(self.run.folder / name, ignore_errors=True)


def _vectors(tree: ProtoTree) -> list[bytes]:
    return [vector.cpu().numpy().tobytes() for vector in tree.prototypes.detach()]


def write_results(run: Run) -> None:
    """Write tables of the evaluated stages to `results.md`, and plots where matplotlib is installed."""
    metrics, folder = run.metrics, run.folder
    stages = [stage for stage in reversed(checkpoint.STAGES) if stage in metrics.get("stages", {})]
    if not stages or not (folder / ERRORS).exists():
        return
    errors = read_json(folder / ERRORS)
    tables = [
        stage_table(metrics, folder.name),
        detail_table(metrics),
        *([ood_table(metrics["ood"])] if "ood" in metrics else []),
        class_table(metrics, stages[-1]),
        node_error_table(errors),
        image_error_table(errors, metrics["classes"]),
    ]
    first, *others = (table.to_markdown() for table in tables)
    quality = run.prototype_quality(run.tree()) if "prototype_quality" in metrics else {}
    said = (baseline_text(metrics), imbalance_text(metrics), quality_text(quality))
    sentences = [f"{text}\n" for text in said if text]
    if quality:
        sentences.append(quality_table(quality).to_markdown())
    write_file(folder / RESULTS, "\n".join([first, *sentences, *others]).encode())
    if not plots.available():
        return
    make_folder(folder / "plots")
    for stage in stages:
        values, title = metrics["stages"][stage], f"{folder.name}, {stage}"
        leaves = plots.leaf_max_probs(values["leaf_max_probs"], len(metrics["classes"]), title)
        write_file(folder / "plots" / f"leaf_max_probs_{stage}.png", plots.png(leaves))
    matrix = plots.confusion(confusion_pairs(metrics, stages[-1]), metrics["classes"], title)
    write_file(folder / "plots" / "confusion.png", plots.png(matrix))


def resume_key(config: Config, data: ImageData, start: ProtoTree | None) -> dict[str, object]:
    """Collect what must be the same for a run to be resumed."""
    given = {"start": checkpoint.fingerprint(start)} if start is not None else {}
    return {"version": 1, **config.resume_key(), "classes": data.n_classes, "train": len(data.train), **given}
