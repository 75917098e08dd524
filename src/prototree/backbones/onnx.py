"""A module as an ONNX graph, for programs and engines that are not torch."""

import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OPSET = 18  # the first in which Resize smooths as Pillow does
NEEDED = ("onnx", "onnxscript")


def is_possible() -> bool:
    """Whether the packages that write ONNX are installed."""
    return all(importlib.util.find_spec(package) is not None for package in NEEDED)


@torch.no_grad()
def to_onnx(module: nn.Module, images: Tensor, outputs: Sequence[str], *, as_many: bool = False) -> Any:
    """The graph of a module that takes `images`, any number at a time; or always `as_many` as these, which is written
    down in half the time.
    """
    with _quiet():
        batch = None if as_many else ({0: torch.export.Dim("batch", min=1)},)
        program = torch.export.export(module, (images,), dynamic_shapes=batch)
        exported = torch.onnx.export(
            program,
            (images,),
            input_names=["images"],
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    assert exported is not None
    model = exported.model_proto
    for output in () if as_many else model.graph.output:
        output.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's remarks about itself."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export", "onnx_ir")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
