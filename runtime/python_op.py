"""What ONNX Runtime's `PythonOp` kernels call: a C function pointer, made with ctypes, that runs registered Python callables.

The kernels of onnxruntime-training 1.19.2 expect
`std::vector<PyObject*> run(const char* name, void* callback, const std::vector<int64_t>& requires_grad, const std::vector<int64_t>& tensor_flags,
bool training, const std::vector<int64_t>& inplace, const char* invoke_id, bool safe_mode, const std::vector<PyObject*>& args)`.
libstdc++'s vector is three pointers and is returned through a hidden first argument, which ctypes can express; upstream's own runner is a
C++ extension built against torch. Tensors come and go as DLPack capsules.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_bool, c_void_p, py_object
from typing import Any, Protocol

import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import OrtBackendError
from ort_backend.runtime.callbacks import callback, keep_error
from ort_backend.runtime.cuda import Fence
from ort_backend.runtime.result_memory import memory
from ort_backend.target import RELEASE

_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack


# libstdc++'s `std::vector` of 8-byte elements: begin, end, end of the memory.
_Words = c_void_p * 3
_Runner = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_bool, c_void_p, c_void_p, c_bool, c_void_p)
_malloc = ctypes.CDLL(None).malloc
_malloc.restype, _malloc.argtypes = c_void_p, [ctypes.c_size_t]
_incref = ctypes.pythonapi.Py_IncRef
_incref.argtypes = [py_object]


class _State(threading.local):
    """Of this thread."""

    # What the run that is under way keeps for its backward.
    run: RunState | None = None
    # How many callables are under way, one inside the other.
    depth: int = 0
    # Between PyTorch's stream and ONNX Runtime's, where they differ.
    fence: Fence | None = None


_state = _State()


def inside() -> bool:
    """Whether this thread is inside a callable: ONNX Runtime holds a mutex then, so that a graph with Python nodes must not run."""
    return _state.depth > 0


class RunState:
    """What the users' Functions of one forward get beside its tensors, and keep until their backward, if one `follows`."""

    __slots__ = ("follows", "given", "pending", "undefined")

    def __init__(self, given: Sequence[Any] = (), *, follows: bool = True) -> None:
        self.follows = follows
        self.given = given  # the graph's arguments, while the forward runs
        self.undefined: frozenset[int] = frozenset()  # tangents that autograd has no gradient for
        self.pending: dict[int, Any] = {}


# ONNX Runtime holds one mutex during each callable, and waits for it without giving up Python's lock: a thread that waited there would stop the
# one that it waits for. So one thread at a time runs graphs with Python nodes.
_one_thread = threading.RLock()


def call_without_autograd(run: Callable[..., object], args: Sequence[Any]) -> None:
    """Calls `run`, whose nodes call PyTorch's kernels, with no gradient recorded.

    What a signal raises while ONNX Runtime computes is raised as `run` returns. The end of a context manager that is written in Python would be
    entered only then, and could be what the signal stops: so what belongs to a run is put back by C functions.
    """
    records = torch.is_grad_enabled()
    try:
        torch._C._set_grad_enabled(False)
        run(*args)
    finally:
        torch._C._set_grad_enabled(records)


def call_alone(run: Callable[..., object], args: Sequence[Any], state: RunState | None) -> None:
    """Calls `run`, of a graph that has `PythonOp` nodes, on one thread at a time, as `call_without_autograd` does.

    Raises:
        OrtBackendError: this thread is inside such a node.
    """
    _refuse_inside()
    with _one_thread:
        before, records = _state.run, torch.is_grad_enabled()
        try:
            _state.run = state
            torch._C._set_grad_enabled(False)
            run(*args)
        finally:
            torch._C._set_grad_enabled(records)
            _state.run = before


def _refuse_inside() -> None:
    if _state.depth:
        raise OrtBackendError("a graph with Python nodes cannot run inside a Python node: ONNX Runtime would wait for itself")


@contextlib.contextmanager
def running(state: RunState | None, fence: Fence | None = None) -> Iterator[None]:
    """Around a run on a device as `call_alone` is on the CPU; `fence` orders what `PythonOp` nodes do on PyTorch's stream among what ONNX Runtime
    does on its own.

    Raises:
        OrtBackendError: this thread is inside such a node.
    """
    _refuse_inside()
    with _one_thread:
        before, _state.run, _state.fence = _state.run, state, fence
        try:
            with torch.no_grad():
                yield
        finally:
            _state.run, _state.fence = before, None


@contextlib.contextmanager
def ordering(fence: Fence | None) -> Iterator[None]:
    """Around a run on a device whose nodes call PyTorch's kernels, and no user's Python: no thread has to wait for another one's.

    Operators are dispatched past autograd, which `no_grad` alone does not: a `permute` takes half of the time.
    """
    before, _state.fence = _state.fence, fence
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        _state.fence = before


def current_fence() -> Fence | None:
    """What orders PyTorch's stream and ONNX Runtime's in the run that is under way on this thread; None where they are one."""
    return _state.fence


