"""Cost of the tree beside the bare backbone. Ratios of one run; seconds do not travel.

D = 256, 7×7 maps, K = 200, batch 64, float32, as in the paper.
"""

import gc
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core import leaves
from prototree.core.model import NearestPatches, ProtoTree, TreeOutput
from prototree.core.topology import Topology

BATCH, DEPTH, MAP, CLASSES = 64, 256, 7, 200
BACKBONE_BATCH = 16  # timed on fewer images and scaled


def seconds(*actions: Callable[[], object], repeats: int = 9) -> list[float]:
    """Median time of each action, taken in turns so that all of them see the same machine."""
    times: list[list[float]] = [[] for _ in actions]
    for repeat in range(repeats + 1):
        for action, taken in zip(actions, times, strict=True):
            start = time.perf_counter()
            action()
            if repeat:  # the first round warms up
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def loss(tree: ProtoTree, routed: TreeOutput, labels: Tensor) -> Tensor:
    return -tree.log_likelihood(routed, labels).mean()


def plain_route(tree: ProtoTree, feature_map: Tensor) -> TreeOutput:
    """The matrix-product form without exactness, through autograd: what the exact form is compared with."""
    patches, prototypes = feature_map.flatten(2).transpose(1, 2).flatten(0, 1), tree.prototypes.flatten(1)
    squared = torch.addmm(patches.square().sum(1, keepdim=True), patches, prototypes.T, alpha=-2)
    lowest, patch = (squared + prototypes.square().sum(1)).unflatten(0, (len(feature_map), -1)).min(dim=1)
    distance = lowest.clamp_min(1e-12).sqrt()
    return tree.forward_distances(NearestPatches(distance, patch))


def peak_memory(action: Callable[[], object]) -> float:
    """Largest sum of live allocations during the action, in MiB."""
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profiler:
        action()
    live, peak = 0, 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak / 2**20


def bench_backbone(features: FeatureExtractor) -> float:
    images = torch.rand(BACKBONE_BATCH, 3, 224, 224)
    features.train()
    return seconds(lambda: features(images).sum().backward(), repeats=3)[0] * BATCH / BACKBONE_BATCH


def bench_height(features: FeatureExtractor, height: int, floor: float, table: Table) -> None:
    tree = ProtoTree(Topology.full(height), features, CLASSES)
    feature_map = torch.rand(BATCH, DEPTH, MAP, MAP).requires_grad_()
    labels = torch.randint(0, CLASSES, (BATCH,))
    counts_of = tree.leaf_logits.detach()

    @torch.no_grad()
    def update(routed: TreeOutput) -> Tensor:
        counts = leaves.leaf_counts(routed.log_path_probs, leaves.class_log_probs(counts_of), labels)
        return leaves.leaf_update(counts_of, counts_of, counts, 94)

    @torch.no_grad()
    def soft() -> Tensor:
        routed = tree.forward_features(feature_map)
        return leaves.predict(routed.log_path_probs, leaves.class_log_probs(tree.leaf_logits).exp())

    @torch.no_grad()
    def decide() -> object:
        return tree.decode(tree.forward_features(feature_map))

    ready = tree.forward_features(feature_map)
    both, plain, leaf, forward, all_three = seconds(
        lambda: loss(tree, tree.forward_features(feature_map), labels).backward(),
        lambda: loss(tree, plain_route(tree, feature_map), labels).backward(),
        lambda: update(ready),
        soft,
        decide,
    )
    limit = {9: "1 %", 11: "2 %"}[height]
    rows = [
        ("tree, forward + backward / backbone's", f"{both / floor:.2%}", limit),
        ("leaf update / tree's forward + backward", f"{leaf / both:.2%}", "4 %"),
        ("soft + max-path + greedy with paths / soft forward", f"{all_three / forward:.2f}×", "1.2×"),
        ("exact / plain distances, forward + backward", f"{both / plain:.2f}×", "1.3×"),
    ]
    memory = peak_memory(lambda: loss(tree, tree.forward_features(feature_map), labels).backward())
    rows.append(("peak extra memory, forward + backward", f"{memory:.0f} MiB", "120 MiB"))
    rows += near_rows(tree, labels)
    for what, measured, allowed in rows:
        table.add_row(f"h = {height}", what, measured, allowed)


def near_rows(tree: ProtoTree, labels: Tensor) -> list[tuple[str, str, str]]:
    """The same where some pairs of a photo and a prototype are nearer than what the fast form can measure."""
    rows, before = [], tree.prototypes.detach().clone()
    for share, limit in ((0.09, "1.3×"), (0.25, "1.3×"), (1.0, "2×")):
        feature_map = near_maps(tree, share)
        both, plain = seconds(
            lambda maps=feature_map: loss(tree, tree.forward_features(maps), labels).backward(),  # type: ignore[misc]
            lambda maps=feature_map: loss(tree, plain_route(tree, maps), labels).backward(),  # type: ignore[misc]
        )
        memory = peak_memory(lambda maps=feature_map: loss(tree, tree.forward_features(maps), labels).backward())  # type: ignore[misc]
        words = f"exact / plain distances, {share:.0%} of the pairs near, {memory:.0f} MiB"
        rows.append((words, f"{both / plain:.2f}×", limit))
        tree.prototypes.data.copy_(before)
    return rows


@torch.no_grad()
def near_maps(tree: ProtoTree, share: float) -> Tensor:
    """Maps that each have one patch about 0.2 away from a share of the prototypes, which are moved for that."""
    centre = torch.rand(DEPTH)
    near = tree.prototypes[: round(share * len(tree.prototypes))]
    near.copy_((centre + 0.2 * torch.nn.functional.normalize(torch.randn(len(near), DEPTH)))[:, :, None, None])
    maps = torch.rand(BATCH, DEPTH, MAP, MAP)
    maps[:, :, 3, 3] = centre
    found = tree.forward_features(maps).distance < 0.4
    assert abs(float(found.float().mean()) - share) < 0.01
    return maps.requires_grad_()


def main() -> None:
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("resnet50", None), DEPTH)
    floor = bench_backbone(features)
    title = f"ResNet50 forward + backward, {BATCH} images of 224 px: {floor:.1f} s on {torch.get_num_threads()} threads"
    table = Table("tree", "what", "measured", "at most", title=title)
    for height in (9, 11):
        bench_height(features, height, floor, table)
    Console().print(table)


if __name__ == "__main__":
    main()
