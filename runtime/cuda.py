"""ONNX Runtime's CUDA provider beside PyTorch: one stream, one pool of memory, the same numerics.

Stream. A session's stream is fixed when the session is made. With an external allocator it is CUDA's default stream, which is PyTorch's default, too
(read in ONNX Runtime 1.19: `CUDAExecutionProvider`'s constructor). Where PyTorch's current stream is another, `Fence` puts one event before the run
and one behind it: the device keeps the order, the host waits for nothing.

Memory. ONNX Runtime takes all of its memory from PyTorch's caching allocator, on PyTorch's current stream: one pool, whose peak
`torch.cuda.max_memory_allocated` knows. An arena of its own would keep its peak for ever, beside PyTorch's.

Numerics follow PyTorch's flags when the session is made; Dynamo's guards compile again when they change.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

PROVIDER = "CUDAExecutionProvider"
# A user who sets one of these has taken over memory or stream.
_OWN_MEMORY = {"gpu_mem_limit", "arena_extend_strategy", "gpu_external_alloc", "gpu_external_free", "has_user_compute_stream", "user_compute_stream"}
_LEGACY_STREAM = "1"  # `cudaStreamLegacy`: the default stream, as a handle that is not null, which ONNX Runtime takes for none


def device(index: int) -> contextlib.AbstractContextManager[object]:
    """To be around all that makes or ends a session: the provider makes its device the current one, and leaves it so."""
    return torch.cuda.device(index) if torch.cuda.is_available() else contextlib.nullcontext()


def finish(index: int) -> None:
    """Waits for a device before a session ends: what it has put behind its kernels may use the session's memory (`late_frees`)."""
    with contextlib.suppress(RuntimeError):  # the device has failed, and whoever uses it next hears of that
        if not torch.cuda.is_current_stream_capturing():  # then nobody may wait
            torch.cuda.synchronize(index)


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What PyTorch's flags say about CUDA kernels.

    Attributes:
        tf32: Whether products, and convolutions, of float32 may be computed in TensorFloat-32.
        algorithms: How a convolution's algorithm is found, as ONNX Runtime names it.
    """

    tf32: bool
    algorithms: str

    @classmethod
    def now(cls, *, products: bool, convolutions: bool) -> Numerics:
        """The flags at this moment, for a graph with such nodes of float32.

        ONNX Runtime has one switch where PyTorch has two, so that both must allow: with PyTorch's own settings (convolutions in TensorFloat-32,
        products not) a ResNet in float32 gets none, for its last layer.
        """
        backends = torch.backends
        convolution = backends.cudnn.conv  # type: ignore[attr-defined]
        forbidden = (products and backends.cuda.matmul.fp32_precision != "tf32") or (convolutions and convolution.fp32_precision != "tf32")
        if backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            return cls(not forbidden, "DEFAULT")  # the only choice that does not depend on a measurement or on free memory
        return cls(not forbidden, "EXHAUSTIVE" if backends.cudnn.benchmark else "HEURISTIC")


@dataclasses.dataclass(frozen=True)
class Allocator:
    """Addresses of C functions: `void* alloc(size_t)`, `void free(void*)`, `void empty_cache()`."""

    alloc: int
    free: int
    empty_cache: int


def provider_options(device: int, numerics: Numerics, allocator: Allocator | None, given: Mapping[str, object]) -> dict[str, str]:
    """The CUDA provider's options.

    Args:
        device: Index of the device.
        numerics: What PyTorch's flags say.
        allocator: Where memory comes from; None for an arena of ONNX Runtime's own.
        given: The user's, which come first. Where they concern memory or stream, all of that is theirs; without a stream it is the default one.
    """
    options = _numeric_options(device, numerics)
    if allocator is not None and _OWN_MEMORY.isdisjoint(given):
        options["gpu_external_alloc"] = str(allocator.alloc)
        options["gpu_external_free"] = str(allocator.free)
        options["gpu_external_empty_cache"] = str(allocator.empty_cache)
    elif not {"user_compute_stream", "gpu_external_alloc"} & set(given):
        options["user_compute_stream"] = _LEGACY_STREAM
    return {**options, **{name: str(value) for name, value in given.items()}}


def _numeric_options(device: int, numerics: Numerics) -> dict[str, str]:
    return {"device_id": str(device), "use_tf32": str(int(numerics.tf32)), "cudnn_conv_algo_search": numerics.algorithms}


def has_stream(given: Mapping[str, object]) -> bool:
    """Whether the user's options of the provider say on which stream it works."""
    return not {"user_compute_stream", "has_user_compute_stream"}.isdisjoint(given)


