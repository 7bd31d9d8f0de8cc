"""What a lowering returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from ort_backend.errors import LoweringError, OrtBackendError
from ort_backend.lowering.provenance import at
from ort_backend.lowering.python_op import PythonCall
from ort_backend.target import ATEN


class NotOnOrt(LoweringError):
    """An operator does not run on ONNX Runtime's own kernels, and PyTorch's may not run inside the session; `reason` says why it does not."""

    def __init__(self, operator: str, reason: str, where: str) -> None:
        super().__init__(f"{operator} does not run on ONNX Runtime: {reason}{at(where)}")
        self.reason = reason


class FaultyLowering(OrtBackendError):
    """A lowering raised, or returned what its operator does not. Never a reason to run the operator elsewhere: its author is to know."""

    def __init__(self, function: Callable[..., Any], operator: str, said: str, where: str) -> None:
        code = getattr(inspect.unwrap(function), "__code__", None)
        written = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        super().__init__(f"the lowering {getattr(function, '__qualname__', function)}{written} of {operator} {said}{at(where)}")


@dataclasses.dataclass(frozen=True)
class Outside:
    """One FX node that does not run on ONNX Runtime's own kernels.

    Attributes:
        operator: Its qualified name, such as `aten::sort`.
        reason: Why.
        where: The user's line, if known.
        is_choice: Whether ONNX Runtime has a kernel for it, and PyTorch's is faster.
    """

    operator: str
    reason: str
    where: str
    is_choice: bool = False


@dataclasses.dataclass(frozen=True)
class LoweredGraph:
    """An ONNX model and what the runtime needs to run it.

    Attributes:
        model: The model; inputs and outputs stand in its graph.
        python_calls: The callables behind its `ATen` and `PythonOp` nodes.
        outside: Why each of them is there.
        fx_nodes: Number of FX nodes that compute something.
        onnx_nodes: Number of ONNX nodes; one that calls PyTorch several times counts as often.
        functions: The users' Functions that it calls, one name for each call.
        kept_bytes: Bytes of the values computed before the `YieldOp` and used behind it, for the example sizes; 0 without one.
    """

    model: ir.Model
    python_calls: tuple[PythonCall, ...]
    outside: tuple[Outside, ...]
    fx_nodes: int
    onnx_nodes: int
    kept_bytes: int
    functions: tuple[str, ...] = ()

    @property
    def content(self) -> Content:
        """What is in it, for a report."""
        python_ops = any(call.op_type != ATEN for call in self.python_calls)
        return Content(self.outside, self.fx_nodes, self.onnx_nodes, self.kept_bytes, self.functions, 1, python_ops)


@dataclasses.dataclass(frozen=True)
class Content:
    """What a compiled graph consists of: see `LoweredGraph`.

    Attributes:
        outside: What does not run on ONNX Runtime's own kernels, and why.
        fx_nodes: Number of FX nodes that compute something.
        onnx_nodes: Number of ONNX nodes.
        kept_bytes: Bytes that a forward keeps for its backward.
        functions: The users' Functions that it calls.
        sessions: Number of sessions.
        python_ops: Whether there are `PythonOp` nodes.
    """

    outside: tuple[Outside, ...]
    fx_nodes: int
    onnx_nodes: int
    kept_bytes: int
    functions: tuple[str, ...]
    sessions: int
    python_ops: bool

    def and_of(self, other: Content) -> Content:
        """Of two parts of a graph together."""
        sums = {field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)}
        return Content(**{**sums, "python_ops": self.python_ops or other.python_ops})
