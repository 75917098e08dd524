"""Fine-tuning the last blocks of a pretrained backbone as a classifier, before the tree's features are computed.

The head learns first and the blocks then, with a small rate and with batch-norm statistics as they were (LP-FT: Kumar
et al., ICLR 2022). A step runs only the blocks that learn, on cached features of the frozen part. In the end the blocks
go back towards their pretrained weights as far as held-out images say (WiSE-FT: Wortsman et al., CVPR 2022): all the
way where nothing was gained.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from prototree.backbones.backbone import Backbone
from prototree.data.crops import FULL_IMAGE
from prototree.features.cache import FeatureMaps
from prototree.training.grow import standardise
from prototree.training.head import Classifier, wide_head
from prototree.training.loop import Context, Loop, ParamGroup

_LR_HEAD, _LR_HEAD_LATER, _LR_BLOCKS = 2e-3, 5e-4, 1e-4
_WEIGHT_DECAY = 0.05
_ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way from the pretrained weights to the fine-tuned ones
_N_SAMPLES = 500  # maps that the head's channels are standardised with

State = dict[str, Tensor]


def finetune_last_blocks(
    context: Context, backbone: Backbone, maps: FeatureMaps, held_out: frozenset[int], epochs: tuple[int, int]
) -> float:
    """Fine-tune the modules that are split off a backbone; return how far they went, from 0 to 1.

    `maps` are split features, and `epochs` those of the head alone and of both. `held_out` images say how far to go.
    """
    seen = maps.subset([i for i, entry in enumerate(maps.entries) if entry.sample_index not in held_out])
    kept = maps.subset([i for i, e in enumerate(maps.entries) if e.sample_index in held_out and e.view == FULL_IMAGE])
    extractor, blocks = context.features(backbone), nn.ModuleList(backbone.last_modules)
    model = nn.ModuleDict({"classifier": Classifier(wide_head(extractor), context.data.n_classes), "blocks": blocks})
    with torch.no_grad():
        step = max(1, len(seen.entries) // _N_SAMPLES)
        sample = seen.read(range(0, len(seen.entries), step)).values.to(context.device)
        sample = torch.cat([backbone.eval().last_block(part) for part in sample.split(32)]).cpu()
    standardise(extractor.to("cpu"), sample)
    head = ParamGroup(list(model["classifier"].parameters()), _LR_HEAD, _WEIGHT_DECAY)
    context.observer.stage(f"training a classifier for {epochs[0]} epochs, to fine-tune the network with")
    _train(context, "probe", model, backbone, seen, epochs[0], [head])
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    context.observer.stage(f"fine-tuning the last blocks for {epochs[1]} epochs")
    groups = [
        ParamGroup(head.parameters, _LR_HEAD_LATER, _WEIGHT_DECAY),
        ParamGroup(list(blocks.parameters()), _LR_BLOCKS, _WEIGHT_DECAY),
    ]
    _train(context, "blocks", model, backbone, seen, epochs[1], groups)
    after = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    losses = {}
    for alpha in _ALPHAS:
        _blend(model, before, after, alpha)
        losses[alpha] = _loss(context, model, backbone, kept)
    best = min(losses, key=lambda alpha: (losses[alpha], alpha))
    _blend(model, before, after, best)
    found = ", ".join(f"{alpha:.0%}: {loss:.3f}" for alpha, loss in losses.items())
    context.observer.stage(f"taking {best:.0%} of the way: the loss of {len(kept.entries)} held-out images is {found}")
    return best


def _train(
    context: Context,
    name: str,
    model: nn.ModuleDict,
    backbone: Backbone,
    maps: FeatureMaps,
    epochs: int,
    groups: list[ParamGroup],
) -> None:
    """Train the classifier, and the blocks if they have a group of their own."""
    classifier: Any = model["classifier"]
    loop = Loop(context, name, model, groups, epochs)
    for _ in loop.epochs():
        model.train()
        model["blocks"].eval()  # batch-norm statistics stay
        for batch in loop.map_batches(maps):
            loop.set_lr(groups, loop.cosine_lr())
            with loop.autocast():
                with torch.set_grad_enabled(len(groups) > 1):
                    feature_map = backbone.last_block(batch.values)
                losses, logits = classifier.losses(feature_map, batch.labels)
            loop.step(losses, (logits.argmax(dim=1) == batch.labels).float())


@torch.no_grad()
def _blend(model: nn.Module, before: State, after: State, alpha: float) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(torch.lerp(before[name], after[name], alpha) if tensor.is_floating_point() else after[name])


@torch.no_grad()
def _loss(context: Context, model: nn.ModuleDict, backbone: Backbone, maps: FeatureMaps) -> float:
    """Mean cross-entropy of the pooled classifier."""
    classifier: Any = model.eval()["classifier"]
    baseline, total, count = classifier.baseline(), 0.0, 0
    for batch in maps.batches(context.config.batch_size):
        logits = baseline(backbone.last_block(batch.values.to(context.device)))
        total += float(cross_entropy(logits, batch.labels.to(context.device), reduction="sum"))
        count += len(batch.labels)
    return total / max(count, 1)
