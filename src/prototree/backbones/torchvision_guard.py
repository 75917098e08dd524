"""Make `import torchvision` (and so `import timm`) work beside a torch of another build; import this before them.

Torchvision's wheels carry operators compiled for one build of torch. Beside another, such as a CPU-only torch, they do
not load, and `import torchvision` fails although transforms and models need none of them. Declaring the names it looks
for is enough.
"""

import sys

import torch

_declared: list[str] = []  # once a process; torch refuses a second declaration

try:
    import torchvision
except RuntimeError as error:
    if "torchvision::" not in str(error):
        raise
    for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[module]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(operator)
    import torchvision  # noqa: F401
