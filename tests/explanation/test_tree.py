"""The whole tree of a small trained run, with its data and without."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

import prototree
from prototree.data import ImageData
from prototree.errors import ConfigError, DataError
from prototree.explanation.assets import AssetStore
from prototree.explanation.tree import explain_tree, save_assets
from prototree.run import ASSETS, Run

Squares = tuple[Run, ImageData]


def test_the_whole_tree(squares: Squares) -> None:
    run, data = squares
    tree, ticks = run.tree(), list[tuple[int, int]]()
    explanation = explain_tree(run, data=data, nearest=3, notes={0: "red"}, tick=lambda *done: ticks.append(done))
    assert explanation.class_names == data.class_names
    assert explanation.left == tuple(tree.topology.left.tolist())
    assert len(explanation.prototypes) == tree.topology.n_nodes
    assert np.array(explanation.leaf_probs).sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert set(explanation.accuracy) == {"soft", "max_path", "greedy"}
    assert ticks[-1][0] == ticks[-1][1]
    assert ticks == sorted(ticks)
    for prototype, source in zip(explanation.prototypes, tree.sources, strict=True):
        assert prototype.note == ("red" if prototype.node == 0 else "")
        assert prototype.source.image == source.image
        assert prototype.source.similarity == pytest.approx(1.0, abs=1e-3)  # it is a patch of this very image
        peak, cell, attribution = prototype.source.locations
        assert (peak.method, cell.method, attribution.method) == ("peak", "cell", "attribution")
        assert peak.box.edges == pytest.approx(source.display_box, abs=0.05)
        assert cell.box.edges == pytest.approx(source.patch_box)
        assert cell.occlusion.before == pytest.approx(1.0, abs=1e-3)
        names = [match.image for match in prototype.nearest]
        assert len(names) == len(set(names) - {source.image}) == 3
        similarity = [match.similarity for match in prototype.nearest]
        assert similarity == sorted(similarity, reverse=True)
        assert len(prototype.class_pass_rate) == 3
        assert len({effect.name for effect in prototype.perturbation_effects}) == 5


def test_a_folder_explains_on_a_machine_without_the_data(squares: Squares, tmp_path: Path) -> None:
    run, data = squares
    alone = Run(shutil.copytree(run.folder, tmp_path / "alone"))
    alone.update_metrics(source=str(tmp_path / "gone"))
    before = explain_tree(run, data=data, nearest=1)
    for stored, whole in zip(prototree.explain(alone).prototypes, before.prototypes, strict=True):
        assert stored.source.locations[0].box.edges == pytest.approx(whole.source.locations[0].box.edges, abs=1e-3)
        assert np.array_equal(stored.source.crop, whole.source.crop)
        assert stored.nearest == ()
    save_assets(alone, data, before)
    after = explain_tree(alone)
    for stored, whole in zip(after.prototypes, before.prototypes, strict=True):
        assert [match.image for match in stored.nearest] == [match.image for match in whole.nearest]
        assert stored.class_pass_rate == pytest.approx(whole.class_pass_rate, abs=1e-4)
        assert stored.histogram == whole.histogram
        assert len(stored.source.locations) == len(whole.source.locations)
        assert stored.source.locations[0].heat.mean() == pytest.approx(whole.source.locations[0].heat.mean(), abs=0.02)
    assert [len(known.photos) for known in after.classes] == [len(known.photos) for known in before.classes]
    shutil.rmtree(alone.folder / ASSETS)
    assert (explain_tree(alone).prototypes[0].source.crop == 160).all()
    AssetStore(alone.tree(), alone.folder / ASSETS).save_pictures(data)
    assert not (explain_tree(alone).prototypes[0].source.crop == 160).all()


def test_what_does_not_fit_the_run_is_refused(squares: Squares) -> None:
    run, data = squares
    with pytest.raises(DataError, match="classes"):
        explain_tree(run, data=dataclasses.replace(data, class_names=("a", "b", "c")))
    with pytest.raises(ConfigError, match="-1"):
        explain_tree(run, data=data, nearest=-1)
