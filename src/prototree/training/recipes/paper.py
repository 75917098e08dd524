"""The paper's recipe (§4, Algorithm 1, Tables S2 and S3), to the letter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from prototree.data.dataset import ImageData, Sample
from prototree.data.views import View, projection_views, training_views
from prototree.errors import ConfigError
from prototree.settings import setting
from prototree.training.recipes.recipe import Recipe

if TYPE_CHECKING:
    from prototree.backbones.preprocessing import Preprocessing
    from prototree.core.model import ProtoTree
    from prototree.data.loading import ViewDataset
    from prototree.features.batches import Batches
    from prototree.training.objectives import Schedule, SoftTargets
    from prototree.training.workshop import Workshop

_TREE, _RATES, _LEAVES, _TEACHER, _SPEED = "tree", "rates", "leaves", "teacher", "speed"


@dataclass(frozen=True)
class Paper(Recipe):
    """A full tree, everything learned by gradients but the leaves."""

    name: ClassVar[str] = "paper"
    summary: ClassVar[str] = "the published algorithm: a full tree of a given height, prototypes learned by gradients"

    height: int = setting(
        0,
        "edges from the root to the leaves; 0: one more than is needed for one leaf per class",
        touch="Some classes have no leaf: higher. Training takes too long: lower.",
        group=_TREE,
        low=0,
        high=20,
        often=True,
    )
    prototype_height: int = setting(
        1, "rows of a prototype, in cells of the map", touch="You want larger patches.", group=_TREE, low=1, high=256
    )
    prototype_width: int = setting(
        1, "columns of a prototype", touch="You want larger patches.", group=_TREE, low=1, high=256
    )
    epochs: int = setting(
        30, "passes over all photos", touch="Accuracy is still rising at the end: more.", group=_RATES, low=1,
        high=1_000_000, often=True,
    )  # fmt: skip
    freeze_epochs: int = setting(
        30, "epochs in which the backbone stays frozen, except for its last block", touch="You have a GPU: fewer.",
        group=_RATES, low=0, high=1_000_000,
    )  # fmt: skip
    train_last_block: bool = setting(
        True,
        "train the backbone's last block from the start",
        touch="You have few photos or little time: false.",
        group=_RATES,
    )
    lr_prototypes: float = setting(
        1e-3, "learning rate of the prototypes", touch="The loss does not fall.", group=_RATES, low=0, high=100
    )
    lr_last_block: float = setting(
        1e-3, "learning rate of the 1×1 convolution and the backbone's last block",
        touch="The loss does not fall.", group=_RATES, low=0, high=100,
    )  # fmt: skip
    lr_backbone: float = setting(
        1e-5, "learning rate of the rest of the backbone once it is no longer frozen",
        touch="You use another backbone.", group=_RATES, low=0, high=100,
    )  # fmt: skip
    weight_decay: float = setting(
        0.0, "weight decay of the 1×1 convolution only",
        touch="Accuracy is far higher on training photos than on test photos.", group=_RATES, low=0, high=100,
    )  # fmt: skip
    milestones: tuple[int, ...] = setting(
        (), "epochs after which all learning rates are multiplied by gamma", touch="You change epochs.", group=_RATES,
        low=0, high=1_000_000,
    )  # fmt: skip
    gamma: float = setting(
        0.5, "factor for all learning rates at each milestone", touch="Rarely.", group=_RATES, low=0, high=1
    )
    pretrain_epochs: int = setting(
        0, "epochs of training the backbone as a plain classifier first",
        touch="The backbone has no pretrained weights.", group=_RATES, low=0, high=1_000_000,
    )  # fmt: skip
    leaves: Literal["interleaved", "two_pass", "gradient"] = setting(
        "interleaved",
        "how leaves learn: interleaved (Algorithm 1), two_pass (Eq. 5 over all photos first) or gradient",
        touch="You want to compare the three.", group=_LEAVES,
    )  # fmt: skip
    teacher: str = setting(
        "", "where soft labels come from: runs (a,b), or a timm classifier (resnet50=file); empty: no soft labels",
        touch="You have a better model of the same classes.", group=_TEACHER,
    )  # fmt: skip
    distill_weight: float = setting(
        0.7, "the teacher's share in the targets", touch="You use a teacher.", group=_TEACHER, low=0, high=1
    )
    temperature: float = setting(
        2.0, "how much the teacher's probabilities are softened", touch="You use a teacher.", group=_TEACHER, low=0.01,
        high=1000,
    )  # fmt: skip
    cache_views: int = setting(
        0, "views of each photo whose maps are computed once and kept while the backbone is frozen; 0: none",
        touch="You have no GPU: 3 or more; this takes some gigabytes of disk.", group=_SPEED, low=0, high=10_000,
    )  # fmt: skip
    compile: bool = setting(
        False, "compile the backbone with torch.compile", touch="Long runs on a GPU.", group=_SPEED, free=True
    )

    def derived(self, data: ImageData) -> "Paper":
        return replace(self, height=self.height or default_height(data.n_classes))

    def source_views(self, data: ImageData) -> Callable[[Sample], Sequence[View]]:
        """For CUB the bird's box, else the whole photo."""
        return partial(projection_views, kind=data.kind)

    def train(self, workshop: "Workshop", start: "ProtoTree | None" = None) -> "ProtoTree":
        """Algorithm 1 up to line 14."""
        from prototree.core.model import ProtoTree
        from prototree.core.topology import Topology
        from prototree.training.leaf_training import LEAF_TRAINERS
        from prototree.training.objectives import TreeObjective

        if start is not None:
            raise ConfigError("the recipe 'paper' starts its own tree: its prototypes move while they learn")
        backbone = workshop.backbone(split=self.train_last_block)
        if self.pretrain_epochs:
            photos = self._photos(workshop, backbone.preprocessing)
            workshop.pretrain(backbone, photos, self.pretrain_epochs, self.lr_last_block, self.lr_backbone)
        features = workshop.features(backbone)
        size = (self.prototype_height, self.prototype_width)
        tree = ProtoTree(Topology.full(self.height), features, workshop.data.class_names, size)
        if self.compile:
            backbone.compile()
        batches = self._batches(workshop, tree)
        targets = self._soft_targets(workshop)
        objective = TreeObjective(tree, batches, self._schedule(), LEAF_TRAINERS[self.leaves](), targets)
        workshop.observer.stage(f"training {tree.n_prototypes} prototypes for {self.epochs} epochs")
        workshop.train(objective, batches, self.epochs, "last")
        return tree

    def source_batches(self, workshop: "Workshop", tree: "ProtoTree") -> "Batches":
        return workshop.photos(workshop.views(self.source_views(workshop.data), tree.preprocessing))

    def _photos(self, workshop: "Workshop", preprocessing: "Preprocessing") -> "ViewDataset":
        """Every training view, augmented."""
        views = partial(training_views, kind=workshop.data.kind)
        return workshop.views(views, preprocessing, augment=True, seed=workshop.settings.seed)

    def _batches(self, workshop: "Workshop", tree: "ProtoTree") -> "Batches":
        """Photos through the whole network; while the trunk is frozen, its cached maps where there are to be any."""
        from prototree.features.batches import PhasedBatches

        dataset = self._photos(workshop, tree.preprocessing)
        photos = workshop.photos(dataset, shuffle=True)
        if not self.cache_views or not self.freeze_epochs:
            return photos
        maps = workshop.maps(tree.features.backbone, dataset, self.cache_views)
        return PhasedBatches(workshop.cached(maps, shuffle=True), photos, self.freeze_epochs)

    def _schedule(self) -> "Schedule":
        from prototree.training.objectives import Schedule

        return Schedule(
            epochs=self.epochs,
            freeze_epochs=self.freeze_epochs,
            lr_prototypes=self.lr_prototypes,
            lr_last_block=self.lr_last_block,
            lr_backbone=self.lr_backbone,
            weight_decay=self.weight_decay,
            milestones=self.milestones,
            gamma=self.gamma,
        )

    def _soft_targets(self, workshop: "Workshop") -> "SoftTargets | None":
        from prototree.training.objectives import SoftTargets
        from prototree.training.teacher import open_teacher, teach

        if not self.teacher:
            return None
        data = workshop.data
        teacher = open_teacher(self.teacher, data.n_classes, workshop.settings.image_size)
        workshop.observer.stage("asking the teacher")
        plain = workshop.views(partial(training_views, kind=data.kind), teacher.preprocessing)
        probs = teach(teacher, plain, self.temperature, workshop.folder / "teacher")
        return SoftTargets(probs, self.distill_weight)


def default_height(n_classes: int) -> int:
    """⌈log₂K⌉ + 1: 9 for the paper's 200 classes."""
    return max(1, (n_classes - 1).bit_length() + 1)
