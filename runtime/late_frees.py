"""Kernels of the CUDA provider that give memory of the host back at the end of a run, and only of one for which the host waits.

They copy sizes or addresses to the device from pinned memory, which ONNX Runtime frees when the device has read it: by a function that a run puts
behind its kernels, unless it was told not to wait (`disable_synchronize_execution_providers`). Then all of it is kept until the session ends, and
each run adds to it; and the function, put behind the kernels by that end, may be the last to hold the allocator. CUDA lets no such function free
pinned memory, and the process ends (1.19.2, seen on an H100; `CudaStream::CleanUpOnRunEnd`, `ReleaseCpuBufferCallback`). A training session frees it
with the state of each step.
"""

from __future__ import annotations

import onnx_ir as ir

_ALWAYS = {"Resize", "Upsample", "LSTM", "GRU", "RNN"}
_PARTS = {"Concat", "ConcatTraining", "Split", "SplitTraining"}
_PRODUCTS = {"MatMul", "FusedMatMul"}
# So many addresses, of parts of one size, travel as arguments of the kernel.
_MOST = 32


def frees_late(model: ir.Model) -> bool:
    """Whether a model has such nodes (read in 1.19.2: those with a `CudaAsyncBuffer`)."""
    return any(_defers(node) for node in ir.traversal.RecursiveGraphIterator(model.graph))


def _defers(node: ir.Node) -> bool:
    if node.op_type in _PARTS:
        return _has_unequal_parts(node)
    if node.op_type in _PRODUCTS:
        return _broadcasts(*node.inputs[:2])
    return node.op_type in _ALWAYS


def _has_unequal_parts(node: ir.Node) -> bool:
    parts = node.inputs if node.op_type.startswith("Concat") else node.outputs
    axis = node.attributes.get_int("axis", 0)
    shapes = [None if part is None else part.shape for part in parts]
    return len(parts) > _MOST or any(shape is None or shape.rank() == 0 for shape in shapes) or len({_name(shape[axis]) for shape in shapes}) > 1  # type: ignore[index]


def _broadcasts(left: ir.Value | None, right: ir.Value | None) -> bool:
    """Whether a product is one of many matrices that do not lie one behind the other on both sides."""
    if left is None or right is None or left.shape is None or right.shape is None:
        return True
    if right.shape.rank() <= 2:
        return False
    batches = [tuple(map(_name, shape[: shape.rank() - 2])) for shape in (left.shape, right.shape)]
    return batches[0] != batches[1]


def _name(size: int | ir.SymbolicDim) -> object:
    """What tells sizes apart; an unknown one is like no other."""
    return size if isinstance(size, int) else size.value or object()
