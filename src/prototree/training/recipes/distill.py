"""For frozen features, small data and no GPU: the recipe of the presets `default` and `demo`, told from top to bottom.

The model is the paper's; how it gets there is not. (1) The backbone stays frozen, and its maps of a few views of every
photo are computed once. (2) The head learns as a plain max-pooled classifier, which is also the teacher; beside that it
learns to know every class by a single patch, because that is all that a node of the tree will see. (3) The tree
starts with one leaf per class, grown from the classes (`growth`). (4) While the head learns from the teacher's softened
probabilities, every prototype *is* its source patch, seen through the head as it is at that step, so that projection at
the end moves nothing. Questions begin soft and become sharp, and towards the end the tree's own answer is softened like
the teacher's, so that it may be as sure as it is right (`anchored`). In the last third the tree also sees photos in
which a place is hidden, and learns to need what it shows (`hiding`).
"""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import TYPE_CHECKING, ClassVar, Literal

from prototree.data.dataset import ImageData, Sample
from prototree.data.views import View, source_views, varied_views
from prototree.errors import ConfigError
from prototree.settings import Common, setting
from prototree.training.memory_budget import Room
from prototree.training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from prototree.backbones.backbone import Backbone, FeatureExtractor
    from prototree.backbones.crops import Crops
    from prototree.core.model import ProtoTree
    from prototree.features.batches import Batches, CachedBatches
    from prototree.features.cache import MapCache
    from prototree.training.calibrate import Sure, SureFile
    from prototree.training.objectives import SoftTargets
    from prototree.training.workshop import Workshop

log = logging.getLogger(__name__)

_VIEWS, _HEAD, _TREE, _TARGETS, _BACKBONE = "views", "head as a classifier", "tree", "targets", "backbone"
_HELD = "held"  # the folder of the second tree
FEWEST_EPOCHS, MOST_EPOCHS = 6, 200  # large data at least and small data at most so often
MOST_TEMPERATURE, TEACHER_KEEPS = 2.5, 0.19  # the share of probability that a softened teacher keeps for its answer
LEAF_SWEEPS = 3  # of Eq. 5 over all photos at the end


