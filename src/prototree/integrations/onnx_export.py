"""A tree as one ONNX file: 8-bit photos in, answer and path out, for programs that have neither torch nor prototree.

The file holds all that happens to a photo: resizing as Pillow does it, the network, the tree. Class names, rules and
preprocessing are in its metadata as JSON. `examples/ask_onnx.py` is all that is needed to use it.

Notation used for tensor shapes: B batch, N internal nodes, P prototypes, L leaves, K classes.
"""

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prototree._version import __version__
from prototree.backbones.bn_fusion import folded
from prototree.backbones.onnx import NEEDED, OPSET, to_onnx
from prototree.backbones.preprocessing import Preprocessing
from prototree.core import checkpoint, hub, leaves, routing
from prototree.core.confidence import margin
from prototree.core.model import ProtoTree
from prototree.data.views import centre_offset
from prototree.errors import ConfigError, MissingExtraError
from prototree.files import write_file
from prototree.inference.answers import turn_at
from prototree.run import Run

OUTPUTS = ("probabilities", "answer", "confidence", "leaf", "right", "similarity", "patch")
MEANING = {
    "photos": "8-bit red, green and blue, all of one size; any number, any size",
    "probabilities": "of each class, by the whole tree",
    "answer": "number of the class that the path of the photo ends in",
    "confidence": "that this answer is right",
    "leaf": "number of the leaf that the path ends in; its conditions are in `rules`",
    "right": "probability of going right at each node; the path goes right above one half",
    "similarity": "of each prototype to the patch of the photo that is nearest to it",
    "patch": "number of that patch, row by row in a grid of `patches`, whose rows are shared evenly by the `crops`",
}
_MAX_BYTES = 2**31 - 1  # a protobuf cannot hold more


class Asked(nn.Module):
    """A tree whose answer is a row of tensors, in the order of `OUTPUTS`."""

    leaf_probs: Tensor
    leaf_labels: Tensor

    def __init__(self, tree: ProtoTree) -> None:
        super().__init__()
        self.tree = tree.eval()
        probs = leaves.class_log_probs(tree.leaf_logits.detach()).exp()
        self.register_buffer("leaf_probs", probs)
        self.register_buffer("leaf_labels", probs.argmax(dim=1))

    def forward(
        self, images: Float[Tensor, "B 3 h w"]
    ) -> tuple[
        Float[Tensor, "B K"],
        Int[Tensor, " B"],
        Float[Tensor, " B"],
        Int[Tensor, " B"],
        Float[Tensor, "B N"],
        Float[Tensor, "B P"],
        Int[Tensor, "B P"],
    ]:
        routed = self.tree(images)
        leaf = routing.greedy_leaves(routed.p_right, self.tree.topology)
        ahead = margin(routed.log_path_probs, leaf, self.leaf_labels)
        return (
            leaves.predict(routed.log_path_probs, self.leaf_probs),
            self.leaf_labels[leaf],
            self.tree.calibration.of(ahead),
            leaf,
            routed.p_right,
            self.tree.similarity(routed.distance),
            routed.patch,
        )


def export_onnx(run_or_tree: Run | ProtoTree | str | Path, out: str | Path) -> Path:
    """Writes a tree as an ONNX file; for a run, the tree after its last stage, with your notes about prototypes.

    Examples:
        >>> export_onnx("runs/photos", "birds.onnx").name  # doctest: +SKIP
        'birds.onnx'
    """
    for package in NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "export")
    out = Path(out)
    if out.suffix != ".onnx":
        raise ConfigError(f"expected a file that ends in .onnx, got {out}")
    run = Run.open(run_or_tree) if isinstance(run_or_tree, str | Path) and _is_run(run_or_tree) else run_or_tree
    if isinstance(run, Run):
        tree, notes = run.tree(), run.notes
    else:
        tree, notes = run if isinstance(run, ProtoTree) else checkpoint.load(run), {}
    content = _whole_model(tree, metadata(tree, notes))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_file(out, content)
    return out


def metadata(tree: ProtoTree, notes: dict[int, str] | None = None) -> dict[str, str]:
    """What the file says of itself: each value is JSON."""
    grid = tree.grid
    values = {
        "prototree": __version__,
        "classes": list(tree.class_names),
        "question": tree.question.kind,
        "rules": _rules(tree),
        "prototypes": [
            {
                "note": (notes or {}).get(number),
                "image": source and source.image,
                "class": source and tree.class_names[source.label],
                "box": source and list(source.box),
            }
            for number, source in enumerate(tree.sources)
        ],
        "patches": list(grid.shape),
        "crops": list(tree.features.backbone.crops),
        "preprocessing": tree.preprocessing.to_json(),
        "meaning": MEANING,
    }
    return {key: json.dumps(value, ensure_ascii=False) for key, value in values.items()}


