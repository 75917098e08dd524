"""Export a tree as one ONNX file: 8-bit images in, prediction and path out, without torch or prototree.

The file holds all that happens to an image: resizing as Pillow does it, the network, the tree, abstention. Class names,
rules and preprocessing are in its metadata as JSON. `examples/predict_onnx.py` is all that is needed to use it.

Notation used for tensor shapes: B batch, N internal nodes, P prototypes, L leaves, K classes.
"""

import copy
import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prototree import archive
from prototree._version import __version__
from prototree.backbones.geometry import Preprocessing
from prototree.backbones.inference import NEEDED, OPSET, folded, to_onnx
from prototree.core import checkpoint, leaves
from prototree.core.confidence import distance_ratio, margin
from prototree.core.model import ProtoTree, greedy_leaves
from prototree.data.crops import center_offset
from prototree.errors import ConfigError, MissingExtraError
from prototree.inference.predict import make_step
from prototree.io import write_file
from prototree.run import Run

DOCS = {
    "images": "8-bit red, green and blue, all of one size; any number, any size",
    "class_probs": "probability of each class, by the whole tree",
    "prediction": "index of the class that the greedy path ends in",
    "confidence": "calibrated probability that this prediction is right",
    "abstained": "whether the tree does not know: the confidence is low or the image far from its prototypes",
    "leaf": "index of the leaf that the path ends in; its conditions are in `rules`",
    "p_right": "probability of going right at each node, node 1 first; the path goes right above one half",
    "similarity": "of each prototype to the patch of the image that is nearest to it",
    "nearest_patch": "index of that patch, row by row in a grid of `grid`, whose rows are shared evenly by the `crops`",
}
OUTPUTS = tuple(DOCS)[1:]
_MAX_BYTES = 2**31 - 1  # a protobuf cannot hold more


class ExportedTree(nn.Module):
    """A tree whose output is a tuple of tensors, in the order of `OUTPUTS`."""

    leaf_probs: Tensor
    leaf_labels: Tensor
    paths: Tensor
    goes_right: Tensor

    def __init__(self, tree: ProtoTree) -> None:
        super().__init__()
        self.tree = tree.eval()
        self.register_buffer("leaf_probs", leaves.class_log_probs(tree.leaf_logits.detach()).exp())
        self.register_buffer("leaf_labels", self.leaf_probs.argmax(dim=1))
        self.register_buffer("paths", torch.as_tensor(tree.topology.paths).long())
        self.register_buffer("goes_right", torch.as_tensor(tree.topology.goes_right))

    def forward(self, images: Float[Tensor, "B 3 h w"]) -> tuple[Tensor, ...]:
        tree, output = self.tree, self.tree(images)
        leaf = greedy_leaves(output.p_right, tree.topology)
        confidence = tree.calibration.of(margin(output.log_path_probs, leaf, self.leaf_labels))
        ood_score = torch.zeros_like(confidence)
        if tree.topology.n_nodes:
            nodes, goes_right = self.paths[leaf], self.goes_right[leaf]
            ood_score = distance_ratio(output.distance, nodes, goes_right, tree.distance_p95).amax(dim=1)
        return (
            leaves.predict(output.log_path_probs, self.leaf_probs),
            self.leaf_labels[leaf],
            confidence,
            ~tree.calibration.accepts(confidence, ood_score),
            leaf,
            output.p_right,
            tree.similarity(output.distance),
            output.patch,
        )


def export_onnx(run_or_tree: Run | ProtoTree | str | Path, out: str | Path) -> Path:
    """Export a tree as one ONNX file that takes 8-bit images and gives predictions, paths and abstentions.

    Args:
        run_or_tree: A run (its last stage, with your notes on prototypes), a tree, or the path of either.
        out: File to write; its name ends in `.onnx`.

    Returns:
        The file.

    Raises:
        MissingExtraError: The extra `export` is not installed.

    Examples:
        >>> export_onnx("runs/photos", "birds.onnx").name  # doctest: +SKIP
        'birds.onnx'
    """
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "export")
    out, source = Path(out), run_or_tree
    if out.suffix != ".onnx":
        raise ConfigError(f"expected a file that ends in .onnx, got {out}")
    if isinstance(source, str | Path):
        is_run = checkpoint.last_stage(Path(source)) is not None or archive.is_hub_name(source)
        source = Run.open(source) if is_run else checkpoint.load(source)
    tree, notes = (source.tree(), source.notes) if isinstance(source, Run) else (source, {})
    content = _whole_model(tree, metadata(tree, notes))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, content)
    return out


