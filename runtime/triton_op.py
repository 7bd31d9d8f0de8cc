"""What ONNX Runtime's `TritonOp` kernel calls on a CUDA device: Python callables by name, of PyTorch's kernels here.

onnxruntime-training has the operator for kernels written in Triton, and calls `execute(name, *capsules)` for it, which returns a tuple of capsules
(read in 1.19.2: `training_ops/cpu/triton`). Behind a `PythonOp` the host would wait until the device is done with all that was started before: the
node's first result, the autograd context, lies on the host, and ONNX Runtime waits for whatever it hands over there (`allocation_planner.cc`). That
was 161 waits in a step of GPT-2, whose kernels took 22 of its 42 ms (H200).

Once an executor is there, ONNX Runtime also looks for subgraphs to compile with Triton: of the operators that the executor lists, which are none.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.runtime.callbacks import keep_error
from ort_backend.runtime.python_op import Call, current_fence
from ort_backend.runtime.result_memory import memory

_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack

_incref = ctypes.pythonapi.Py_IncRef
_incref.argtypes = [ctypes.py_object]

_callables: dict[str, Callable[..., Sequence[torch.Tensor]]] = {}
_installed: list[bool] = []


class TritonRegistration:
    """One callable under one name, until `release`."""

    def __init__(self, call: Call) -> None:
        assert call.function is not None
        self._name = call.name
        _callables[call.name] = functools.partial(call.function, memory.empty) if call.allocates else call.function
        _install()

    def release(self) -> None:
        """Forgets the callable."""
        _callables.pop(self._name, None)


def _execute(name: str, *capsules: Any) -> tuple[Any, ...] | None:
    """None where the callable raised: ONNX Runtime ends the run for want of results, and printed an exception that came to it."""
    try:
        fence = current_fence()
        if fence is None:
            return tuple(map(_to_dlpack, _callables[name](*map(_from_dlpack, capsules))))
        fence.to_torch()
        made = tuple(map(_to_dlpack, _callables[name](*map(_from_dlpack, capsules))))
        fence.to_onnxruntime()
        return made
    except BaseException as error:  # noqa: BLE001 - anything may be raised, KeyboardInterrupt too, and nothing may cross the C++ frames
        keep_error(error)
        return None


def _config() -> str:
    return '{"ops": {}, "initializer": "none", "min_nodes": 2}'


def _no_subgraph(key: int, model: bytes, *capsules: Any) -> None:
    raise NotImplementedError("no operator is listed for it")


def _install() -> None:
    """Hands the functions to ONNX Runtime, which takes them once per process, and gives them up when Python is gone: they must not be freed then."""
    if not _installed:
        functions = _config, _execute, _no_subgraph
        for function in functions:
            _incref(function)
        C.register_triton_op_executor(*functions)
        _installed.append(True)
