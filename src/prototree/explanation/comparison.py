"""Comparison of two runs with the same classes: accuracy by class, changed answers, changed questions.

Both trees predict the same test images, each along its single path.
"""

import torch

from prototree.core.leaves import class_log_probs
from prototree.core.model import ProtoTree
from prototree.data import ImageData
from prototree.data.crops import evaluation_views
from prototree.data.dataset import Sample
from prototree.data.images import load_image
from prototree.data.loader import ViewDataset
from prototree.errors import DataError
from prototree.explanation.assets import THUMB_SIDE, pictures_of, reduced
from prototree.explanation.records import ChangedImage, ChangedQuestion, ClassChange, Comparison, Picture, ShownPatch
from prototree.features.cache import eval_batches
from prototree.run import Run

MAX_IMAGES = 200  # changed images that are shown


def compare_runs(run: Run, other: Run, *, data: ImageData | None = None) -> Comparison:
    """Compare a run with another one that has the same classes, such as the run before edits, on the test images.

    Examples:
        >>> run = Run.open("runs/photos")
        >>> comparison = compare_runs(run, run)
        >>> len(comparison.changed), len(comparison.questions)
        (0, 0)
    """
    trees, data = (other.tree(), run.tree()), data if data is not None else run.data()
    if trees[0].class_names != trees[1].class_names:
        raise DataError(
            f"expected two runs with the same classes, got {trees[1].n_classes} in {run.display_name} and "
            f"{trees[0].n_classes} in {other.display_name} with other names; compare runs on the same data"
        )
    if not data.test:
        raise DataError("expected test images to compare two runs on, got none; name data that has some with --data")
    names, labels = data.class_names, [sample.label for sample in data.test]
    before, after = (_predict(each, tree.eval(), data) for each, tree in zip((other, run), trees, strict=True))
    differing = [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    n_fixed = sum(after[i] == names[labels[i]] for i in differing)
    n_broken = sum(before[i] == names[labels[i]] for i in differing)
    # What is right now comes first, then what is wrong now.
    differing.sort(key=lambda i: (after[i] != names[labels[i]], before[i] != names[labels[i]], labels[i]))
    same, questions = _questions(other, run, trees)
    return Comparison(
        before=other.folder.resolve().name,
        after=run.folder.resolve().name,
        n_images=len(labels),
        classes=tuple(
            ClassChange(
                name,
                labels.count(label),
                *(
                    sum(k == label and p == name for k, p in zip(labels, predicted, strict=True))
                    for predicted in (before, after)
                ),
            )
            for label, name in enumerate(names)
        ),
        changed=tuple(
            ChangedImage(data.name(data.test[i]), names[labels[i]], before[i], after[i], _thumb(data.test[i]))
            for i in differing[:MAX_IMAGES]
        ),
        n_fixed=n_fixed,
        n_broken=n_broken,
        n_otherwise=len(differing) - n_fixed - n_broken,
        n_same_questions=same,
        questions=questions,
        lost_classes=lost_classes(*trees),
    )


def lost_classes(before: ProtoTree, after: ProtoTree) -> tuple[str, ...]:
    """Name the classes for which a leaf stands in one tree and none in another one with the same classes."""
    lost = _classes_with_leaf(before) - _classes_with_leaf(after)
    return tuple(after.class_names[label] for label in sorted(lost))


def _classes_with_leaf(tree: ProtoTree) -> set[int]:
    """Find the classes that leaves predict; leaves that are nearly uniform over the classes predict none."""
    probs, labels = class_log_probs(tree.leaf_logits.detach()).exp().max(dim=1)
    is_clear = (probs > 2 / tree.n_classes) | (tree.n_classes <= 2)
    return set(labels[is_clear].tolist())


@torch.no_grad()
def _predict(run: Run, tree: ProtoTree, data: ImageData) -> list[str]:
    """Predict each test image along the single path, from cached features where the run has them.

    An image that cannot be read gets no class.
    """
    predicted = ["not read"] * len(data.test)
    batches = eval_batches(tree.features, ViewDataset(data.test, evaluation_views, tree.preprocessing), run=run.folder)
    for maps, _, indices in batches.encoded(tree.features):
        classes = tree.decode(tree.forward_features(maps)).labels("greedy")
        for index, label in zip(indices.tolist(), classes.tolist(), strict=True):
            predicted[batches.entries[index].sample_index] = tree.class_names[label]
    return predicted


def _thumb(sample: Sample) -> Picture:
    return reduced(load_image(sample.path, at_least=THUMB_SIDE), THUMB_SIDE)


def _questions(other: Run, run: Run, trees: tuple[ProtoTree, ProtoTree]) -> tuple[int, tuple[ChangedQuestion, ...]]:
    """Match questions by the patches they compare: how many are the same, and those that differ."""
    before, after = map(_patches, trees)
    left, right = list(range(len(before))), list(range(len(after)))
    for node in [*left]:  # the same patches on the same sides
        twin = next((match for match in right if after[match] == before[node]), None)
        if twin is not None:
            left.remove(node)
            right.remove(twin)
    n_same, pairs = len(before) - len(left), list[tuple[int | None, int | None]]()
    for node in [*left]:  # one patch in common
        shared = (match for match in right if any(a == b for a, b in zip(before[node], after[match], strict=False)))
        twin = next(shared, None)
        if twin is not None:
            right.remove(twin)
        pairs.append((node, twin))
    pairs += [(None, node) for node in right]
    pairs.sort(key=lambda pair: pair[1] if pair[1] is not None else len(after) + (pair[0] or 0))
    shown = [_Shown(each, tree) for each, tree in zip((other, run), trees, strict=True)]
    return n_same, tuple(ChangedQuestion(shown[0].of(a), shown[1].of(b)) for a, b in pairs)


def _patches(tree: ProtoTree) -> list[tuple[object, ...]]:
    """List for each node the patches that it compares, left to right."""
    sources = [source and (source.image, source.patch_box) for source in tree.sources]
    return [tuple(sources[row] for row in _rows(tree, node)) for node in range(tree.topology.n_nodes)]


def _rows(tree: ProtoTree, node: int) -> list[int]:
    """List the rows of a node's prototypes, left to right."""
    return list(range(node, tree.n_prototypes, tree.topology.n_nodes))[::-1]


class _Shown:
    """The patches of a run's questions as pictures."""

    def __init__(self, run: Run, tree: ProtoTree) -> None:
        self._tree, self._notes, self._pictures = tree, run.notes, pictures_of(run, tree)

    def of(self, node: int | None) -> tuple[ShownPatch, ...]:
        rows = [] if node is None else _rows(self._tree, node)
        name, note, pictures = self._tree.patch_name, self._notes.get, self._pictures
        return tuple(ShownPatch(name(row), note(row, ""), pictures.crop(row), pictures.context(row)) for row in rows)