def metadata(tree: ProtoTree, notes: dict[int, str] | None = None) -> dict[str, str]:
    """Collect the metadata of the ONNX file; each value is JSON."""
    values = {
        "prototree": __version__,
        "classes": list(tree.class_names),
        "node_kind": tree.node_function.kind,
        "rules": _rules(tree, notes or {}),
        "prototypes": [
            {
                "prototype_row": row,
                "patch": tree.patch_name(row),
                "note": (notes or {}).get(row),
                "image": source and source.image,
                "class": source and tree.class_names[source.label],
                "box": source and list(source.patch_box),
            }
            for row, source in enumerate(tree.sources)
        ],
        "grid": list(tree.grid.shape),
        "crops": list(tree.features.backbone.crops),
        "preprocessing": asdict(tree.preprocessing),
        "docs": DOCS,
    }
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}


def _rules(tree: ProtoTree, notes: dict[int, str]) -> list[dict[str, Any]]:
    """List the leaves in order: the class of each, and the steps on its path; nodes count from 1."""
    probability, label = leaves.class_log_probs(tree.leaf_logits.detach()).exp().max(dim=1)
    rules = []
    for leaf in range(tree.topology.n_leaves):
        path = zip(tree.topology.paths[leaf].tolist(), tree.topology.goes_right[leaf].tolist(), strict=True)
        conditions = [
            {"node": node + 1, "goes_right": right, "text": make_step(tree, node, right, float(right), notes).text}
            for node, right in path
            if node >= 0
        ]
        name = tree.class_names[int(label[leaf])]
        rules.append({"class": name, "probability": float(probability[leaf]), "conditions": conditions})
    return rules


def _whole_model(tree: ProtoTree, properties: dict[str, str]) -> bytes:
    """Preprocessing, network and tree, joined to one graph."""
    import onnx

    tree = copy.deepcopy(tree).cpu().requires_grad_(False)
    tree.features.backbone = folded(tree.features.backbone.merge_last_block())
    size = tree.preprocessing.size
    core = to_onnx(ExportedTree(tree).eval(), torch.zeros(2, 3, size, size), OUTPUTS)
    core = onnx.compose.add_prefix(core, "tree/", rename_outputs=False)
    before = _preprocessing_graph(tree.preprocessing, core.ir_version)
    model = onnx.compose.merge_models(before, core, io_map=[("pixels", core.graph.input[0].name)])
    model.producer_name, model.producer_version = "prototree", __version__
    model.doc_string = "images of any size → " + ", ".join(OUTPUTS)
    onnx.helper.set_model_props(model, properties)
    if model.ByteSize() > _MAX_BYTES:
        raise ConfigError(f"expected a tree of less than 2 GiB for one ONNX file, got {model.ByteSize() >> 20} MiB")
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()  # type: ignore[no-any-return]


def _preprocessing_graph(preprocessing: Preprocessing, ir_version: int) -> Any:
    """Build the preprocessing graph, equal to `eval_transform` with its rounding: resize, centre crop, normalise."""
    import onnx
    from onnx import TensorProto, helper

    side, size, start = preprocessing.resize, preprocessing.size, center_offset(preprocessing)
    cubic = {"mode": "cubic", "cubic_coeff_a": -0.5} if preprocessing.interpolation == "bicubic" else {"mode": "linear"}
    nodes = [
        helper.make_node("Shape", ["images"], ["count"], start=0, end=1),
        helper.make_node("Concat", ["count", "square"], ["sizes"], axis=0),
        helper.make_node("Resize", ["images", "", "", "sizes"], ["squashed"], antialias=1, exclude_outside=1, **cubic),
        helper.make_node("Slice", ["squashed", "first", "last", "axes"], ["cropped"]),
        helper.make_node("Transpose", ["cropped"], ["channels_first"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["channels_first"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["values", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["pixels"]),
    ]
    whole = {"square": [side, side, 3], "first": [start, start], "last": [start + size] * 2, "axes": [1, 2]}
    levels = {"mean": preprocessing.mean, "std": preprocessing.std}
    constants = [helper.make_tensor(name, TensorProto.INT64, [len(value)], value) for name, value in whole.items()]
    constants += [
        helper.make_tensor(name, TensorProto.FLOAT, [1, 3, 1, 1], [255.0 * level for level in value])
        for name, value in levels.items()
    ]
    images = helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", "height", "width", 3])
    pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["batch", 3, size, size])
    graph = helper.make_graph(nodes, "prototree", [images], [pixels], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = ir_version
    return model
