"""Explanations of a small trained run, from the photo to the numbers."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import random_maps
from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.core.model import ProtoTree
from prototree.core.topology import Topology
from prototree.data import Box, ImageData, open_data
from prototree.data.images import read_image
from prototree.data.loading import ViewDataset
from prototree.data.transforms import to_input
from prototree.data.views import FULL, View
from prototree.errors import CheckpointError, ConfigError, DataError
from prototree.explain.decisions import explain_image
from prototree.explain.prototype_pictures import PrototypePictures, write_pictures
from prototree.explain.prototypes import explain_prototypes, fast_features, view_of
from prototree.explain.records import DecisionExplanation, VoteExplanation
from prototree.explain.tree import explain_tree, pictures_of
from prototree.explain.votes import explain_decision, explain_vote, local_paths, open_voters
from prototree.features.batches import PhotoBatches, maps_of
from prototree.pipeline.fit import fit
from prototree.run import PICTURES, Run
from prototree.training.projection import SourcePhotos, project
from tiny_training import TINY, write_squares

HARD = ("max_path", "greedy")


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, ImageData]:
    """A run on photos of coloured squares."""
    folder = tmp_path_factory.mktemp("squares")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROTOTREE_CACHE", str(folder / "cache"))
        data = open_data(write_squares(folder / "photos", train=12))
        return fit(data, folder / "run", settings=TINY), data


def projected(backbone: Backbone, data: ImageData, views: object, size: tuple[int, int] = (1, 1)) -> ProtoTree:
    """A random tree whose prototypes are patches of some views of the training photos."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    tree = ProtoTree(Topology.full(3), FeatureExtractor(backbone, 8), data.class_names, size, generator).eval()
    batches = PhotoBatches(ViewDataset(data.train, views, tree.preprocessing), 16, shuffle=False)  # type: ignore[arg-type]
    return project(tree, maps_of(batches, tree.features), SourcePhotos(data.root, batches.entries)).tree.eval()


