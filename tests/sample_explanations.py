"""Explanations of any size made of generated pictures, for tests of what is drawn from them."""

import random
from dataclasses import replace
from functools import lru_cache
from typing import Literal, get_args

import numpy as np

from prototree.backbones.geometry import Box
from prototree.core.topology import Strategy, Topology
from prototree.explanation.records import (
    DECISION_BOUNDARIES,
    HISTOGRAM_BINS,
    HISTOGRAM_LIMITS,
    ClassExplanation,
    Counterfactual,
    DecisionExplanation,
    DecisionHistogram,
    EnsembleExplanation,
    Flip,
    Location,
    Match,
    Method,
    Nearer,
    NodeKind,
    OcclusionEffect,
    PatchComparison,
    PathExplanation,
    Perturbation,
    PerturbationEffect,
    Picture,
    PrototypeExplanation,
    Step,
    TreeExplanation,
)
from prototree.reporting.text import TreeText

AWKWARD_NAMES = (
    '<script>alert("x")</script>',
    'O\'Brien "quoted" & </script><img src=x onerror=alert(1)>',
    "طائر الشمس",
    "🦜 parrot",
    "cost $5^2_x$",
    "line\u2028separator",
    "null\x00 and tab\t",
    "A very long name of a species that nobody would ever put on one single line of a card",
    "鳥",
)


@lru_cache(256)  # many tests draw the same tree
def picture(seed: int, width: int, height: int) -> Picture:
    """A smooth coloured blob with some noise: compresses about as well as a photo."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    channels = []
    for _ in range(3):
        a, b, c, d = rng.uniform(2, 9, 4)
        channels.append(np.sin(a * x + b) + np.cos(c * y + d) + np.sin(11 * (x - 0.5) * (y - 0.4) * a))
    waves = np.stack(channels, axis=-1)
    noise = rng.normal(0, 0.12, (height, width, 1))
    pixels = np.clip(128 + 52 * (waves + noise), 0, 255).astype(np.uint8)
    pixels.setflags(write=False)
    return pixels


def match(seed: int, n_classes: int, methods: tuple[Method, ...] = ("cell", "attribution", "occlusion")) -> Match:
    rng = random.Random(seed)
    size = (rng.choice([500, 400, 333]), rng.choice([375, 500, 333]))
    left, top = rng.uniform(0, size[0] * 0.7), rng.uniform(0, size[1] * 0.7)
    found = []
    for i, method in enumerate(methods):
        side = 60.0 * (1 + 0.5 * i)
        heat = np.random.default_rng(seed + i).random((7, 7)) ** 3
        box = Box(left, top, left + side, top + side).clip(size)
        found.append(Location(method, box, heat, OcclusionEffect(0.98, 0.31, 0.92) if i != 2 else None))
    wide, high = (round(320 * side / max(size)) for side in size)
    return Match(
        image=f"images/class_{seed % n_classes}/photo_{seed}.jpg",
        label=seed % n_classes,
        similarity=rng.random(),
        size=size,
        photo=picture(seed, wide, high),
        crop=picture(seed + 1, 96, 80),
        locations=tuple(found),
        context=picture(seed + 2, 150, 130),
    )


def tree(
    topology: Topology,
    n_classes: int | None = None,
    *,
    n_nearest: int = 3,
    names: tuple[str, ...] = (),
    seed: int = 0,
    node_kind: NodeKind = "presence",
) -> TreeExplanation:
    """A tree of this shape; its last leaf is nearly uniform."""
    n_classes = n_classes or max(len(names), topology.n_leaves, 3)
    class_names = (*names, *(f"Class {k}" for k in range(len(names), n_classes)))[:n_classes]
    rng = random.Random(seed)
    prototypes = tuple(
        PrototypeExplanation(
            prototype=number,
            node=number % topology.n_nodes,
            side="right" if number < topology.n_nodes else "left",
            radius=0.7 + 0.1 * number,
            source=match(seed + 17 * number, n_classes),
            projection_distance=0.001 * number,
            nearest=tuple(match(seed + 17 * number + 1 + i, n_classes, ("cell",)) for i in range(n_nearest)),
            class_pass_rate=tuple(rng.random() for _ in range(n_classes)),
            perturbation_effects=tuple(PerturbationEffect(p, rng.uniform(-0.6, 0.1)) for p in get_args(Perturbation)),
            note='long "beak" <b>' if number == 1 else "",
            histogram=histogram(seed + number % topology.n_nodes, node_kind),
        )
        for number in range(topology.n_nodes * (2 if node_kind == "pairwise" else 1))
    )
    return TreeExplanation(
        title="A tree <of> birds & more",
        class_names=class_names,
        left=tuple(topology.left.tolist()),
        right=tuple(topology.right.tolist()),
        prototypes=prototypes,
        leaf_probs=np.array([_leaf(leaf, topology.n_leaves, n_classes) for leaf in range(topology.n_leaves)]),
        accuracy={"soft": 0.75, "max_path": 0.74, "greedy": 0.34},
        node_kind=node_kind,
        sharpness=6.0,
        classes=tuple(known_class(k, n_classes) for k in range(n_classes)),
    )


def known_class(label: int, n_classes: int) -> ClassExplanation:
    """A class of which one test photo of ten is taken for the next class."""
    photos = tuple(picture(500 + 3 * label + i, 120, 90) for i in range(2))
    return ClassExplanation(photos, 10, 0.9, (((label + 1) % n_classes, 1),))


def histogram(seed: int, node_kind: NodeKind = "presence") -> DecisionHistogram:
    """Photos of both sides about the line, most of them on their own."""
    rng, (low, high), line = np.random.default_rng(seed), HISTOGRAM_LIMITS[node_kind], DECISION_BOUNDARIES[node_kind]
    towards = -1 if node_kind == "presence" else 1
    sides = [rng.normal(line + way * 0.35, 0.2, count) for way, count in ((towards, 40), (-towards, 90))]
    right, left = (np.histogram(side.clip(low, high - 1e-6), HISTOGRAM_BINS, (low, high))[0].tolist() for side in sides)
    return DecisionHistogram(low, high, line, tuple(right), tuple(left))


def decision(explained: TreeExplanation, seed: int = 0) -> DecisionExplanation:
    """One photo's ways to two leaves of a tree."""
    rules, n_classes = TreeText(explained).rules, len(explained.class_names)
    strategies: tuple[Strategy, ...] = ("greedy", "max_path")
    is_choice = explained.node_kind == "pairwise"
    photo = match(1000 + seed, n_classes)

    def seen(number: int, near: bool) -> PatchComparison:
        prototype, found = explained.prototypes[number], _in_photo(match(1000 + seed + number % 3, n_classes), photo)
        crop, distance = prototype.source.crop, 0.4 if near else 1.1 + 0.01 * number
        return PatchComparison(number, distance, near, found, crop, prototype.note)

    paths: dict[Strategy, PathExplanation] = {}
    for i, strategy in enumerate(strategies):
        rule = rules[(seed + i) % len(rules)]
        steps = tuple(
            Step(
                node=node,
                goes_right=present,
                p_right=0.93 if present else 0.12,
                right=seen(node, present),
                left=seen(node + len(explained.left), not present) if is_choice else None,
                at=(0.4 if present else -0.3) if is_choice else (0.6 if present else 1.4),
                histogram=explained.prototypes[node].histogram,
            )
            for node, present in rule.steps
        )
        paths[strategy] = PathExplanation(strategy, steps, rule.leaf, tuple(explained.leaf_probs[rule.leaf].tolist()))
    return DecisionExplanation(
        image=photo.image,
        photo=photo.photo,
        size=photo.size,
        class_names=explained.class_names,
        label=0,
        class_probs=tuple(explained.leaf_probs[rules[seed % len(rules)].leaf].tolist()),
        paths=paths,
        counterfactuals={
            "greedy": Counterfactual(
                1, (Flip(0, 0.42, 0.61, Nearer(0, len(explained.left), 0.31) if is_choice else None),)
            ),
            "max_path": None,
        },
        node_kind=explained.node_kind,
    )


