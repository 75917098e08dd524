"""Makes `import torchvision` (and so `import timm`) work beside a torch of another build.

Torchvision's wheels carry operators compiled for one build of torch. Beside another build (the usual case on a
CPU-only machine) they cannot load, and `import torchvision` fails although transforms and models need none of them.
Declaring the two names it looks for is enough. Beside a matching torch this module does nothing.

Import it before torchvision or timm.
"""

import sys

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[str] = []  # keeps to one declaration a process; torch refuses a second


def _ensure_importable() -> None:
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error) or _declared:
            raise
    else:
        return
    for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", _SCHEMA)
        _declared.append(operator)
    import torchvision  # noqa: F401


_ensure_importable()
