"""The published code beside ours, in float64, on the same maps, weights and batches: how far apart the two end.

`python benchmarks/compare_published.py CLONE`, where CLONE is a copy of https://github.com/M-Nauta/ProtoTree. Both
packages are called `prototree`, so theirs runs in a process of its own, and numbers go through files. Needs `tqdm`.
"""

import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Numbers = dict[str, Tensor]
CHANNELS, DEPTH, MAP, CLASSES, HEIGHT = 64, 32, 7, 10, 5
PHOTOS, BATCH, EPOCHS, RATE, EPSILON = 45, 8, 3, 1e-2, 1e-7  # the last batch is short
THRESHOLD, SEEDS = 0.2, 10
UNSURE = (1, 4, 5, 6, 7, 10, 16, 17, 18, 22, 29)  # leaves without a class: single ones, pairs, a subtree of four
WORDS = {
    "distance": "distances to the nearest patch",
    "path_probs": "path probabilities",
    "prediction": "predictions",
    "max_path": "leaves by max-path",
    "greedy": "leaves by the greedy path",
    "gradient_prototypes": "gradients of the prototypes",
    "gradient_head": "gradients of the 1×1 convolution",
    "trained_prototypes": f"prototypes after {EPOCHS} epochs of Adam",
    "trained_head": "1×1 convolution after them",
    "trained_leaves": "leaves after them",
    "pruned_leaves": "leaves that pruning kept",
    "pruned_prediction": "predictions of the pruned tree",
    "projected_place": "photo and place of projected prototypes",
    "projected_distance": "distances that projection found",
    "projected_prediction": "predictions of the projected tree, other photos",
}


