"""Calls of PyTorch in half precision on the CPU that follow one another become one node, as on a CUDA device (`merged_calls`).

There most products, activations and casts are such calls, and each takes ONNX Runtime and Python some 50 us beside its kernel: products leave
nothing of their code in the processor's caches. Steps of the suite's models under autocast in bfloat16 took, of eager PyTorch's time, dlrm 1.15,
and take 1.09, gpt-tiny 0.85 (0.80), vit 1.01 (0.97), unet 1.04 (1.01), llama 0.84 (0.83), mlp 1.06 (1.06), with as much memory (medians of three
runs; AMD EPYC of family 25, model 17).
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import torch

from ort_backend.lowering.calls_on_device.merged_calls import merge_calls
from ort_backend.lowering.kernels.write_back import IMPLEMENTATIONS as WRITES_HERE
from ort_backend.lowering.python_op import PythonCall
from ort_backend.target import ATEN, OrtTarget

_HALVES = (torch.bfloat16, torch.float16)
# Calls in one node: what they read and nothing else does is held until the last one is done.
_LARGEST = 4


def merge_half_calls(graph: ir.Graph, calls: Sequence[PythonCall], target: OrtTarget) -> tuple[list[PythonCall], int]:
    """Rewrites the graph in place.

    Returns:
        The callables of the nodes that there are now, and how many nodes less make the same calls.
    """
    half = [call for call in calls if _is_in_half_precision(call)]
    if target.device_type != "cpu" or target.call_type != ATEN or len(half) < 2:
        return list(calls), 0
    merged = merge_calls(graph, half, {}, _LARGEST)
    chosen = set(map(id, half))
    return [*(call for call in calls if id(call) not in chosen), *merged], len(half) - len(merged)


def _is_in_half_precision(call: PythonCall) -> bool:
    """Whether a call takes or gives tensors in half precision, and it is known what it does: it writes to no argument."""
    recipe = call.recipe
    if recipe is None or recipe.target in WRITES_HERE.values():
        return False
    return any(slot.dtype in _HALVES for slot in recipe.slots) or any(dtype in _HALVES for _, dtype, _ in recipe.results)
