"""Random numbers of a training step, drawn for the whole batch in every process, so that several equal one.

All processes have the same generator in the same state. Each draws what the whole batch needs and uses its own rows.

Notation used for tensor shapes: B this process's share of a batch, C channels, H W map.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prototree.training import distributed


@dataclass(frozen=True)
class WholeBatch:
    """Where this process's rows lie in the batch that all processes share."""

    start: int
    stop: int
    total: int

    @classmethod
    def around(cls, rows: Tensor) -> "WholeBatch":
        """The batch that these rows of this process belong to."""
        lengths = distributed.lengths(len(rows))
        start = sum(lengths[: distributed.shard().rank])
        return cls(start, start + len(rows), sum(lengths))

    def own(self, drawn: Tensor) -> Tensor:
        """This process's rows of what was drawn for the whole batch."""
        return drawn[self.start : self.stop]

    def dropout(self, x: Float[Tensor, "B C *rest"], share: float) -> Float[Tensor, "B C *rest"]:
        """Values set to 0 at random and the others raised in return; of maps, whole channels."""
        if not share:
            return x
        kept = x.new_empty(self.total, x.shape[1], *(1,) * (x.dim() - 2)).bernoulli_(1 - share).div_(1 - share)
        return x * self.own(kept)

    def cutmix(
        self, x: Float[Tensor, "B C H W"]
    ) -> tuple[Float[Tensor, "B C H W"], Int[Tensor, " B"], Float[Tensor, "B 1"]]:
        """Random patches replaced by those of another photo of the whole batch; the partners, and one's own share."""
        partner = self.own(torch.randperm(self.total, device=x.device))
        places, levels = ((self.total, 1, *size) for size in (x.shape[2:], (1, 1)))
        keep = self.own(torch.rand(places, device=x.device) < torch.rand(levels, device=x.device))
        everyone = torch.cat(distributed.gather(x))
        return torch.where(keep, x, everyone[partner]), partner, keep.to(x.dtype).mean(dim=(2, 3))
