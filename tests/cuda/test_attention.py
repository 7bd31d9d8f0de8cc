"""PyTorch's fused attention in the graphs of a GPU: nothing is permuted for it, nothing is written down for its bias, nobody is warned of it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

_CODE = """
import collections, json, logging
import torch, ort_backend
from torch import nn
from torch.nn import functional as F
from benchmarks.models import gpt
from ort_backend.lowering.graph import GraphLowering
from ort_backend.lowering.passes import grouped_queries
from tools.cuda_placement import capture
from tools.cuda_placement.capture import as_on_cuda

aten = torch.ops.aten
lowered, warnings, finish = [], [], GraphLowering.finish
GraphLowering.finish = lambda self: lowered.append(finish(self)) or lowered[-1]

class Kept(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())

logging.getLogger("ort_backend").addHandler(Kept(logging.WARNING))

def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    if attn_mask is not None:  # as torch's `preprocess_mask`
        sizes = (*query.shape[:3], key.shape[2])
        attn_mask = F.pad(attn_mask, (0, 7))[..., : sizes[-1]].expand(sizes)
    given = {{"flash": (dropout_p, is_causal)}}.get({kind!r}, (attn_mask, True, dropout_p, is_causal))
    return getattr(aten, "_scaled_dot_product_{kind}_attention")(query, key, value, *given, scale=scale)[0]

class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x, mask):
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(-2).square().mean()

class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, size) for size in (32, 16, 16))

    def forward(self, x):
        query, key, value = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        key, value = (one[:, :, None].expand(-1, -1, 2, -1, -1).reshape(query.shape) for one in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2).square().mean()

if {grouped}:  # the graph is Dynamo's of the CPU until it is moved
    moved = capture._moved
    capture._moved = lambda gm, *rest: grouped_queries.group_queries(gm, lambda query: True) and moved(gm, *rest)
model, batch = {model}
with as_on_cuda(attention):
    torch.compile(model, backend="ort_training", options={{"provider": "CUDAExecutionProvider", **{options}}})(**batch)
print(json.dumps({{
    "permuted": [perm for one in lowered for node in one.model.graph if node.op_type == "Transpose"
                 if len(perm := list(node.attributes["perm"].as_ints())) == 4],
    "given": [[value.producer() and value.producer().op_type for value in node.inputs if value is not None]
              for one in lowered for node in one.model.graph if node.op_type == "TritonOp"],
    "nodes": collections.Counter(node.op_type for one in lowered for node in one.model.graph),
    "outside": [(one.operator, one.is_choice, one.reason) for graph in ort_backend.report().graphs for one in graph.outside],
    "warnings": warnings,
}}))
"""
_GROUPED = '(Grouped(), {"x": torch.randn(2, 25, 32)})'
_GPT = "(lambda made: (made[0], made[1]()))(gpt(2, 64, 2, 16))"
_MASKED = '(Masked(), {"x": torch.randn(2, 25, 32), "mask": torch.randn(2, 1, 25, 25)})'


def _captured(run: Run, kind: str, model: str, grouped: bool = False, **options: Any) -> dict[str, Any]:
    return json.loads(run(_CODE.format(kind=kind, model=model, options=options, grouped=grouped)).stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_nothing_is_permuted(over_stand_in: Run, kind: str) -> None:
    found = _captured(over_stand_in, kind, _GPT)
    assert found["nodes"]["TritonOp"] == 4 + 1 and found["permuted"] == []  # and the loss


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": True}])
def test_it_is_a_choice(over_stand_in: Run, options: dict[str, Any]) -> None:
    found = _captured(over_stand_in, "flash", _GPT, **options)
    reason = "PyTorch's fused attention, as in eager PyTorch"
    operators = {f"aten::_scaled_dot_product_flash_attention{end}" for end in ("", "_backward")}
    assert {tuple(one) for one in found["outside"] if one[0] in operators} == {(name, True, reason) for name in operators}
    assert not [warning for warning in found["warnings"] if "attention" in warning and not warning.startswith("cuda_graphs: ")]


def test_a_mask_is_not_written_down_for_all_heads(over_stand_in: Run) -> None:
    found = _captured(over_stand_in, "efficient", _MASKED)
    assert found["nodes"]["TritonOp"] == 2 and found["permuted"] == []
    assert all("Pad" in given and "Expand" not in given for given in found["given"]) and found["nodes"]["Pad"] == 1


@pytest.mark.parametrize("grouped", [True, False])
def test_keys_and_values_of_several_heads_are_not_repeated(over_stand_in: Run, grouped: bool) -> None:
    nodes = _captured(over_stand_in, "flash", _GROUPED, grouped)["nodes"]
    expanded, permuted = (1, 0) if grouped else (3, 4)  # the gradient of the mean is expanded, too
    assert (nodes["TritonOp"], nodes["Expand"], nodes.get("Transpose", 0)) == (2, expanded, permuted)