def given(seed: int) -> Numbers:
    """What both start from; nodes and leaves level by level."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    leaves = 3 * random(2**HEIGHT, CLASSES).abs()
    half = leaves.clone()
    half[list(UNSURE)] = 0.0
    return {
        "maps": random(PHOTOS, CHANNELS, MAP, MAP),
        "others": random(PHOTOS, CHANNELS, MAP, MAP),
        "labels": torch.arange(PHOTOS) % CLASSES,
        "head": 0.3 * random(DEPTH, CHANNELS, 1, 1),
        "prototypes": 0.5 + 0.1 * random(2**HEIGHT - 1, DEPTH, 1, 1),
        "leaves": leaves,
        "pruning": half,
    }


# ---- theirs


def theirs(start: Numbers, folder: Path) -> Numbers:
    """Run where `prototree` is the published package; it has no types."""
    from prototree.project import project_with_class_constraints  # type: ignore[import-not-found]
    from prototree.prune import prune  # type: ignore[import-not-found]
    from util.log import Log  # type: ignore[import-not-found]

    tree, maps, labels = _their_tree(start), start["maps"], start["labels"]
    out, about = tree.forward(maps)
    distance = tree.forward_partial(maps)[1].amin(dim=(2, 3))
    branches, leaves = _level_by_level(tree)
    found = {
        "distance": distance[:, [tree._out_map[node] for node in branches]],
        "path_probs": torch.cat([about["pa_tensor"][leaf.index] for leaf in leaves], dim=1),
        "prediction": out,
    }
    number = {leaf.index: place for place, leaf in enumerate(leaves)}
    for name, strategy in (("max_path", "sample_max"), ("greedy", "greedy")):
        found[name] = torch.tensor([number[i] for i in tree.forward(maps, strategy)[1]["out_leaf_ix"]])
    nn.functional.nll_loss(out.log(), labels).backward()
    order = [tree._out_map[node] for node in branches]
    found["gradient_prototypes"] = tree.prototype_layer.prototype_vectors.grad[order]
    found["gradient_head"] = tree._add_on[0].weight.grad
    found |= _their_training(start)
    log, tree = Log(str(folder / "log")), _their_tree(start | {"leaves": start["pruning"]})
    prune(tree, THRESHOLD, log)
    branches, leaves = _level_by_level(tree)
    found["pruned_leaves"] = torch.stack([leaf._dist_params for leaf in leaves])
    found["pruned_prediction"] = tree.forward(maps)[0]
    about, tree = project_with_class_constraints(tree, _batches(maps, labels), "cpu", None, log)
    sources = [about[tree._out_map[node]] for node in branches]
    found["projected_place"] = torch.tensor([[one["input_image_ix"], one["patch_ix"]] for one in sources])
    found["projected_distance"] = torch.tensor([one["distance"] for one in sources], dtype=torch.float64)
    found["projected_prediction"] = tree.forward(start["others"])[0]
    return found


def _their_tree(start: Numbers) -> Any:
    from prototree.prototree import ProtoTree  # type: ignore[import-not-found]

    flags = ("log_probabilities", "kontschieder_normalization", "kontschieder_train")
    arguments = Namespace(depth=HEIGHT, num_features=DEPTH, W1=1, H1=1, disable_derivative_free_leaf_optim=False)
    vars(arguments).update(dict.fromkeys(flags, False))
    head = nn.Sequential(nn.Conv2d(CHANNELS, DEPTH, 1, bias=False), nn.Sigmoid())
    tree = ProtoTree(CLASSES, nn.Identity(), arguments, head).double()
    branches, leaves = _level_by_level(tree)
    with torch.no_grad():
        head[0].weight.copy_(start["head"])  # type: ignore[operator]
        for node, prototype in zip(branches, start["prototypes"], strict=True):
            tree.prototype_layer.prototype_vectors[tree._out_map[node]] = prototype
        for leaf, counts in zip(leaves, start["leaves"], strict=True):
            leaf._dist_params.copy_(counts)
    return tree


def _their_training(start: Numbers) -> Numbers:
    from prototree.train import train_epoch  # type: ignore[import-not-found]
    from util.args import get_optimizer  # type: ignore[import-not-found]

    tree = _their_tree(start)
    rates = {"lr": RATE, "lr_block": RATE, "lr_net": RATE, "weight_decay": 0.0}
    arguments = Namespace(
        optimizer="AdamW", net="any", dataset="any", disable_derivative_free_leaf_optim=False, **rates
    )
    optimiser = get_optimizer(tree, arguments)[0]
    for epoch in range(EPOCHS):
        train_epoch(tree, _batches(start["maps"], start["labels"]), optimiser, epoch + 1, False, "cpu")
    branches, leaves = _level_by_level(tree)
    return {
        "trained_prototypes": tree.prototype_layer.prototype_vectors[[tree._out_map[node] for node in branches]],
        "trained_head": tree._add_on[0].weight,
        "trained_leaves": torch.stack([leaf._dist_params for leaf in leaves]),
    }


def _level_by_level(tree: Any) -> tuple[list[Any], list[Any]]:
    queue = [tree.root]
    for node in queue:  # grows while it is read
        if hasattr(node, "l"):
            queue += (node.l, node.r)
    return [node for node in queue if hasattr(node, "l")], [node for node in queue if not hasattr(node, "l")]


def _batches(maps: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(maps.split(BATCH), labels.split(BATCH), strict=True))


# ---- ours


def ours(start: Numbers) -> Numbers:
    from prototree.core.projection import project
    from prototree.core.pruning import prune

    tree, maps, labels = _our_tree(start), start["maps"], start["labels"]
    routed = tree.forward_features(tree.features.from_map(maps))
    decisions = tree.decode(routed)
    (-tree.log_likelihood(routed, labels).mean()).backward()
    found = {
        "distance": routed.distance,
        "path_probs": routed.log_path_probs.exp(),
        "prediction": decisions.soft,
        "max_path": decisions.max_path.leaf,
        "greedy": decisions.greedy.leaf,
        "gradient_prototypes": tree.prototypes.grad,
        "gradient_head": tree.features.head.weight.grad,
        **_our_training(start),
    }
    pruned = prune(_our_tree(start | {"leaves": start["pruning"]}), THRESHOLD).tree
    found["pruned_leaves"] = pruned.leaf_logits
    found["pruned_prediction"] = pruned.decode(pruned.forward_features(tree.features.from_map(maps))).soft
    batches = zip(_batches(tree.features.from_map(maps), labels), torch.arange(PHOTOS).split(BATCH), strict=True)
    projected = project(pruned, ((one, of, places) for (one, of), places in batches))
    found["projected_place"] = torch.stack([projected.nearest.index, projected.nearest.patch], dim=1)
    found["projected_distance"] = projected.nearest.distance
    routed = projected.tree.forward_features(tree.features.from_map(start["others"]))
    found["projected_prediction"] = projected.tree.decode(routed).soft
    return found


def _our_tree(start: Numbers) -> Any:
    from prototree.backbones.backbone import Backbone, FeatureExtractor
    from prototree.core.model import ProtoTree
    from prototree.core.topology import Topology

    # Its maps are given; it only has as many channels.
    backbone = Backbone("resnet18", None, image_size=32, feature_level=-4)
    tree = ProtoTree(Topology.full(HEIGHT), FeatureExtractor(backbone, DEPTH), CLASSES).double()
    with torch.no_grad():
        tree.features.head.weight.copy_(start["head"])  # type: ignore[operator]
        tree.prototypes.copy_(start["prototypes"])
        tree.leaf_logits.copy_(start["leaves"])
    return tree


def _our_training(start: Numbers) -> Numbers:
    from prototree.config import Config, PaperSettings
    from prototree.data import ImageData
    from prototree.features.cache import Inputs
    from prototree.training import paper
    from prototree.training.loop import Context

    class Given:
        """The maps that were given, in their order."""

        n_batches = len(range(0, PHOTOS, BATCH))

        def __init__(self, *_: Any) -> None:
            pass

        def epoch(self, epoch: int) -> Iterator[Inputs]:
            indices = torch.arange(PHOTOS).split(BATCH)
            for (maps, labels), index in zip(_batches(start["maps"], start["labels"]), indices, strict=True):
                yield Inputs(maps, labels, index)

        def encode(self, tree: Any, batch: Inputs) -> Tensor:
            return tree.features.from_map(batch.values)  # type: ignore[no-any-return]

    tree = _our_tree(start)
    lengths = {"height": HEIGHT, "epochs": EPOCHS, "freeze_epochs": EPOCHS}
    rates = {"lr_prototypes": RATE, "lr_last_block": RATE, "adam_epsilon": EPSILON}
    settings = PaperSettings().replace({**lengths, **rates})
    network = {"backbone": "resnet18", "weights": "none", "image_size": 32, "feature_level": -4}
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(paper, "ProtoTree", lambda *_: tree),
        patch.object(paper, "Batches", Given),
    ):
        data = ImageData(Path(folder), "folder", tuple(map(str, range(CLASSES))), (), ())
        paper.train(Context(Path(folder), data, Config().replace(network)), settings)
    return {
        "trained_prototypes": tree.prototypes,
        "trained_head": tree.features.head.weight,
        "trained_leaves": tree.leaf_logits,
    }


def differences(one: Numbers, other: Numbers) -> dict[str, float]:
    """The largest of each kind; infinite where not even as many numbers are there."""

    def largest(a: Tensor, b: Tensor) -> float:
        return float((a.detach().double() - b.double()).abs().max()) if a.shape == b.shape else float("inf")

    return {name: largest(one[name], other[name]) for name in WORDS}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    worst = dict.fromkeys(WORDS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(SEEDS):
            start, found = Path(folder, "start"), Path(folder, "found")
            save_file(given(seed), start)
            command = [sys.executable, __file__, "--theirs", sys.argv[1], str(start), str(found)]
            subprocess.run(command, check=True, stderr=subprocess.PIPE)
            for name, value in differences(ours(load_file(start)), load_file(found)).items():
                worst[name] = max(worst[name], value)
    print(f"largest difference in {SEEDS} trees, float64")
    for name, value in worst.items():
        print(f"{WORDS[name]:52} {value:.1e}")


def their_process(clone: str, start: str, found: str) -> None:
    sys.path.insert(0, clone)
    numbers = theirs(load_file(start), Path(found).parent)
    save_file({name: tensor.detach().contiguous() for name, tensor in numbers.items()}, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--theirs"]:
        their_process(*sys.argv[2:])
    else:
        main()
