"""Predict photos with an exported tree, onnxruntime and Pillow alone.

python examples/predict_onnx.py TREE.onnx PHOTO…
"""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
about = {key: json.loads(value) for key, value in session.get_modelmeta().custom_metadata_map.items()}
names = [output.name for output in session.get_outputs()]


def patch_of(prototype: int) -> str:
    """Where a prototype was cut from."""
    known = about["prototypes"][prototype]
    return known["note"] or (f"a patch of {known['image']}" if known["image"] else f"prototype {prototype}")


for path in sys.argv[2:]:
    photo = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    found = dict(zip(names, session.run(names, {"images": np.asarray(photo)[None]}), strict=True))
    rule = about["rules"][found["leaf"][0]]
    unsure = "; the tree does not know" if found["abstained"][0] else ""
    print(f"{path}: {rule['class']} (confidence {found['confidence'][0]:.0%}){unsure}")
    n_nodes = found["p_right"].shape[1]
    for turn in rule["conditions"]:
        node, right = turn["node"] - 1, turn["goes_right"]  # nodes are counted from 1
        probability = found["p_right"][0, node] if right else 1 - found["p_right"][0, node]
        if about["node_kind"] == "pairwise":
            rather, than = (node, node + n_nodes) if right else (node + n_nodes, node)
            print(f"  more like {patch_of(rather)} than {patch_of(than)} ({probability:.0%})")
        else:
            print(f"  {'has' if right else 'lacks'} {patch_of(node)} ({probability:.0%})")
    best = np.argsort(-found["class_probs"][0])[:3]
    print("  all leaves:", ", ".join(f"{about['classes'][k]} {found['class_probs'][0, k]:.0%}" for k in best))