def capture_options(device: int, numerics: Numerics, stream: int | None, given: Mapping[str, object]) -> dict[str, str]:
    """The CUDA provider's options where runs are captured as CUDA graphs, which the default stream cannot be.

    Memory is an arena's of ONNX Runtime's: a graph that is replayed writes temporaries where they lay when it was captured, and PyTorch's allocator
    would have given that memory to others. So the user's `gpu_external_*` do not count.

    Args:
        device: Index of the device.
        numerics: What PyTorch's flags say.
        stream: The handle of a stream that is not the default one; None lets ONNX Runtime make one.
        given: The user's options.
    """
    options = {**_numeric_options(device, numerics), "arena_extend_strategy": "kSameAsRequested"}
    options.update({name: str(value) for name, value in given.items() if not name.startswith("gpu_external_")})
    if stream is not None:
        options["user_compute_stream"] = str(stream)
    return {**options, "enable_cuda_graph": "1"}


class _Failure(threading.local):
    """The exception of the allocation that failed last on this thread."""

    error: BaseException | None = None


_failure = _Failure()
# An address comes as a number: a null pointer, which ONNX Runtime frees for each tensor without elements, would be None as a `c_void_p`.
_ALLOC, _FREE, _EMPTY = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t), ctypes.CFUNCTYPE(None, ctypes.c_size_t), ctypes.CFUNCTYPE(None)
_made: dict[int, tuple[Allocator, object]] = {}


def torch_allocator(device: int) -> Allocator:
    """PyTorch's caching allocator for ONNX Runtime, on the stream that is current where it allocates; lives as long as the process."""
    if device not in _made:
        # The functions behind torch.cuda.caching_allocator_alloc and _delete, which change the device around each call (read in torch 2.13).
        allocate, delete = torch._C._cuda_cudaCachingAllocator_raw_alloc, torch._C._cuda_cudaCachingAllocator_raw_delete
        stream = torch._C._cuda_getCurrentRawStream
        made, kept = callbacks(lambda size: allocate(size, stream(device)), delete, torch.cuda.empty_cache)
        # The same in C, for half of the calls: the way through Python costs the host some microseconds, and the interpreter's lock.
        free = exported("libtorch_cuda.so", "aoti_torch_cuda_caching_allocator_raw_delete")
        _made[device] = made if free is None else dataclasses.replace(made, free=free), kept
    return _made[device][0]


def exported(library: str, function: str) -> int | None:
    """The address of a function of one of PyTorch's libraries; None where there is no such library or function."""
    try:
        loaded = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library))
        return ctypes.cast(getattr(loaded, function), ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def callbacks(allocate: Callable[[int], int], delete: Callable[[int], None], empty_cache: Callable[[], None]) -> tuple[Allocator, object]:
    """C functions that call Python ones, and what keeps them alive. An exception of `allocate` becomes a null pointer, which ONNX Runtime
    makes an error of the run; `take_failure` gives it back.
    """

    def alloc(size: int) -> int | None:
        try:
            return allocate(size)
        except BaseException as error:  # noqa: BLE001 - nothing may cross the C++ frames
            _failure.error = error
            return None

    functions = (_ALLOC(alloc), _FREE(delete), _EMPTY(empty_cache))
    addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
    return Allocator(*addresses), functions


def take_failure() -> BaseException | None:
    """The exception with which PyTorch refused memory during the run that just ended on this thread, if it did; forgets it."""
    error, _failure.error = _failure.error, None
    return error


class Fence:
    """Order between PyTorch's current stream and the one on which ONNX Runtime works, without the host waiting."""

    __slots__ = ("_current", "_theirs")

    def __init__(self, current: torch.cuda.Stream, theirs: torch.cuda.Stream) -> None:
        self._current, self._theirs = current, theirs

    @classmethod
    def of(cls, device: int, stream: torch.cuda.Stream | None = None) -> Fence | None:
        """The fence between this thread's current stream and a session's (the default stream); None where they are one."""
        if torch._C._cuda_getCurrentRawStream(device) == (0 if stream is None else stream.cuda_stream):
            return None
        return cls(torch.cuda.current_stream(device), stream or torch.cuda.default_stream(device))

    def to_onnxruntime(self) -> None:
        """What PyTorch has started comes before what ONNX Runtime starts from here on."""
        self._theirs.wait_stream(self._current)

    def to_torch(self) -> None:
        """What ONNX Runtime has started comes before what PyTorch starts from here on."""
        self._current.wait_stream(self._theirs)