class Call(Protocol):
    """What a graph's lowering hands over for a Python node, or for the pair of nodes of a user's Function."""

    name: str
    function: Callable[..., Sequence[torch.Tensor]] | None
    allocates: bool
    op_type: str


class Registration:
    """One callable under one name, until `release`.

    ONNX Runtime keeps the class that it is given for ever; what the class calls is dropped on release.
    """

    def __init__(self, call: Any) -> None:
        self._forward = _Entry(call.name, _plain(call.function, call.allocates) if call.function is not None else _forward_of(call))
        self._backward = _Entry(call.name, _backward_of(call)) if call.function is None else self._forward
        _install()
        _register(call.name, self._forward, self._backward)

    def release(self) -> None:
        """Forgets the callable."""
        self._forward.run = self._backward.run = self._forward.released


# By address, as the runners get them.
_entries: dict[int, _Entry] = {}


class _Entry:
    """What ONNX Runtime calls: takes the node's arguments (tensors as capsules), returns tensors."""

    def __init__(self, name: str, run: Callable[[list[Any]], Sequence[torch.Tensor]]) -> None:
        self.name = name
        self.run = run
        _entries[id(self)] = self

    def __call__(self, *objects: Any) -> Sequence[torch.Tensor]:
        return self.run(list(objects))

    def released(self, objects: list[Any]) -> Sequence[torch.Tensor]:
        raise OrtBackendError(f"{self.name} was called after its session")


def _plain(function: Callable[..., Sequence[torch.Tensor]], allocates: bool) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    if allocates:
        return lambda objects: function(memory.empty, *map(_from_dlpack, objects))
    return lambda objects: function(*map(_from_dlpack, objects))


def _forward_of(call: Any) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    function, reads = call.forward, tuple(call.reads)
    return lambda objects: function(_state.run, [_from_dlpack(objects[i]) for i in reads])


def _backward_of(call: Any) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
    function, reads = call.backward, range(1, 1 + sum(call.present))  # behind the context
    return lambda objects: function(_state.run, [_from_dlpack(objects[i]) for i in reads])


def _run_forward(
    result: int, name: int, entry: int, requires_grad: int, flags: int, training: bool, inplace: int, id_: int, safe: bool, args: int
) -> int:
    """The forward runner. Its first result is the autograd context: none, since what belongs to a run is kept with the run.

    ONNX Runtime drops a reference to the context twice: behind the node, and when the context is given up (1.19.2).
    """
    _incref(None)
    return _run(result, entry, args, [None])


def _run_backward(
    result: int, name: int, entry: int, requires_grad: int, flags: int, training: bool, inplace: int, id_: int, safe: bool, args: int
) -> int:
    """The backward runner."""
    return _run(result, entry, args, [])


def _refuse(result: int, *_: Any) -> None:
    """No result at all: ONNX Runtime ends the run."""
    _give(result, [])


def _run(result: int, entry: int, args: int, values: list[Any]) -> int:
    state = _state
    state.depth += 1
    try:
        words: Any = _Words.from_address(args)
        begin, end, _ = words
        objects = list((py_object * ((end - begin) // 8)).from_address(begin)) if end else []
        if state.fence is not None:
            state.fence.to_torch()
        for tensor in _entries[entry].run(objects):
            values.append(_to_dlpack(tensor))
        if state.fence is not None:
            state.fence.to_onnxruntime()
        return _give(result, values)
    except BaseException as error:  # noqa: BLE001 - anything may be raised, KeyboardInterrupt too, and nothing may cross the C++ frames
        keep_error(error)
        return _give(result, [])
    finally:
        state.depth -= 1


def _give(result: int, values: list[Any]) -> int:
    """Fills the returned vector: memory from malloc, one reference for each object."""
    size = 8 * len(values)
    memory = _malloc(size or 8)
    if size:
        (c_void_p * len(values)).from_address(memory)[:] = [id(value) for value in values]
        for value in values:
            _incref(value)
    _Words.from_address(result)[:] = [memory, memory + size, memory + size]
    return result


def _register(name: str, forward: _Entry, backward: _Entry) -> None:
    members = {"apply": forward, "forward": forward, "backward": backward}
    C.register_torch_autograd_function(name, type("PythonOp", (torch.autograd.Function,), members))


_NOTHING = torch.zeros((), dtype=torch.int64, device="cpu")
_installed: list[Any] = []


def _install() -> None:
    """Hands the runners to ONNX Runtime, once per process."""
    if not _installed:
        _installed.extend(callback(_Runner, function, _refuse) for function in (_run_forward, _run_backward))
        C.register_forward_runner(ctypes.cast(_installed[0], c_void_p).value)
        C.register_backward_runner(ctypes.cast(_installed[1], c_void_p).value)
        # ONNX Runtime itself gives up the context behind a node for a backward; there is nothing else to do.
        release = _Entry(RELEASE, lambda objects: (_NOTHING,))
        _installed.append(release)
        _register(RELEASE, release, release)
        # ONNX Runtime would give up the Python objects that it holds after Python is gone, and crash.
        atexit.register(C.unregister_python_functions)
