"""What ONNX Runtime's `ATen` kernel calls: a C function pointer, made with ctypes, that runs registered Python callables.

The kernel (`org.pytorch.aten::ATen`, which onnxruntime-training has for PyTorch's own operators) expects
`void run(const char* operator, const char* overload, size_t inputs, DLManagedTensor** tensors, size_t outputs, DLManagedTensor** results)`
(read in 1.19.2: `contrib_ops/cpu/aten_ops`). It takes no lock and keeps nothing behind a run, and costs half of what a `PythonOp` does: of a
small operator's step 6 microseconds, where Python is in no cache 40.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_bool, c_char_p, c_size_t, c_void_p, py_object
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.runtime.callbacks import callback, keep_error
from ort_backend.runtime.python_op import Call, current_fence
from ort_backend.runtime.result_memory import memory

_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [py_object, c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.argtypes = [py_object, c_char_p]

# DLPack's names of a capsule, and of one whose tensor has been taken. A capsule keeps the pointer.
_TENSOR, _TAKEN = c_char_p(b"dltensor"), c_char_p(b"used_dltensor")

_Execute = ctypes.CFUNCTYPE(None, c_char_p, c_char_p, c_size_t, c_void_p, c_size_t, c_void_p)
_IsOnCpu = ctypes.CFUNCTYPE(c_bool, c_char_p, c_char_p, c_size_t, c_bool)
_Pointers = c_void_p * (1 << 20)  # a view of as many as there are

_callables: dict[bytes, Callable[..., Sequence[torch.Tensor]]] = {}  # and `sum`, see below
_installed: list[Any] = []


class AtenRegistration:
    """One callable under one name, until `release`."""

    def __init__(self, call: Call) -> None:
        assert call.function is not None
        self._name = call.name.encode()
        _callables[self._name] = functools.partial(call.function, memory.empty) if call.allocates else call.function
        _install()

    def release(self) -> None:
        """Forgets the callable."""
        _callables.pop(self._name, None)


def _sum(x: torch.Tensor, dims: torch.Tensor, keeps: torch.Tensor) -> Sequence[torch.Tensor]:
    """What the CUDA provider's ReduceSum asks for, once there is somebody to ask (`aten::sum.dim_IntList`; read in 1.19.2)."""
    fence = current_fence()
    if fence is not None:
        fence.to_torch()
    result = torch.sum(x, dims.tolist(), bool(keeps.item()))
    if fence is not None:
        fence.to_onnxruntime()
    return [result.contiguous()]


def _execute(name: bytes, overload: bytes, inputs: int, tensors: int, outputs: int, results: int) -> None:
    try:
        arrived = _Pointers.from_address(tensors)[:inputs] if inputs else ()
        made = _callables[name](*[_from_dlpack(_new_capsule(one, _TENSOR, None)) for one in arrived if one is not None])
        _give([made[i] for i in range(outputs)], results)
    except BaseException as error:  # noqa: BLE001 - anything may be raised, KeyboardInterrupt too, and nothing may cross the C++ frames
        keep_error(error)
        _refuse(name, overload, inputs, tensors, outputs, results)


def _refuse(name: bytes, overload: bytes, inputs: int, tensors: int, outputs: int, results: int) -> None:
    """Lets ONNX Runtime end the run: the kernel cannot be told of an error, but takes contiguous tensors only."""
    _give([torch.empty(2, 2, device="cpu").t()] * outputs, results)


def _give(tensors: Sequence[torch.Tensor], results: int) -> None:
    given = _Pointers.from_address(results)
    for i, capsule in enumerate([_to_dlpack(tensor) for tensor in tensors]):
        given[i] = _pointer(capsule, _TENSOR)
        _rename(capsule, _TAKEN)


def _is_on_cpu(name: bytes, overload: bytes, index: int, is_input: bool) -> bool:
    """Whether an argument is on the host where the others are on a device: not asked on the CPU."""
    return False


def _install() -> None:
    """Hands the functions to ONNX Runtime, once per process."""
    if not _installed:
        _callables[b"sum"] = _sum
        _installed.extend((_IsOnCpu(_is_on_cpu), callback(_Execute, _execute, _refuse)))
        C.register_aten_op_executor(*(str(ctypes.cast(one, c_void_p).value) for one in _installed))
