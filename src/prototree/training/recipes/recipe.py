"""What a recipe is: the one seam between the pipeline and a way of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from prototree.data.dataset import ImageData, Sample
from prototree.data.views import View
from prototree.settings import Common, Settings

if TYPE_CHECKING:
    from prototree.core.model import ProtoTree
    from prototree.features.batches import Batches
    from prototree.training.workshop import Workshop


@dataclass(frozen=True)
class Recipe(Settings):
    """A way to train a tree, with its settings."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for the help
    continues_trees: ClassVar[bool] = False  # whether it can train with the prototypes of a given tree where they are

    keeps_maps: ClassVar[bool] = False  # whether its network never learns, so that maps of it are worth keeping

    def check(self, settings: Common) -> None:
        """Refuses common settings that the recipe cannot work with."""

    def derived(self, data: ImageData) -> "Recipe":
        """The same with everything filled in that follows from the data."""
        return self

    def source_views(self, data: ImageData) -> Callable[[Sample], Sequence[View]]:
        """The views of a training photo that prototypes come from."""
        raise NotImplementedError

    def train(self, workshop: "Workshop", start: "ProtoTree | None" = None) -> "ProtoTree":
        """A trained tree; with `start`, that tree, trained further with its prototypes where they are."""
        raise NotImplementedError

    def share_maps(self, workshop: "Workshop") -> None:
        """Computes the maps that all runs on the same photos have in common, where there are such."""

    def source_batches(self, workshop: "Workshop", tree: "ProtoTree") -> "Batches":
        """The views of all training photos that prototypes come from, in order, for projection."""
        raise NotImplementedError
