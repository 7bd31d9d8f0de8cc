"""Normalizations in half precision on CUDA, where PyTorch's kernels give float32 statistics beside whatever parameters: sessions take every graph."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

# Compiles `F.batch_norm` and others with every mixture of dtypes that eager PyTorch takes, and prints what ran outside of ONNX Runtime.
_CODE = """
import json, sys
import torch
from torch.nn import functional as F
import ort_backend
from ort_backend import graph_report
from ort_backend.runtime import capabilities
from tools.cuda_placement.capture import as_on_cuda

half, package, kernels = getattr(torch, sys.argv[1]), *sys.argv[2:]
if package == "plain":
    has_contrib_op = capabilities.has_contrib_op
    capabilities.has_training = capabilities.has_python_op = capabilities.has_aten_op = lambda: False
    is_of_training = lambda name: name.endswith("Grad") or name in ("BatchNormInternal", "YieldOp")
    capabilities.has_contrib_op = lambda name, *rest: not is_of_training(name) and has_contrib_op(name, *rest)
wide = torch.float32

def made(shape, dtype):
    return None if dtype is None else torch.rand(shape, dtype=dtype)

def batch(x, w, b, mean, var, training):
    return F.batch_norm(x, mean, var, w, b, training)

calls = {}
pictures, vectors = (2, 16, 8, 8), (32, 16)
for shape, w, b, s, training in [
    (pictures, None, None, None, True), (vectors, None, None, wide, True), (vectors, None, None, wide, False), (vectors, wide, wide, None, True),
    (pictures, wide, wide, wide, True), (pictures, wide, wide, wide, False), (pictures, wide, None, wide, True), (pictures, None, wide, wide, False),
    (pictures, None, wide, None, True), (vectors, half, half, half, True), (pictures, half, half, half, False), (pictures, half, None, half, True),
]:
    calls[f"batch_norm {len(shape)} {w} {b} {s} {training}"] = batch, shape, (made(16, w), made(16, b), made(16, s), made(16, s)), (training,)
for w in (None, half):
    calls[f"layer_norm {w}"] = (lambda x, w, b: F.layer_norm(x, (16,), w, b)), (2, 8, 16), (made(16, w), made(16, w)), ()
    calls[f"layer_norm of two {w}"] = (lambda x, w, b: F.layer_norm(x, (8, 16), w, b)), (2, 8, 16), (made((8, 16), w), made((8, 16), w)), ()
    calls[f"layer_norm of long rows {w}"] = (lambda x, w, b: F.layer_norm(x, (1 << 15,), w, b)), (2, 1 << 15), (made(1 << 15, w), None), ()
    calls[f"group_norm {w}"] = (lambda x, w, b: F.group_norm(x, 4, w, b)), (2, 16, 8, 8), (made(16, w), made(16, w)), ()
    calls[f"group_norm of large groups {w}"] = (lambda x, w, b: F.group_norm(x, 1, w, b)), (2, 16, 64, 64), (made(16, w), made(16, w)), ()
for w in (None, half, wide):
    calls[f"instance_norm {w}"] = (lambda x, w, b: F.instance_norm(x, None, None, w, b)), (2, 16, 8, 8), (made(16, w), made(16, w)), ()

for name, (function, shape, tensors, rest) in calls.items():
    for one in tensors[:2]:
        if one is not None:
            one.requires_grad_()
    torch._dynamo.reset()
    graph_report.clear()
    options = {"provider": "CUDAExecutionProvider", "kernels": kernels}
    # With work around it, for which a session is worth its cost.
    call = lambda x, *args: (function((x * 2).exp().tanh().exp(), *args) * 2).exp().tanh().exp()
    x = torch.rand(shape, dtype=half, requires_grad=True)
    with as_on_cuda():
        torch.compile(call, backend="ort_training", options=options, dynamic=False)(x, *tensors, *rest)
    print(json.dumps([name, [one.operator for graph in ort_backend.report().graphs for one in graph.outside]]))
"""


def _outside(run: Callable[..., object], *arguments: str) -> dict[str, set[str]]:
    """The operators that PyTorch runs, by name of the call."""
    code = f"import sys; sys.argv[1:] = {list(arguments)!r}\n{_CODE}"
    found: dict[str, set[str]] = {}
    for name, outside in map(json.loads, run(code).stdout.splitlines()):  # type: ignore[attr-defined]
        found[name] = set(outside)
    assert len(found) == 25
    return found


@pytest.mark.parametrize("package", ["training", "plain"])
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_every_mixture_of_dtypes_runs_on_onnxruntime(over_stand_in: Callable[..., object], half: str, package: str) -> None:
    assert not {name: outside for name, outside in _outside(over_stand_in, half, package, "onnxruntime").items() if outside}


def test_what_has_no_kernel_in_bfloat16_is_pytorchs(over_stand_in: Callable[..., object]) -> None:
    for name, outside in _outside(over_stand_in, "bfloat16", "training", "measured").items():
        assert bool(outside) == name.startswith(("batch_norm", "instance_norm", "group_norm")), (name, outside)