def test_the_whole_tree(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    tree, seen = run.tree(), []
    explanation = explain_tree(
        run, data=data, nearest=3, notes={0: "red"}, tick=lambda done, total: seen.append((done, total))
    )
    assert explanation.class_names == data.class_names
    assert explanation.left == tuple(tree.topology.left.tolist())
    assert len(explanation.prototypes) == tree.topology.n_nodes
    assert np.array(explanation.leaf_probs).sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert set(explanation.accuracy) == {"soft", "max_path", "greedy"}
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for prototype, source in zip(explanation.prototypes, tree.sources, strict=True):
        assert source is not None
        assert prototype.note == ("red" if prototype.node == 0 else "")
        assert prototype.source.image == source.image
        assert prototype.source.similarity == pytest.approx(1.0, abs=1e-3)  # it is a patch of this very photo
        assert [where.method for where in prototype.source.where] == ["peak", "cell", "attribution"]
        assert source.shown is not None
        assert prototype.source.where[0].box.edges == pytest.approx(source.shown, abs=0.05)
        cell = prototype.source.where[1]
        assert (cell.box.left, cell.box.top, cell.box.right, cell.box.bottom) == pytest.approx(source.box)
        assert cell.hiding is not None
        assert cell.hiding.before == pytest.approx(1.0, abs=1e-3)
        assert len(prototype.nearest) == 3
        assert source.image not in {match.image for match in prototype.nearest}
        assert len({match.image for match in prototype.nearest}) == 3
        similarity = [match.similarity for match in prototype.nearest]
        assert similarity == sorted(similarity, reverse=True)
        assert len(prototype.right_share) == 3
        assert {cause.name for cause in prototype.causes} == {"hue", "saturation", "contrast", "texture", "shape"}


def test_hottest_place_of_a_match_lies_in_or_beside_its_box(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    for prototype in explain_prototypes(run.tree(), data, [0, 1], occlusion=True):
        for match in (prototype.source, *prototype.nearest):
            heat, box = match.where[0].heat, match.where[0].box
            assert heat.shape == match.photo.shape[:2]
            row, column = np.unravel_index(heat.argmax(), heat.shape)
            x, y = (column + 0.5) * match.size[0] / heat.shape[1], (row + 0.5) * match.size[1] / heat.shape[0]
            assert box.enlarge(1.0).contains(float(x), float(y))
        assert [where.method for where in prototype.source.where] == ["peak", "cell", "attribution", "occlusion"]


def test_one_prototype_alone_is_the_same_as_among_all(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    tree = run.tree()
    nodes = range(tree.topology.n_nodes)
    together, alone = explain_prototypes(tree, data, nodes)[1], explain_prototypes(tree, data, [1])[0]
    assert alone.right_share == together.right_share
    assert [m.image for m in alone.nearest] == [m.image for m in together.nearest]
    assert alone.source.where[0].box.edges == pytest.approx(together.source.where[0].box.edges, abs=1e-3)
    assert explain_prototypes(tree, data, []) == ()


@pytest.mark.parametrize("size", [(1, 1), (2, 1)])
@pytest.mark.parametrize("view", [FULL, View("crop", Box(4.0, 8.0, 36.0, 40.0)), View("mirror", None, True)])
def test_sources_are_found_again_in_crops_and_mirrored_views(
    tiny_backbone: Backbone, squares: tuple[Run, ImageData], view: View, size: tuple[int, int]
) -> None:
    data = squares[1]
    tree = projected(tiny_backbone, data, lambda _: (view,), size)
    for prototype in explain_prototypes(tree, data, range(3), nearest=0):
        source = tree.sources[prototype.node]
        assert source is not None
        box = next(where.box for where in prototype.source.where if where.method == "cell")
        assert (box.left, box.top, box.right, box.bottom) == pytest.approx(source.box)
        assert prototype.source.similarity == pytest.approx(1.0, abs=1e-3)
        assert prototype.nearest == ()


def test_a_tree_that_was_never_projected_shows_its_nearest_patches(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    tree = run.tree("pruned")
    assert tree.sources[0] is None
    explained = explain_prototypes(tree, data, [0], nearest=2)[0]
    assert explained.source.image == explained.nearest[0].image
    assert explained.source.similarity == pytest.approx(explained.nearest[0].similarity, abs=1e-3)


def test_older_sources_know_only_the_name_of_their_view(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    source = run.tree().sources[0]
    assert source is not None
    entry = ViewDataset(data.train[:1], lambda _: (View("box", Box(1.0, 2.0, 3.0, 4.0)),), run.tree().preprocessing)
    old = dataclasses.replace(source, view="box", region=None)
    assert view_of(old, entry.entries[0]) == View("box", Box(1.0, 2.0, 3.0, 4.0))
    new = dataclasses.replace(source, view="box", region=(5.0, 6.0, 7.0, 8.0), flip=True)
    assert view_of(new, entry.entries[0]) == View("box", Box(5.0, 6.0, 7.0, 8.0), True)


def test_fast_features_are_the_features(squares: tuple[Run, ImageData]) -> None:
    tree = squares[0].tree()
    images = random_maps(0, 2, 3, 32, 32, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in tree.state_dict().items()}
    with torch.no_grad():
        assert torch.allclose(fast_features(tree)(images), tree.features(images), atol=1e-4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tree.state_dict().items())


def photo_of(data: ImageData) -> Path:
    return data.test[0].path


def explain_one(squares: tuple[Run, ImageData], **options: bool) -> DecisionExplanation:
    run, data = squares
    return explain_image(run.tree(), photo_of(data), pictures_of(run), label=data.test[0].label, **options)


def test_one_decision_says_what_the_tree_decides(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    explanation, tree = explain_one(squares), run.tree()
    images = to_input(read_image(photo_of(data)), tree.preprocessing)[None]
    decisions = tree.predict(images)
    assert explanation.soft == pytest.approx(tuple(decisions.soft[0].tolist()))
    assert set(explanation.paths) == set(HARD)
    for strategy, path in explanation.paths.items():
        expected = decisions.path(strategy)
        nodes = [node for node in expected.nodes[0].tolist() if node >= 0]
        assert path.leaf == int(expected.leaf[0])
        assert [step.node for step in path.steps] == nodes
        assert [step.goes_right for step in path.steps] == expected.goes_right[0].tolist()[: len(nodes)]
        assert [step.p_right for step in path.steps] == pytest.approx(expected.p_right[0].tolist()[: len(nodes)])
        assert path.class_probs == pytest.approx(tuple(decisions.class_probs(strategy)[0].tolist()))
        for step in path.steps:
            assert step.left is None
            assert step.chosen is step.right
            assert step.right.prototype == step.node
            assert step.right.in_reach == (step.p_right > 0.5)
            assert step.right.match.similarity == pytest.approx(step.p_right, abs=1e-6)
            assert [where.method for where in step.right.match.where] == ["peak", "cell"]
            assert step.right.match.where[0].hiding is None
            assert step.right.picture.shape[2] == 3
        runner_up = explanation.runner_up[strategy]
        assert runner_up is None or runner_up.label != int(decisions.labels(strategy)[0])
    assert explanation.size == (40, 40)
    assert explanation.image == photo_of(data).name


def test_honest_answers_on_request(squares: tuple[Run, ImageData]) -> None:
    explanation = explain_one(squares, attribution=True, occlusion=True)
    for step in explanation.paths["max_path"].steps:
        assert [where.method for where in step.right.match.where] == ["peak", "cell", "attribution", "occlusion"]
        for where in step.right.match.where:
            assert where.hiding is not None
            assert where.hiding.before == pytest.approx(step.p_right, abs=1e-5)


def test_a_picture_in_memory_is_explained_like_its_file(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    tree, pictures = run.tree(), pictures_of(run)
    from_file = explain_image(tree, photo_of(data), pictures)
    from_memory = explain_image(tree, Image.open(photo_of(data)), pictures, name="mine")
    assert from_memory.soft == from_file.soft
    assert from_memory.image == "mine"
    with_alpha = explain_image(tree, Image.open(photo_of(data)).convert("RGBA"), pictures)
    assert with_alpha.soft == from_file.soft


def test_boxes_of_a_wide_photo_are_in_its_own_pixels(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    wide = Image.open(photo_of(data)).resize((1200, 80))
    explanation = explain_image(run.tree(), wide, pictures_of(run))
    step = explanation.paths["max_path"].steps[0]
    rows, columns = run.tree().features.backbone.map_size
    box = step.right.match.where[0].box
    assert (box.width, box.height) == pytest.approx((1200 / columns, 80 / rows))
    assert explanation.photo.shape == (32, 480, 3)


def test_a_tree_that_is_one_leaf_has_nothing_to_explain(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    tree = run.tree()
    leaf = tree.with_topology(Topology.from_children([], [], ~0)[0], np.array([], dtype=int), np.array([0]))
    explanation = explain_image(leaf, photo_of(data), PrototypePictures(leaf), attribution=True)
    assert all(path.steps == () for path in explanation.paths.values())
    assert explanation.runner_up == {"max_path": None, "greedy": None}
    assert explain_prototypes(leaf, data, range(0)) == ()


def test_trees_vote_by_the_mean_of_their_probabilities(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    first, second = run.tree(), run.tree("pruned")
    pictures = [PrototypePictures(first, data), PrototypePictures(second, data)]
    vote = explain_vote([first, second], photo_of(data), pictures)
    mean = np.mean([decision.soft for decision in vote.decisions], axis=0)
    assert vote.class_probs == pytest.approx(tuple(mean))
    assert len(vote.decisions) == 2
    with pytest.raises(ConfigError, match="pictures"):
        explain_vote([first, second], photo_of(data), pictures[:1])
    voters = open_voters([run.folder, run.folder])
    assert isinstance(explain_decision(voters, photo_of(data)), VoteExplanation)
    assert isinstance(explain_decision(voters[:1], photo_of(data)), DecisionExplanation)
    with pytest.raises(CheckpointError, match="expected a run"):
        open_voters([run.folder / "nowhere"])


def test_a_network_made_faster_for_many_images_explains_the_same(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    voters = open_voters([run.folder])
    quick = [voter.for_many() for voter in voters]
    found, expected = (explain_decision(some, photo_of(data)) for some in (quick, voters))
    assert isinstance(found, DecisionExplanation)
    assert isinstance(expected, DecisionExplanation)
    assert found.soft == pytest.approx(expected.soft, abs=1e-4)
    assert found.paths["greedy"].leaf == expected.paths["greedy"].leaf


def test_a_folder_explains_on_a_machine_without_the_data(squares: tuple[Run, ImageData], tmp_path: Path) -> None:
    run, data = squares
    alone = Run(shutil.copytree(run.folder, tmp_path / "alone"))
    alone.note(source=str(tmp_path / "gone"))
    assert (alone.folder / "prototypes" / "000.webp").exists()  # projection stores them
    explanation = explain_tree(alone)
    before = explain_tree(run, data=data, nearest=1)
    for found, whole in zip(explanation.prototypes, before.prototypes, strict=True):
        assert found.source.where[0].box.edges == pytest.approx(whole.source.where[0].box.edges, abs=1e-3)
        assert np.array_equal(found.source.crop, whole.source.crop)
        assert found.nearest == ()
    decision = explain_image(alone.tree(), photo_of(data), pictures_of(alone))
    assert decision.soft == explain_one(squares).soft
    shutil.rmtree(alone.folder / "prototypes")
    assert (explain_tree(alone).prototypes[0].source.crop == 160).all()
    write_pictures(alone.tree(), data, alone.folder / PICTURES)
    assert not (explain_tree(alone).prototypes[0].source.crop == 160).all()


def test_data_of_other_classes_is_refused(squares: tuple[Run, ImageData]) -> None:
    run, data = squares
    with pytest.raises(DataError, match="expected the classes of the run"):
        explain_tree(run, data=dataclasses.replace(data, class_names=("a", "b", "c")))
    with pytest.raises(ConfigError, match="at least 0"):
        explain_tree(run, data=data, nearest=-1)


def test_images_named_on_the_command_line(tmp_path: Path) -> None:
    photos = write_squares(tmp_path / "photos", train=2, test=1)
    (photos / "notes.txt").write_text("no image")
    (photos / "._x.png").write_text("no image either")
    one = photos / "train" / "red" / "0.png"
    found = local_paths([one, photos / "train" / "red", one])
    assert found == [one, photos / "train" / "red" / "1.png"]
    assert len(local_paths([photos])) == 9
    (tmp_path / "empty").mkdir()
    for places, message in (
        ([tmp_path / "nowhere"], "does not exist"),
        ([tmp_path / "empty"], "holds no image"),
        ([photos / "notes.txt"], "is not an image"),
        ([], "at least one image"),
    ):
        with pytest.raises(DataError, match=message):
            local_paths(places)
    with pytest.raises(DataError, match="at most 5 images"):
        local_paths([photos], limit=5)
