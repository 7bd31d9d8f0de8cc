"""What ONNX Runtime's `PythonOp` kernels call: a C function pointer, made with ctypes, that runs registered Python callables.

The kernels of onnxruntime-training 1.19.2 expect
`std::vector<PyObject*> run(const char* name, void* callback, const std::vector<int64_t>& requires_grad, const std::vector<int64_t>& tensor_flags,
bool training, const std::vector<int64_t>& inplace, const char* invoke_id, bool safe_mode, const std::vector<PyObject*>& args)`.
libstdc++'s vector is three pointers and is returned through a hidden first argument, which ctypes can express; upstream's own runner is a
C++ extension built against torch. Tensors come and go as DLPack capsules.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_bool, c_char_p, c_void_p, py_object
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C

_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack


class _Vector(Structure):
    """libstdc++'s `std::vector` of 8-byte elements."""

    _fields_ = (("begin", c_void_p), ("end", c_void_p), ("capacity", c_void_p))


_Runner = ctypes.CFUNCTYPE(
    c_void_p, POINTER(_Vector), c_char_p, c_void_p, POINTER(_Vector), POINTER(_Vector), c_bool, POINTER(_Vector), c_char_p, c_bool, POINTER(_Vector)
)
_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = c_void_p, [ctypes.c_size_t]
_incref = ctypes.pythonapi.Py_IncRef
_incref.argtypes = [py_object]


class _Pending(threading.local):
    """The exception raised inside a callable of this thread: it cannot cross C++, so it waits here until the run returns."""

    error: BaseException | None = None


_pending = _Pending()


def take_error() -> BaseException | None:
    """The exception that a callable raised during the run that just ended on this thread, if any; forgets it."""
    error, _pending.error = _pending.error, None
    return error


class Registration:
    """One callable under one name, until `release`.

    ONNX Runtime keeps the class that it is given for ever; what the class calls is dropped on release.
    """

    def __init__(self, name: str, function: Callable[..., Sequence[torch.Tensor]]) -> None:
        self.function: Callable[..., Sequence[torch.Tensor]] | None = function
        _install()

        def apply(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
            assert self.function is not None, f"{name} was called after its session"
            return self.function(*tensors)

        members = {key: staticmethod(apply) for key in ("apply", "forward", "backward")}
        C.register_torch_autograd_function(name, type("PythonOp", (torch.autograd.Function,), members))

    def release(self) -> None:
        """Forgets the callable."""
        self.function = None


def _words(vector: Any, kind: Any) -> list[Any]:
    begin, end = vector.contents.begin or 0, vector.contents.end or 0
    return list((kind * ((end - begin) // 8)).from_address(begin)) if end > begin else []


def _run(
    result: Any,
    name: bytes,
    callback: int,
    requires_grad: Any,
    tensor_flags: Any,
    training: bool,
    inplace: Any,
    invoke_id: bytes,
    safe_mode: bool,
    args: Any,
) -> int:
    """The forward runner. Its first result is the autograd context, which these callables do not have."""
    values: list[Any] = []
    try:
        tensors = [_from_dlpack(ctypes.cast(word, py_object).value) for word in _words(args, c_void_p)]
        function = ctypes.cast(callback, py_object).value
        values = [None, *map(_to_dlpack, function(*tensors))]
    except BaseException as error:  # noqa: BLE001 - anything may be raised, KeyboardInterrupt too, and nothing may cross the C++ frames
        _pending.error = error
    return _give(result, values)


def _give(result: Any, values: list[Any]) -> int:
    """Fills the returned vector: memory from malloc, one reference for each object."""
    memory = _libc.malloc(max(8 * len(values), 8))
    slots = (c_void_p * max(len(values), 1)).from_address(memory)
    for i, value in enumerate(values):
        _incref(value)
        slots[i] = id(value)
    result.contents.begin, result.contents.end = memory, memory + 8 * len(values)
    result.contents.capacity = result.contents.end
    return ctypes.addressof(result.contents)


_installed: list[Any] = []


def _install() -> None:
    """Hands the runner to ONNX Runtime, once per process."""
    if not _installed:
        runner = _Runner(_run)
        _installed.append(runner)
        C.register_forward_runner(ctypes.cast(runner, c_void_p).value)
        C.register_backward_runner(ctypes.cast(runner, c_void_p).value)