def _in_photo(found: Match, photo: Match) -> Match:
    """The same match, in another photo."""
    where = tuple(replace(place, box=place.box.clip(photo.size)) for place in found.locations)
    return replace(found, size=photo.size, photo=photo.photo, locations=where)


def vote(explained: TreeExplanation, n_trees: int = 3) -> EnsembleExplanation:
    decisions = tuple(decision(explained, seed) for seed in range(n_trees))
    mean = np.mean([one.class_probs for one in decisions], axis=0)
    return EnsembleExplanation(decisions, tuple(mean.tolist()))


def spine(height: int, side: Literal["left", "right"] = "left") -> Topology:
    """A tree that is one long chain, with a leaf at each node."""
    nodes = range(height)
    chain = [node + 1 if node + 1 < height else ~height for node in nodes]
    leaves = [~node for node in nodes]
    children = (chain, leaves) if side == "left" else (leaves, chain)
    return Topology.from_children(*children)[0]


def random_topology(n_nodes: int, seed: int = 0) -> Topology:
    """A tree of this many nodes, somewhat deeper on the left, as trained trees are."""
    rng = random.Random(seed)
    left, right = [~0] * n_nodes, [~0] * n_nodes
    open_ends: list[tuple[list[int], int]] = [(left, 0), (right, 0)]
    for node in range(1, n_nodes):
        side, parent = open_ends.pop(rng.randrange(len(open_ends)) if rng.random() < 0.6 else len(open_ends) - 2)
        side[parent] = node
        open_ends += [(left, node), (right, node)]
    for leaf, (side, parent) in enumerate(open_ends):
        side[parent] = ~leaf
    return Topology.from_children(left, right)[0]


def _leaf(leaf: int, n_leaves: int, n_classes: int) -> tuple[float, ...]:
    share = 1 / n_classes if leaf == n_leaves - 1 and n_leaves > 1 else 0.9
    rest = (1 - share) / (n_classes - 1)
    return tuple(share if k == leaf % n_classes else rest for k in range(n_classes))
