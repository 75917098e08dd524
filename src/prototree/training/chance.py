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

    def kept(self, n_channels: int, dropped: float, like: Tensor) -> Float[Tensor, "B n_channels"]:
        """What channels are multiplied with: 0 for this share of them, at random, and more than 1 for the others."""
        if not dropped:
            return like.new_ones(self.stop - self.start, n_channels)
        return self.own(like.new_empty(self.total, n_channels).bernoulli_(1 - dropped).div_(1 - dropped))

    def cutmix(
        self, rows: Float[Tensor, "B patches C"]
    ) -> tuple[Float[Tensor, "B patches C"], Int[Tensor, " B"], Float[Tensor, "B 1"]]:
        """Random patches replaced by those of another photo of the whole batch; the partners, and one's own share."""
        partner = self.own(torch.randperm(self.total, device=rows.device))
        places, levels = ((self.total, n, 1) for n in (rows.shape[1], 1))
        keep = self.own(torch.rand(places, device=rows.device) < torch.rand(levels, device=rows.device))
        everyone = torch.cat(distributed.gather(rows))
        return torch.where(keep, rows, everyone[partner]), partner, keep.to(rows.dtype).mean(dim=1)
