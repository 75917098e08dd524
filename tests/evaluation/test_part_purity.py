"""Part purity, consistency and their means, on images whose parts are put there by hand, and on drawn birds."""

from pathlib import Path

import pytest
import torch

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.nodes import PAPER, NodeFunction
from prototree.core.topology import Topology
from prototree.data import Box, ImageData, Part, Sample, open_data
from prototree.data.crops import FULL_IMAGE, evaluation_views, from_image
from prototree.data.loader import ViewDataset
from prototree.errors import ConfigError
from prototree.evaluation.occlusion_test import parts_inside
from prototree.evaluation.part_purity import (
    NEAREST,
    measure_prototypes,
    nearest_images,
    prototypes_taken,
    purest,
    summarise,
)
from prototree.evaluation.schema import (
    OcclusionRates,
    OnDifference,
    PartFraction,
    PrototypeQuality,
    PurityBaseline,
    QualityMetrics,
)
from prototree.evaluation.tables import prototype_text, quality_table, quality_text
from tiny_explain import projected
from tiny_training import write_squares

PAIRWISE = NodeFunction("pairwise", 6.0)


def test_a_pair_is_inside_if_one_of_it_is() -> None:
    names = {"left wing": (12.0, 12.0), "right wing": (90.0, 12.0), "beak": (20.0, 20.1), "left": (0.0, 0.0)}
    parts = [Part(name, *point) for name, point in names.items()]
    box = Box(10.0, 10.0, 20.0, 20.0)
    assert parts_inside(parts, box) == {"wing": True, "beak": False, "left": False}
    assert parts_inside(parts[::-1], box)["wing"], "whichever comes first"


def test_purity_counts_only_images_that_show_the_part() -> None:
    images = [{"beak": True, "tail": False}, {"beak": False, "tail": True}, {"tail": True}, {"beak": True}]
    # beak: 2 of 3, tail: 2 of 3; both have two hits, so the first one stays
    assert purest(images) == PartFraction("beak", 2 / 3, 3)
    assert purest([*images, {"tail": True}]) == PartFraction("tail", 3 / 4, 4)
    assert purest([{"leg": True, "eye": True}, {"eye": True}]) == PartFraction("eye", 1.0, 2), "more hits win"
    assert purest([{}, {}]) is purest([]) is None


def quality() -> QualityMetrics:
    def own(row: int, purity: float, same: float, flips: float, n_images: int) -> PrototypeQuality:
        rates = OcclusionRates(n_images, flips, 0.1, 0.5, 1.5, 0.6, n_images - 1, flips if row else None, 0.1)
        return PrototypeQuality(
            row,
            purity={"peak": {"test": PartFraction("beak", purity, 10)}},
            consistency={"peak": {"test": PartFraction("beak", same, 30)}},
            consistency_wide={"peak": {"test": PartFraction("beak", 0.9, 30)}},
            stability=same,
            occlusion={"peak": rates},
            on_discriminative_part={"cell": OnDifference(("beak",), touches=row == 0, by_chance=0.25)},
        )

    prototypes = [own(0, 0.9, 0.8, 1.0, 1), own(1, 0.5, 0.79, 0.2, 3), PrototypeQuality(2)]
    return summarise(prototypes, {"test": PurityBaseline(0.2, 0.4)})


def test_the_quality_of_a_tree_is_that_of_its_prototypes() -> None:
    found = quality().to_json()
    assert found["purity"] == {"peak": {"test": {"mean": 0.7, "std": pytest.approx(0.2), "part_related": 0.5}}}
    assert found["consistency"] == {"peak": {"test": 0.5}}, "0.8 is consistent, 0.79 is not"
    assert found["consistency_wide"] == {"peak": {"test": 1.0}}
    assert found["stability"] == pytest.approx(0.795)
    rates = found["occlusion"]["peak"]
    assert rates["n_images"] == 4
    assert rates["flip_rate"] == pytest.approx((1.0 + 3 * 0.2) / 4), "every image counts the same"
    assert (rates["n_in_radius"], rates["loss_rate"]) == (2, 0.2), "only images that had something within the radius"
    assert found["on_discriminative_part"] == {"cell": {"n_prototypes": 2, "touching": 0.5, "by_chance": 0.25}}
    assert [one["prototype_row"] for one in found["prototypes"]] == [0, 1, 2]