def _rules(tree: ProtoTree) -> list[dict[str, Any]]:
    """The leaves in order: the class that each stands for, and the turns on the way to it, in words too."""
    probability, label = leaves.class_log_probs(tree.leaf_logits.detach()).exp().max(dim=1)
    rules = []
    for leaf in range(tree.topology.n_leaves):
        way = zip(tree.topology.paths[leaf].tolist(), tree.topology.goes_right[leaf].tolist(), strict=True)
        turns = [turn_at(tree, node, right, float(right)) for node, right in way if node >= 0]
        conditions = [{"node": turn.node, "goes_right": turn.present, "words": str(turn)} for turn in turns]
        name = tree.class_names[int(label[leaf])]
        rules.append({"class": name, "probability": float(probability[leaf]), "conditions": conditions})
    return rules


def _is_run(folder: str | Path) -> bool:
    return checkpoint.last_stage(Path(folder)) is not None or hub.is_hub_name(folder)


def _whole_model(tree: ProtoTree, about: dict[str, str]) -> bytes:
    """Photos → network and tree, joined to one graph."""
    import onnx

    core = _core(tree)
    before = _before_the_network(tree.preprocessing, core.ir_version)
    before = onnx.compose.add_prefix(before, "photos/", rename_inputs=False, rename_outputs=False)  # its own names
    model = onnx.compose.merge_models(before, core, io_map=[("images", "images")])
    model.producer_name, model.producer_version = "prototree", __version__
    model.doc_string = "photos of any size → " + ", ".join(OUTPUTS)
    onnx.helper.set_model_props(model, about)
    if model.ByteSize() > _MAX_BYTES:
        raise ConfigError(f"expected a tree of less than 2 GiB for one ONNX file, got {model.ByteSize() >> 20} MiB")
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()  # type: ignore[no-any-return]


def _core(tree: ProtoTree) -> Any:
    """Network and tree, from the network's input."""
    tree = copy.deepcopy(tree).cpu().requires_grad_(False)
    tree.features.backbone = folded(tree.features.backbone.unsplit())
    asked, size = Asked(tree).eval(), tree.preprocessing.size
    images = torch.zeros(2, 3, size, size)
    return to_onnx(asked, images, OUTPUTS)


def _before_the_network(preprocessing: Preprocessing, ir_version: int) -> Any:
    """What `data.augment.to_input` does to a photo, rounding included: squash, cut out the centre, normalise."""
    import onnx
    from onnx import TensorProto, helper

    side, size, start = preprocessing.resize, preprocessing.size, centre_offset(preprocessing)
    cubic = {"mode": "cubic", "cubic_coeff_a": -0.5} if preprocessing.interpolation == "bicubic" else {"mode": "linear"}
    nodes = [
        helper.make_node("Shape", ["photos"], ["count"], start=0, end=1),
        helper.make_node("Concat", ["count", "square"], ["sizes"], axis=0),
        helper.make_node("Resize", ["photos", "", "", "sizes"], ["squashed"], antialias=1, exclude_outside=1, **cubic),
        helper.make_node("Slice", ["squashed", "first", "last", "axes"], ["cut"]),
        helper.make_node("Transpose", ["cut"], ["pixels"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["pixels"], ["values"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["values", "mean"], ["centred"]),
        helper.make_node("Div", ["centred", "std"], ["images"]),
    ]
    whole = {"square": [side, side, 3], "first": [start, start], "last": [start + size] * 2, "axes": [1, 2]}
    levels = {"mean": preprocessing.mean, "std": preprocessing.std}
    constants = [helper.make_tensor(name, TensorProto.INT64, [len(value)], value) for name, value in whole.items()]
    constants += [
        helper.make_tensor(name, TensorProto.FLOAT, [1, 3, 1, 1], [255.0 * level for level in value])
        for name, value in levels.items()
    ]
    photos = helper.make_tensor_value_info("photos", TensorProto.UINT8, ["batch", "height", "width", 3])
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, size, size])
    graph = helper.make_graph(nodes, "prototree", [photos], [images], constants)
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    model.ir_version = ir_version
    return model