@dataclass(frozen=True)
class Distill(Recipe):
    """A frozen backbone, a head that first learns as a classifier, and prototypes that stay patches."""

    name: ClassVar[str] = "distill"
    summary: ClassVar[str] = "for small data and no GPU: a frozen network, a tree grown from the classes"
    continues_trees: ClassVar[bool] = True
    keeps_maps: ClassVar[bool] = True

    views: int = setting(
        6, "views of each photo to train on; prototypes come from the first two",
        touch="Fewer save disk and time; 2 is the minimum.", group=_VIEWS, low=2, high=10_000, often=True,
    )  # fmt: skip
    center_crop: float = setting(
        0.7, "share of each side that a second, closer look at the middle of a photo covers; 0: one look only",
        touch="0 halves the time per answer and costs one or two points of accuracy.", group=_VIEWS, low=0, high=0.95,
    )  # fmt: skip
    head_epochs: int = setting(
        0, "epochs of the head as a classifier; 0: enough to see head_views", touch="You want a quick trial.",
        group=_HEAD, low=0, high=1_000_000,
    )  # fmt: skip
    head_views: int = setting(
        38_000, "views that the head sees as a classifier, if head_epochs is 0", touch="The teacher is weak: more.",
        group=_HEAD, low=1, high=10**12,
    )  # fmt: skip
    head_patch_fraction: float = setting(
        0.75, "share of a map's patches used in each step of the head as a classifier",
        touch="Rarely: with fewer the head is a better classifier, but the tree a worse one.", group=_HEAD, low=0.01,
        high=1,
    )  # fmt: skip
    lr_head: float = setting(
        2e-3, "learning rate of the head as a classifier", touch="Rarely.", group=_HEAD, low=0, high=100
    )
    head_weight_decay: float = setting(
        0.05, "weight decay of the head as a classifier", touch="Rarely.", group=_HEAD, low=0, high=100
    )
    single_patch_loss_weight: float = setting(
        1.0, "how much weight the head, as a classifier, puts on recognising each class from a single patch",
        touch="Rarely.", group=_HEAD, low=0, high=100,
    )  # fmt: skip
    cutmix: float = setting(
        0.5, "share of the head's batches in which photos swap patches", touch="Rarely.", group=_HEAD, low=0, high=1
    )
    channel_dropout: float = setting(
        0.1, "share of channels dropped in the head as a classifier", touch="Rarely.", group=_HEAD, low=0, high=0.99
    )
    pooled_dropout: float = setting(
        0.2,
        "share of pooled values dropped in the head as a classifier",
        touch="Rarely.",
        group=_HEAD,
        low=0,
        high=0.99,
    )
    epochs: int = setting(
        0, "epochs of the tree; 0: enough to see tree_views", touch="You want a quick trial.", group=_TREE,
        low=0, high=1_000_000, often=True,
    )  # fmt: skip
    tree_views: int = setting(
        54_000, "views that the tree sees, if epochs is 0", touch="Rarely: longer training overfits.", group=_TREE,
        low=1, high=10**12,
    )  # fmt: skip
    patch_fraction: float = setting(
        0.5, "share of a map's patches used in each step of the tree", touch="Rarely: more is slower and no better.",
        group=_TREE, low=0.01, high=1,
    )  # fmt: skip
    rate: float = setting(
        5e-3, "learning rate of the head under the tree", touch="The loss does not fall.", group=_TREE, low=0, high=100
    )
    weight_decay: float = setting(
        0.01, "weight decay of the head under the tree", touch="Rarely.", group=_TREE, low=0, high=100
    )
    question: Literal["pairwise", "presence"] = setting(
        "pairwise", "what a node asks: which of two patches is nearer, or whether one patch is present",
        touch="presence needs half as many patches, but longer paths.", group=_TREE, often=True,
    )  # fmt: skip
    sharpness_start: float = setting(
        0.0, "sharpness of the questions when training starts; 0: 3 for choice, 1 for presence",
        touch="Rarely.", group=_TREE, low=0, high=64,
    )  # fmt: skip
    sharpness: float = setting(
        6.0,
        "sharpness of the questions when training ends: how abruptly the answer changes from one side to the other",
        touch="Higher makes single paths agree more with the vote.", group=_TREE, low=1, high=64,
    )  # fmt: skip
    sharp_at: float = setting(
        0.7, "share of training after which the sharpness stays constant", touch="Rarely.", group=_TREE,
        low=0.01, high=1,
    )  # fmt: skip
    max_mean_depth: float = setting(
        9.0, "with presence: mean number of questions on a path, at most",
        touch="Lower gives shorter paths, with more classes per question.", group=_TREE, low=1, high=1e9,
    )  # fmt: skip
    init_median_distance: float = setting(
        0.7, "median distance of a random patch to the nearest patch of another photo when the tree starts",
        touch="Rarely.", group=_TREE, low=0.01, high=100,
    )  # fmt: skip
    margin: float = setting(
        0.1, "with presence: weight of the margin at every decision on the path to the true class", touch="Rarely.",
        group=_TREE, low=0, high=100,
    )  # fmt: skip
    near: float = setting(
        0.5, "with presence: largest distance wanted at right turns, where the reach counts as 0.69",
        touch="Rarely.", group=_TREE, low=0, high=100,
    )  # fmt: skip
    far: float = setting(
        1.0, "with presence: smallest distance wanted at left turns", touch="Rarely.", group=_TREE, low=0, high=100
    )
    continue_fraction: float = setting(
        0.25, "length of `prototree finetune`, as a share of the usual training", touch="Rarely.", group=_TREE,
        low=0.01,
        high=1,
    )  # fmt: skip
    hiding: float = setting(
        0.3, "how much weight the tree puts on needing what it shows: with that place hidden, the match should go; "
        "0: none", touch="0 if time is short, or places do not matter.", group=_TREE, low=0, high=100,
    )  # fmt: skip
    distill_weight: float = setting(
        1.0, "the head's share in the tree's targets; the labels have the rest", touch="Labels matter more than looks.",
        group=_TARGETS, low=0, high=1,
    )  # fmt: skip
    temperature: float = setting(
        0.0, "how much the head's probabilities are softened, and by the end the tree's; 0: from the number of "
        "classes (2.5 up to 50, 1.9 for 200)", touch="Rarely.", group=_TARGETS, low=0, high=1000,
    )  # fmt: skip
    student_temperature_start: float = setting(
        0.4, "share of training after which softening of the tree's answer begins", touch="Rarely.",
        group=_TARGETS, low=0, high=1,
    )  # fmt: skip
    student_temperature_end: float = setting(
        0.9, "share of training after which the tree's answer is softened as much as the head's",
        touch="Rarely.", group=_TARGETS, low=0, high=1,
    )  # fmt: skip
    hold_out: int = setting(
        5, "every n-th photo of a class is held out once, to calibrate the percentages; 0: no calibration",
        touch="0 if time is short and percentages do not matter.", group=_TARGETS, low=0, high=1000,
    )  # fmt: skip
    memory: float = setting(
        Room.gigabytes, "gigabytes for maps, distances and soft labels while a tree is learned; what is more is put in "
        "a file, computed again or left out", touch="Memory is short, or there are many classes and much memory.",
        group=_TREE, low=0, high=100_000,
    )  # fmt: skip
    pretrain_epochs: int = setting(
        0, "epochs of training the backbone as a plain classifier first",
        touch="The backbone has no pretrained weights, or you have a GPU.", group=_BACKBONE, low=0, high=1_000_000,
    )  # fmt: skip
    lr_pretrain: float = setting(
        2e-4, "learning rate of a pretrained backbone while it is trained as a classifier",
        touch="You use pretrain_epochs.", group=_BACKBONE, low=0, high=100,
    )  # fmt: skip

    @property
    def room(self) -> Room:
        """What the memory is spent on."""
        return Room(self.memory)

    def check(self, settings: Common) -> None:
        if not settings.head_hidden_dim:
            raise ConfigError(
                "the recipe 'distill' needs a hidden layer: expected head_hidden_dim of at least 1, got 0"
            )
        self._looks()

    def derived(self, data: ImageData) -> "Distill":
        return replace(self, temperature=self.temperature or temperature_for(data.n_classes))

    def source_views(self, data: ImageData) -> Callable[[Sample], Sequence[View]]:
        """The photo, and a closer look at what it is about."""
        return source_views

    def train(self, workshop: "Workshop", start: "ProtoTree | None" = None) -> "ProtoTree":
        """The whole recipe: maps, then a tree, then how sure its answers are."""
        if start is not None:
            return self._continued(workshop, start)
        backbone = self._backbone(workshop)
        maps = self._maps(workshop, backbone, self._looks())
        learn = partial(self._learn, workshop, backbone, maps, "")
        held = self._held(maps) if self.hold_out else frozenset()
        return self._with_confidence(learn, workshop, backbone, maps, held) if held else learn()

    def _continued(self, workshop: "Workshop", start: "ProtoTree") -> "ProtoTree":
        """The head is trained further; where the confidence was calibrated before, it is calibrated again.

        That uses the photos that gave feedback, as after every edit: they are not learned from, whereas the head has
        seen all others. Training uses the recipe's sharpness; the one that was fitted to the tree before would leave it
        as unsure as its teacher.
        """
        from prototree.training.calibrate import FEWEST_HELD, fit_held, fit_sharpness, look_at_held

        backbone, photos = start.features.backbone.unsplit(), workshop.data.feedback
        is_fitted = self.hold_out and start.calibration.n_photos and len(photos) >= FEWEST_HELD
        if is_fitted:
            start.question = replace(start.question, sharpness=self.sharpness)
        tree = self._learn(workshop, backbone, self._maps(workshop, backbone, backbone.crops), "", start)
        if is_fitted:
            whole = self._whole(workshop, backbone, backbone.crops, photos)
            found = look_at_held(tree, workshop.cached(whole), range(len(photos)))
            tree.question = replace(tree.question, sharpness=fit_sharpness(tree, found))
            tree.calibration = fit_held(tree, found)
        return tree

    def _whole(
        self, workshop: "Workshop", backbone: "Backbone", crops: "Crops", photos: Sequence[Sample]
    ) -> "MapCache":
        """Whole photos as a finished tree sees them; where a run has kept their maps, those."""
        from prototree.data.loading import ViewDataset
        from prototree.data.views import evaluation_views
        from prototree.features.cache import kept_sets

        looking = copy(backbone)
        looking.crops = crops
        sets = kept_sets(workshop.data, source_views, backbone.preprocessing)
        return workshop.judged_maps(looking, ViewDataset(photos, evaluation_views, backbone.preprocessing), sets)

    def _looks(self) -> "Crops":
        from prototree.backbones.crops import FULL_ONLY, checked

        return checked((*FULL_ONLY, self.center_crop)) if self.center_crop else FULL_ONLY

    def _learn(
        self,
        workshop: "Workshop",
        backbone: "Backbone",
        maps: "Maps",
        folder: str,
        start: "ProtoTree | None" = None,
    ) -> "ProtoTree":
        """Head, tree and leaves, from cached maps."""
        from prototree.core.model import ProtoTree
        from prototree.core.nodes import NodeFunction
        from prototree.training.anchored import AnchoredObjective
        from prototree.training.grow import grow, rest_norm, sample_maps, standardise, start_from
        from prototree.training.leaf_training import refit_leaves
        from prototree.training.occlusion_loss import OccludedPairs

        features = workshop.features(backbone)
        judged, batches = workshop.cached(maps.judged), workshop.cached(maps.every, shuffle=True)
        some, labels = sample_maps(workshop.cached(maps.plain), self.room)
        standardise(features.to("cpu"), some)
        targets = self._targets(workshop, features, batches, folder)
        if start is None:
            rest_norm(features.to("cpu"), some)
            seed, question = workshop.settings.seed, NodeFunction(self.question, self.sharpness)
            scale = self.max_mean_depth, self.init_median_distance
            grown = grow(features, some, labels, self.question, *scale, seed, self.room)
            tree = ProtoTree(grown.topology, features, workshop.data.class_names, question=question)
        else:
            tree, grown = start, start_from(start, judged, workshop.data.folder)
        tree.look(maps.crops)
        twins = OccludedPairs.of(maps.judged, maps.hidden, tree.preprocessing) if maps.hidden is not None else None
        epochs = self._tree_epochs(len(batches.entries), 1.0 if start is None else self.continue_fraction)
        objective = AnchoredObjective(tree, batches, self, epochs, targets, grown, judged, twins)
        workshop.observer.stage(f"training {tree.n_prototypes} prototypes for {epochs} epochs")
        workshop.train(objective, batches, epochs, f"{folder}last")
        objective.update_tree()
        refit_leaves(tree, objective.sweep_labels, n_sweeps=LEAF_SWEEPS)
        return tree

    def _held(self, maps: "Maps") -> frozenset[int]:
        """Photos to learn from how sure answers are; none where they are too few."""
        from prototree.training.calibrate import FEWEST_HELD, held_photos

        held = held_photos(maps.plain.entries, self.hold_out)
        if len(held) >= FEWEST_HELD:
            return held
        log.warning(
            "the confidence is not calibrated: that takes %d photos to hold out, and one in %d of each class "
            'gives %d; it then only ranks answers, and the tree never says "I don\'t know" by itself; '
            "add photos, or lower --hold-out",
            *(FEWEST_HELD, self.hold_out, len(held)),
        )
        return frozenset()

    def _with_confidence(
        self,
        learn: Callable[[], "ProtoTree"],
        workshop: "Workshop",
        backbone: "Backbone",
        maps: "Maps",
        held: frozenset[int],
    ) -> "ProtoTree":
        """The tree, and how sure its answers are, which a second tree tells all runs on the same photos.

        Where there are cores for both, they are learned side by side. Else, of several runs at a time, the first learns
        the second tree before its own, so that none has to wait for it.
        """
        from prototree.features.registry import alone, note_use
        from prototree.locks import if_free
        from prototree.training import distributed
        from prototree.training.beside import beside, is_possible

        file = self._sure_file(workshop, backbone, maps)
        note_use(workshop.folder, file.path.name)

        def how_sure(workshop: "Workshop") -> "Sure":
            with alone(file.path):
                return file.kept or file.keep(self._how_sure(workshop, backbone, maps, held))

        if file.kept:
            workshop.observer.stage("the confidence has been calibrated before, with the same photos and settings")
        elif is_possible(workshop.device):
            workshop.observer.stage(
                f"training a second tree at the same time, without {len(held)} photos, to calibrate the confidence"
            )
        elif distributed.shard().world_size == 1:
            with if_free(file.path.with_suffix(".lock")) as is_first:
                if is_first and not file.kept:
                    file.keep(self._how_sure(workshop, backbone, maps, held))
        with beside(None if file.kept else lambda: how_sure(workshop.unheard()), workshop.device) as wait:
            tree = learn()
            wait()
            return how_sure(workshop).taught(tree)

    def _sure_file(self, workshop: "Workshop", backbone: "Backbone", maps: "Maps") -> "SureFile":
        """The same for all seeds, unless the network is another one for each."""
        import torch

        from prototree.features.registry import folder_beside, shared_folder
        from prototree.training.beside import is_possible
        from prototree.training.calibrate import SureFile

        settings = {**workshop.settings.identity(), **self.identity()}
        if self._is_same_for_all_seeds(backbone):
            del settings["seed"]
        settings["threads"] = 1 if is_possible(workshop.device) else torch.get_num_threads()  # they change last digits
        every = [one for one in (maps.every, maps.judged, maps.hidden) if one is not None]
        folders = (
            shared_folder(workshop.folder),
            folder_beside(workshop.folder),
        )  # the second may be read-only
        files = [SureFile.of(folder, every, settings) for folder in dict.fromkeys(folders)]
        return next((file for file in files if file.kept), files[0])

    def _how_sure(self, workshop: "Workshop", backbone: "Backbone", maps: "Maps", held: frozenset[int]) -> "Sure":
        """Fitted on photos that a second tree, trained like the first, has not seen; the first one loses none."""
        import torch

        from prototree.data.loading import derived_seed
        from prototree.training.calibrate import fit_sure, look_at_held

        workshop.observer.stage(f"training a second tree without {len(held)} photos, to calibrate the confidence")
        if self._is_same_for_all_seeds(backbone):
            workshop = replace(workshop, settings=replace(workshop.settings, seed=0))
        drawn = torch.get_rng_state()
        torch.manual_seed(derived_seed("second tree", workshop.settings.seed))
        other = self._learn(workshop, backbone, maps.without(held), f"{_HELD}/")
        torch.set_rng_state(drawn)  # for the first tree, whichever is learned first
        return fit_sure(other, look_at_held(other, workshop.cached(maps.judged), held))

    def _is_same_for_all_seeds(self, backbone: "Backbone") -> bool:
        """The network: it came with weights and stays as it is."""
        return bool(backbone.weights) and not self.pretrain_epochs

    def share_maps(self, workshop: "Workshop") -> None:
        backbone = workshop.backbone(split=False)
        if self._is_same_for_all_seeds(backbone):
            self._maps(workshop, backbone, self._looks())
            self._whole(workshop, backbone, self._looks(), workshop.data.test)

    def source_batches(self, workshop: "Workshop", tree: "ProtoTree") -> "Batches":
        from prototree.features.cache import MapCache

        backbone = tree.features.backbone.unsplit()
        views = workshop.views(source_views, tree.preprocessing)
        crops = workshop.all_maps(backbone, [views.looking(share) for share in backbone.crops])
        return workshop.cached(MapCache.stack_crops(crops))  # all of them are there already

    def _backbone(self, workshop: "Workshop") -> "Backbone":
        from prototree.data.loading import ViewDataset
        from prototree.data.transforms import augmentation

        backbone = workshop.backbone(split=False)
        if self.pretrain_epochs:
            preprocessing, seed = backbone.preprocessing, workshop.settings.seed
            light = augmentation("light", preprocessing)  # new in every epoch
            photos = ViewDataset(workshop.data.train, source_views, preprocessing, transform=light, seed=seed)
            workshop.pretrain(backbone, photos, self.pretrain_epochs, self.rate, self.lr_pretrain)
        return backbone

    def _maps(self, workshop: "Workshop", backbone: "Backbone", crops: "Crops") -> "Maps":
        """What the frozen network makes of all views."""
        from prototree.features.cache import MapCache

        preprocessing = backbone.preprocessing
        plain = workshop.views(source_views, preprocessing)
        views = [plain.looking(share) for share in crops]
        if self.views > 2:
            # The same for every seed, so that runs can share the cache.
            more = partial(varied_views, count=self.views - 2, seed=0)
            views.append(workshop.views(more, preprocessing, augment=True))
        found = workshop.all_maps(backbone, views)
        judged, every = MapCache.stack_crops(found[: len(crops)]), reduce(MapCache.join, found[len(crops) :], found[0])
        return Maps(judged, every, crops, self._hidden_maps(workshop, backbone, crops) if self.hiding else None)

    def _hidden_maps(self, workshop: "Workshop", backbone: "Backbone", crops: "Crops") -> "MapCache | None":
        """The same of photos with a place hidden, which depends on the photo and the network alone."""
        from prototree.backbones.crops import patch_grid
        from prototree.data.occlusion import HiddenViews
        from prototree.features.cache import MapCache
        from prototree.training.occlusion_loss import striking_places

        preprocessing = backbone.preprocessing
        grid = patch_grid(backbone.map_size, preprocessing.size, crops)
        whole = self._whole(workshop, backbone, crops, workshop.photos_of_all_folds)
        hidden = workshop.views(HiddenViews(striking_places(whole, grid, preprocessing)), preprocessing)
        found = workshop.all_maps(backbone, [hidden.looking(share) for share in crops]) if len(hidden) else []
        return MapCache.stack_crops(found) if found else None

    def _targets(
        self, workshop: "Workshop", features: "FeatureExtractor", batches: "CachedBatches", folder: str
    ) -> "SoftTargets":
        """What the head, trained as a plain classifier, says of every view."""
        from prototree.training.anchored import HeadObjective
        from prototree.training.objectives import Cosine, SoftTargets

        epochs = self.head_epochs or _epochs_for(self.head_views, len(batches.entries))
        head = HeadObjective(features, workshop.data.n_classes, self, Cosine(epochs, batches.n_batches))
        workshop.observer.stage(f"training the head as a plain classifier for {epochs} epochs")
        workshop.train(head, batches, epochs, f"{folder}head")
        workshop.save_baseline(features.head, head.linear, folder)
        probs = head.probs(batches, self.temperature, workshop.folder / folder)
        return SoftTargets(probs, self.distill_weight)

    def _tree_epochs(self, n_entries: int, share: float) -> int:
        return self.epochs or max(1, round(share * _epochs_for(self.tree_views, n_entries)))