def test_the_quality_in_words_and_as_a_table() -> None:
    found = quality().to_json()
    assert "7 of 10" in quality_text(found)
    assert quality_text({}) == quality_text(summarise([PrototypeQuality(0)], {}).to_json()) == ""
    sentences = prototype_text(found["prototypes"][1])
    assert [token in text for token, text in zip(("5 of the 10", "79 %", "0.6 of 3"), sentences, strict=True)]
    assert prototype_text(found["prototypes"][2]) == []
    cells = {row[1:] for row in quality_table(found).rows}
    assert {("–", "0.70 ± 0.20, over 0.5: 50 %"), ("–", "40.0 % (10.0 %)"), ("–", "20.0 % (10.0 %)")} <= cells
    assert {("–", "0.50 → 1.50 (0.60)"), ("50 % of 2 (by chance 25 %)", "–")} <= cells


def test_which_prototypes_a_path_goes_to(tiny_backbone: Backbone) -> None:
    nodes, right = torch.tensor([[0, 2, -1], [0, 1, -1]]), torch.tensor([[True, False, False], [False, True, False]])
    for node_function, expected in ((PAPER, [[0], [1]]), (PAIRWISE, [[0, 3 + 2], [1, 3 + 0]])):
        tree = ProtoTree(Topology.full(2), FeatureExtractor(tiny_backbone, 3), 2, node_function=node_function)
        taken = prototypes_taken(tree, nodes, right)
        assert [torch.nonzero(row)[:, 0].tolist() for row in taken] == expected


def purity_by_hand(tree: ProtoTree, samples: tuple[Sample, ...], prototype: int) -> float:
    """PIP-Net's definition, one image after the other."""
    rows = []
    for sample in samples:
        image = ViewDataset([sample], evaluation_views, tree.preprocessing)[0].image
        with torch.no_grad():
            routed = tree(image[None])
        row, column = divmod(int(routed.patch[0, prototype]), tree.grid.columns)
        rows.append((float(routed.distance[0, prototype]), row, column, sample))
    seen: dict[str, list[bool]] = {}
    for _, row, column, sample in sorted(rows, key=lambda one: one[0])[:NEAREST]:
        cell, half, hits = 64 / tree.grid.rows, 64 / 7 / 2, dict[str, bool]()
        for part in sample.parts:
            x, y = from_image((part.x, part.y), FULL_IMAGE, (64, 64), tree.preprocessing)
            inside = abs(x - (column + 0.5) * cell) <= half and abs(y - (row + 0.5) * cell) <= half
            name = part.name.replace("left ", "").replace("right ", "")
            hits[name] = hits.get(name, False) or inside
        for name, hit in hits.items():
            seen.setdefault(name, []).append(hit)
    return max(sum(hits) / len(hits) for hits in seen.values())


def test_purity_agrees_with_counting_by_hand(tiny_backbone: Backbone, birds: ImageData) -> None:
    tree, ticks = projected(tiny_backbone, birds, node_function=PAIRWISE, height=1), list[tuple[int, int]]()
    found = measure_prototypes(tree, birds, images=1, attribution=False, tick=lambda *done: ticks.append(done))
    for split, samples in (("train", birds.train), ("test", birds.test)):
        for one in found.prototypes:
            expected = purity_by_hand(tree, samples, one.prototype_row)
            assert one.purity["cell"][split].fraction == pytest.approx(expected), (split, one.prototype_row)
        assert 0 <= found.baselines[split].random_patch <= 1
    assert ticks[-1][0] <= ticks[-1][1]
    assert found.occlusion["peak"].n_images == sum(1 for one in found.prototypes if one.occlusion)
    assert measure_prototypes(tree, birds, images=1, attribution=False) == found, "the same every time"
    assert nearest_images(torch.tensor([3.0, torch.inf, 1.0, 1.0])) == [2, 3, 0], "unreadable ones never"
    with pytest.raises(ConfigError, match="-1"):
        measure_prototypes(tree, birds, images=-1)


def test_data_without_parts_gives_occlusion_alone(tiny_backbone: Backbone, tmp_path: Path) -> None:
    data = open_data(write_squares(tmp_path / "photos", train=3, test=2))
    tree = projected(tiny_backbone, data, node_function=PAIRWISE, height=1)
    found = measure_prototypes(tree, data, images=1, attribution=False)
    assert found.purity == {}
    assert found.stability is None
    assert "cell" in found.occlusion
    assert not any(one.on_discriminative_part for one in found.prototypes)
