"""Fusions of ONNX Runtime's for the CUDA provider that make a node which does not run there."""

from __future__ import annotations

import json
from collections.abc import Callable

import onnx_ir as ir
import pytest

from ort_backend.runtime import harmful_optimizers

_CODE = """
import collections, json
import onnx, torch
from torch.nn import functional as F
from tools.cuda_placement.capture import as_on_cuda

options = {"provider": "CUDAExecutionProvider", "session_options": {"optimized_model_filepath": "/dev/shm/test_fusions.onnx"}}
for dtype, size in [(torch.float32, (16,)), (torch.float16, (16,)), (torch.bfloat16, (16,)), (torch.float32, (8, 16)), (torch.bfloat16, (8, 16))]:
    x, w = torch.rand(2, 8, 16, dtype=dtype), torch.rand(size, dtype=dtype)
    torch._dynamo.reset()
    with torch.no_grad(), as_on_cuda():
        torch.compile(lambda x, w: F.layer_norm(x * 2 + x.exp(), size, w, w), backend="ort_training", options=options, dynamic=False)(x, w)
    nodes = [node.op_type for node in onnx.load(options["session_options"]["optimized_model_filepath"]).graph.node]
    print(json.dumps("SkipLayerNormalization" in nodes))
"""


def test_a_sum_and_its_normalization(over_stand_in: Callable[..., object], tmp_path: object) -> None:
    """One node where the kernel takes it: normalized over one dimension, and of a dtype that the operator has."""
    lines = over_stand_in(_CODE.replace("/dev/shm", str(tmp_path))).stdout.splitlines()  # type: ignore[attr-defined]
    assert [json.loads(line) for line in lines] == [True, True, False, False, False]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.BFLOAT16], ids=str)
@pytest.mark.parametrize("size", [[8], [2, 8]], ids=str)
def test_where_the_optimizer_is_left_out(size: list[int], dtype: ir.DataType, has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harmful_optimizers, "has_kernel", lambda *_, **__: has_kernel)
    x, y, w = (
        ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape)) for name, shape in (("x", [3, 2, 8]), ("y", [3, 2, 8]), ("w", size))
    )
    node = ir.Node("", "LayerNormalization", [x, w], [ir.AttrInt64("axis", -len(size))], outputs=[y])
    model = ir.Model(ir.Graph([x, w], [y], nodes=[node], opset_imports={"": 18}, name="graph"), ir_version=9)
    is_harmful = len(size) > 1 or dtype == ir.DataType.BFLOAT16 and not has_kernel
    assert ("SkipLayerNormFusion" in harmful_optimizers.harmful_optimizers(model, "CUDAExecutionProvider")) == is_harmful


def test_a_product_with_a_sigmoid_in_bfloat16(over_stand_in: Callable[..., object]) -> None:
    """There is no kernel for what QuickGeluFusion makes of it in 1.19.2; where a fusion is not known to fail, the graph runs without any."""
    code = """
import torch
from torch.nn import functional as F
import ort_backend
from ort_backend.lowering.kernels import kernel_choice
from ort_backend.runtime import harmful_optimizers, session
from tools.cuda_placement.capture import as_on_cuda

kernel_choice.faster_on_device = lambda node: None  # PyTorch's SiLU is
warnings = []
session.log.warning = lambda *arguments: warnings.append(arguments)
known = harmful_optimizers.harmful_optimizers
for optimizers in (known, lambda *_: []):
    session.harmful_optimizers = optimizers
    torch._dynamo.reset()
    x = torch.rand(2, 8, dtype=torch.bfloat16)
    with torch.no_grad(), as_on_cuda():
        torch.compile(lambda x: F.silu(x * 2) + 1, backend="ort_training", options={"provider": "CUDAExecutionProvider"}, dynamic=False)(x)
    assert not ort_backend.report().graphs[-1].outside
    print(len(warnings))
assert "QuickGelu" in str(warnings[0][-1]), warnings
"""
    assert over_stand_in(code).stdout.split() == ["0", "1"]  # type: ignore[attr-defined]


def test_rotary_embeddings(over_stand_in: Callable[..., object], tmp_path: object) -> None:
    """A node each, forward and backward, in every dtype that has a kernel on CUDA; nothing of them is computed elsewhere."""
    code = """
import collections, json
import onnx, torch
from torch import nn
import ort_backend
from tools.cuda_placement.capture import as_on_cuda

options = {"provider": "CUDAExecutionProvider", "session_options": {"optimized_model_filepath": "/dev/shm/rotary.onnx"}}

class Turned(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(16, 64, dtype=dtype)

    def forward(self, x, freqs):
        both = torch.cat((freqs, freqs), -1)[None, None]
        q = self.linear(x).view(*x.shape[:2], 4, 16).transpose(1, 2)
        cos, sin = both.cos().to(q.dtype), both.sin().to(q.dtype)
        return q * cos + torch.cat((-q[..., 8:], q[..., :8]), -1) * sin

for dtype in (torch.float32, torch.float16, torch.bfloat16):
    torch._dynamo.reset()
    with as_on_cuda():
        torch.compile(Turned(dtype), backend="ort_training", options=options, dynamic=False)(torch.rand(2, 8, 16, dtype=dtype), torch.rand(8, 8))
    nodes = collections.Counter(node.op_type for node in onnx.load(options["session_options"]["optimized_model_filepath"]).graph.node)
    outside = [one.operator for graph in ort_backend.report().graphs for one in graph.outside if not one.is_choice]
    print(json.dumps([nodes["RotaryEmbedding"], nodes["Concat"], nodes["MemcpyFromHost"], nodes["MemcpyToHost"], outside]))
"""
    lines = over_stand_in(code.replace("/dev/shm", str(tmp_path))).stdout.splitlines()  # type: ignore[attr-defined]
    assert [json.loads(line) for line in lines] == [[2, 1, 0, 0, []]] * 3  # one Concat: that of the angles