@dataclass(frozen=True)
class Maps:
    """What the frozen network makes of the photos."""

    judged: "MapCache"  # the views that prototypes come from, at all looks: as a finished tree sees them
    every: "MapCache"  # all views to learn from, each looked at once
    crops: "Crops"
    hidden: "MapCache | None" = None  # of photos with places hidden, at all looks

    def without(self, photos: Collection[int]) -> "Maps":
        """Of all other photos."""
        from prototree.training.calibrate import without

        hidden = None if self.hidden is None else without(self.hidden, photos)
        return Maps(without(self.judged, photos), without(self.every, photos), self.crops, hidden)

    @property
    def plain(self) -> "MapCache":
        """The views that prototypes come from, looked at once."""
        return replace(self.judged, closer=())


def temperature_for(n_classes: int) -> float:
    """At most 2.5, and never so high that the softened teacher keeps less than about a fifth for its own answer.

    Label smoothing leaves it a lead of about log(0.9 K / 0.1) over each of the K − 1 other classes.
    """
    from prototree.training.objectives import LABEL_SMOOTHING

    lead = math.log(max(n_classes, 2) * (1 - LABEL_SMOOTHING) / LABEL_SMOOTHING)
    others = math.log(max(n_classes - 1, 1) / (1 / TEACHER_KEEPS - 1))
    return MOST_TEMPERATURE if others <= 0 else min(MOST_TEMPERATURE, round(lead / others, 2))


def _epochs_for(n_views: int, n_entries: int) -> int:
    return min(max(round(n_views / n_entries), FEWEST_EPOCHS), MOST_EPOCHS)
