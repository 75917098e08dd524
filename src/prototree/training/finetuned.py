"""The baseline of the paper's recipe: the same network, fine-tuned as a plain classifier.

Notation used for tensor shapes: B batch, C channels of the backbone's map, H W feature map, K classes.
"""

import copy
from pathlib import Path
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core import checkpoint
from prototree.errors import CheckpointError
from prototree.training.head import FOLDER

_HEADER = "finetuned.json"


class FinetunedClassifier(nn.Module):
    """A backbone of its own, mean-pooled, and a linear layer."""

    takes_images: ClassVar[bool] = True

    def __init__(self, backbone: Backbone, n_classes: int) -> None:
        super().__init__()
        self.backbone, self.linear = backbone, nn.Linear(backbone.n_channels, n_classes)

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B K"]:
        return self.from_map(self.backbone(images))

    def from_split(self, features: Tensor) -> Float[Tensor, "B K"]:
        """Classify the split features of the backbone."""
        return self.from_map(self.backbone.last_block(features))

    def from_map(self, backbone_map: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K"]:
        """Classify the backbone's feature map."""
        return self.linear(backbone_map.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def save_finetuned(classifier: FinetunedClassifier, folder: Path) -> None:
    """Save a fine-tuned classifier in the folder of a run."""
    checkpoint.write_state(folder / FOLDER, _HEADER, {"version": checkpoint.VERSION}, classifier.state_dict())


def load_finetuned(features: FeatureExtractor, n_classes: int, folder: Path) -> FinetunedClassifier | None:
    """Load the fine-tuned classifier of a run, whose tree has the same kind of network; None where there is none."""
    if not (folder / FOLDER / _HEADER).exists():
        return None
    classifier = FinetunedClassifier(copy.deepcopy(features.backbone), n_classes)
    try:
        classifier.load_state_dict(checkpoint.read_state(folder / FOLDER, _HEADER)[1])
    except RuntimeError as error:
        raise CheckpointError(f"{folder / FOLDER} does not fit the run ({str(error)[:200]}); delete it") from error
    return classifier.eval()
