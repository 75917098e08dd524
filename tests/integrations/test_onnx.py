"""A tree as an ONNX file says what the tree says, from photos as they are, for both questions, CNN and ViT."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from prototree.backbones.backbone import Backbone, FeatureExtractor
from prototree.cli.predict import export
from prototree.core import checkpoint
from prototree.core.confidence import Calibration
from prototree.core.model import ProtoTree, PrototypeSource
from prototree.core.nodes import NodeFunction
from prototree.core.topology import Topology
from prototree.data.transforms import eval_transform
from prototree.errors import ConfigError, MissingExtraError
from prototree.integrations import onnx as module
from prototree.integrations.onnx import OUTPUTS, ExportedTree, export_onnx

onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")

EXAMPLE = Path(__file__).parents[2] / "examples" / "predict_onnx.py"


def photos(n: int, height: int, width: int) -> np.ndarray:
    """Soft blobs of colour, as neighbouring pixels of real photos are alike."""
    coarse = np.random.default_rng(n).integers(0, 256, (n, 6, 5, 3), dtype=np.uint8)
    size = (width, height)
    return np.stack([np.asarray(Image.fromarray(one).resize(size, Image.Resampling.BICUBIC)) for one in coarse])


def inputs(tree: ProtoTree, pixels: np.ndarray) -> torch.Tensor:
    return torch.stack([eval_transform(Image.fromarray(one), tree.preprocessing) for one in pixels])


def small_tree(name: str, size: int, node_function: NodeFunction, prototype_size: tuple[int, int]) -> ProtoTree:
    """A lopsided tree on a tiny network; prototypes are patches of photos, and half of the photos come near enough."""
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone(name, None, image_size=size).eval(), 8)
    topology = Topology.from_children([1, 3, ~0, ~1, ~3], [2, ~4, 4, ~2, ~5])[0]
    tree = ProtoTree(topology, features, ["ant", "bee", "wasp"], prototype_size, node_function=node_function).eval()
    maps = features(inputs(tree, photos(12, size, size))).detach()
    tree.prototypes.data = maps[: tree.n_prototypes, :, : prototype_size[0], : prototype_size[1]].clone()
    tree.radius = tree.forward_features(maps).distance.detach().median(dim=0).values.clamp_min(0.01)
    tree.leaf_logits.data = 5 * torch.rand(tree.topology.n_leaves, 3)
    tree.calibration = Calibration(0.7, -0.2, 9)
    least = float(tree.decode(tree.forward_features(maps)).confidence.quantile(0.5))
    tree.calibration = replace(tree.calibration, min_confidence=least, max_ood_score=3.0)
    tree.distance_p95 = torch.full_like(
        tree.distance_p95, float(tree.forward_features(maps).distance.detach().median())
    )
    source = PrototypeSource("bees/1.jpg", 1, "full", (0, 0), (1.0, 2.0, 3.0, 4.0), 0.0)
    tree.sources = (source, *tree.sources[1:])
    return tree


CASES = {
    "cnn, presence, crop": ("test_resnet", 96, NodeFunction("presence", 2.0), (1, 1)),
    "cnn, choice, twice": ("test_resnet", 64, NodeFunction("pairwise", 6.0), (1, 1)),
    "vit, choice": ("test_vit", 96, NodeFunction("pairwise", 6.0), (1, 1)),
    "cnn, choice, large patches": ("test_efficientnet", 64, NodeFunction("pairwise", 3.0), (2, 1)),
}


QUICK_CASES = ("cnn, presence, crop", "vit, choice")


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=() if case in QUICK_CASES else pytest.mark.slow) for case in CASES],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ProtoTree, Path]:
    tree = small_tree(*CASES[request.param])
    if "twice" in request.param:
        tree.set_crops((1.0, 0.7))
    if "crop" in request.param:
        tree.preprocessing = replace(tree.preprocessing, resize=tree.preprocessing.size + 11, interpolation="bilinear")
    folder = tmp_path_factory.mktemp("onnx")
    if "vit" in request.param:
        return tree, export_onnx(tree, folder / "out" / "tree.onnx")
    checkpoint.save(tree, folder / "run" / "projected")
    (folder / "run" / "config.toml").write_text("version = 2\n")
    (folder / "run" / "notes.json").write_text('{"2": "striped belly"}')
    export(folder / "run", folder / "out" / "tree.onnx")
    return tree, folder / "out" / "tree.onnx"


def answer(path: Path, pixels: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path.read_bytes())
    return dict(zip(OUTPUTS, session.run(list(OUTPUTS), {"images": pixels}), strict=True))


def expected(tree: ProtoTree, pixels: np.ndarray) -> dict[str, np.ndarray]:
    images = inputs(tree, pixels)
    decisions, routed = tree.predict(images), tree(images)
    return {
        "class_probs": decisions.soft.numpy(),
        "prediction": decisions.labels("greedy").numpy(),
        "confidence": decisions.confidence.numpy(),
        "abstained": decisions.abstained.numpy(),
        "leaf": decisions.greedy.leaf.numpy(),
        "p_right": routed.p_right.numpy(),
        "similarity": tree.similarity(routed.distance.detach()).numpy(),
        "nearest_patch": routed.patch.numpy(),
    }


def test_the_same_input_gives_the_same_numbers_whatever_the_batch(exported: tuple[ProtoTree, Path]) -> None:
    tree, path = exported
    side = tree.preprocessing.resize
    for n in (1, 12):
        pixels = photos(n, side, side)  # nothing to resize: the network sees the same numbers
        found, wanted = answer(path, pixels), expected(tree, pixels)
        for name in OUTPUTS:
            np.testing.assert_allclose(found[name].astype(float), wanted[name].astype(float), atol=1e-4, err_msg=name)
    assert len(set(wanted["leaf"].tolist())) > 1
    assert 0 < found["abstained"].sum() < 12
    for height, width in ((150, 231), (40, 200), (333, 64)):
        pixels = photos(6, height, width)  # resized as Pillow does
        found, wanted = answer(path, pixels), expected(tree, pixels)
        np.testing.assert_allclose(found["class_probs"], wanted["class_probs"], atol=0.02)
        np.testing.assert_allclose(found["p_right"], wanted["p_right"], atol=0.02)


def test_it_is_one_file_that_says_what_it_is(exported: tuple[ProtoTree, Path]) -> None:
    tree, path = exported
    assert [one.name for one in path.parent.iterdir()] == ["tree.onnx"]
    about = onnxruntime.InferenceSession(path.read_bytes()).get_modelmeta().custom_metadata_map
    about = {key: json.loads(value) for key, value in about.items()}
    assert about["classes"] == ["ant", "bee", "wasp"]
    assert about["preprocessing"] == json.loads(json.dumps(asdict(tree.preprocessing)))
    assert about["node_kind"] == tree.node_function.kind
    assert set(about["docs"]) == {"images", *OUTPUTS}
    source = {"image": "bees/1.jpg", "class": "bee", "box": [1, 2, 3, 4]}
    patch = tree.patch_name(0)
    assert about["prototypes"][0] == {"prototype_row": 0, "patch": patch, "note": None} | source
    from_tree = tree.preprocessing.size == 96 and tree.node_function.kind == "pairwise"
    assert about["prototypes"][1]["note"] == (None if from_tree else "striped belly")
    assert tuple(about["grid"]) == tree.grid.shape
    words = " ".join(condition["text"] for rule in about["rules"] for condition in rule["conditions"])
    assert ("“striped belly”" in words) is not from_tree  # the rules use the names, too
    for leaf, rule in enumerate(about["rules"]):
        nodes = [node + 1 for node in tree.topology.paths[leaf].tolist() if node >= 0]
        assert [condition["node"] for condition in rule["conditions"]] == nodes
        assert rule["class"] == tree.class_names[int(tree.leaf_logits[leaf].argmax())]


def test_the_example_needs_onnxruntime_and_pillow_alone(exported: tuple[ProtoTree, Path], tmp_path: Path) -> None:
    tree, path = exported
    pixels = photos(1, 90, 120)
    Image.fromarray(pixels[0]).save(tmp_path / "one.png")
    forbid = "import sys; sys.modules['torch'] = sys.modules['prototree'] = None; import runpy; del sys.argv[0]; "
    code = f"{forbid}runpy.run_path(sys.argv[0], run_name='__main__')"
    words = [sys.executable, "-c", code, str(EXAMPLE), str(path), str(tmp_path / "one.png")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stderr
    wanted = expected(tree, pixels)
    assert f": {tree.class_names[wanted['prediction'][0]]} (confidence {wanted['confidence'][0]:.0%})" in done.stdout
    depth = int(tree.topology.depths[wanted["leaf"][0]])
    assert len(done.stdout.splitlines()) == depth + 2


def test_another_ending_and_a_missing_package_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = small_tree(*CASES["cnn, presence, crop"])
    with pytest.raises(ConfigError, match=r"ends in \.onnx"):
        export_onnx(tree, tmp_path / "tree.pt")
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"prototree\[export\]"):
        export_onnx(tree, tmp_path / "tree.onnx")


def test_a_tree_of_one_leaf_can_be_written_down() -> None:
    torch.manual_seed(0)
    features = FeatureExtractor(Backbone("test_resnet", None, image_size=64).eval(), 4)
    tree = ProtoTree(Topology.from_children([], [], root=~0)[0], features, 2).eval()
    images = torch.rand(3, 3, 64, 64)
    program = torch.export.export(ExportedTree(tree), (images,), dynamic_shapes=({0: torch.export.Dim("b")},))
    for one, other in zip(program.module()(images), ExportedTree(tree)(images), strict=True):
        torch.testing.assert_close(one, other)
