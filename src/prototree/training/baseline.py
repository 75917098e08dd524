"""The classifier that a tree was taught by, kept beside it: what the same features reach without a tree.

Notation used for tensor shapes: B batch, C channels of the backbone's map, K classes.
"""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prototree.backbones.backbone import FeatureExtractor, WideHead
from prototree.core import checkpoint
from prototree.errors import CheckpointError

FOLDER, _HEADER = "classifier", "classifier.json"
LOGIT_GAIN = 4.0  # pooled values lie in [0, 1]; without it the logits grow slowly


class Baseline(nn.Module):
    """Patches through a head of its own, max-pooled, and a linear layer."""

    def __init__(self, head: WideHead, linear: nn.Linear) -> None:
        super().__init__()
        self.head, self.linear = head, linear

    def forward(self, backbone_map: Float[Tensor, "B C H W"]) -> Float[Tensor, "B K"]:
        pooled = torch.sigmoid(self.head(backbone_map)).amax(dim=(2, 3))
        return self.linear(LOGIT_GAIN * pooled)  # type: ignore[no-any-return]


def save_baseline(head: nn.Module, linear: nn.Linear, folder: Path) -> None:
    """Keeps a trained classifier in the folder of a run."""
    tensors = {f"head.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors |= {f"linear.{name}": tensor for name, tensor in linear.state_dict().items()}
    checkpoint.write_state(folder / FOLDER, _HEADER, {"version": checkpoint.VERSION}, tensors)


def load_baseline(features: FeatureExtractor, n_classes: int, folder: Path) -> Baseline | None:
    """The classifier of a run, for maps of its backbone; None where the run has none."""
    if not (folder / FOLDER / _HEADER).exists():
        return None
    head = WideHead(features.backbone.n_channels, features.head_hidden_dim, features.prototype_dim)
    baseline = Baseline(head, nn.Linear(features.prototype_dim, n_classes))
    try:
        baseline.load_state_dict(checkpoint.read_state(folder / FOLDER, _HEADER)[1])
    except RuntimeError as error:
        raise CheckpointError(f"{folder / FOLDER} does not fit the run ({str(error)[:200]}); delete it") from error
    return baseline.eval()
