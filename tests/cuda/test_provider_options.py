"""What ONNX Runtime's CUDA provider is told: PyTorch's flags, device, memory and stream. Nothing here needs a GPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import onnx_ir as ir
import pytest
import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.errors import SessionError
from ort_backend.runtime import binding, cuda
from ort_backend.runtime.cuda import Allocator, Fence, Numerics
from ort_backend.runtime.session import Program, Session, SessionConfig

NUMERICS = Numerics(tf32=False, algorithms="HEURISTIC")
ALLOCATOR = Allocator(alloc=11, free=12, empty_cache=13)


@pytest.fixture(autouse=True)
def _flags() -> Iterator[None]:
    with torch.backends.__allow_nonbracketed_mutation():  # torch.testing, where it was imported, forbids to set flags
        yield from _kept_flags()


def _kept_flags() -> Iterator[None]:
    matmul, convolution = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = matmul, convolution
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("matmul", "convolution", "products", "convolutions", "allowed"),
    [
        ("ieee", "tf32", True, False, False),
        ("ieee", "tf32", False, True, True),
        ("tf32", "ieee", True, False, True),
        ("tf32", "ieee", True, True, False),
        ("tf32", "tf32", True, True, True),
        ("none", "tf32", True, False, False),
    ],
)
def test_tf32_needs_every_flag_that_concerns_the_graph(matmul: str, convolution: str, products: bool, convolutions: bool, allowed: bool) -> None:
    torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision = matmul, convolution
    assert Numerics.now(products=products, convolutions=convolutions).tf32 is allowed


def test_tf32_follows_the_older_switch_too() -> None:
    torch.set_float32_matmul_precision("high")
    assert Numerics.now(products=True, convolutions=False).tf32
    torch.set_float32_matmul_precision("highest")
    assert not Numerics.now(products=True, convolutions=False).tf32


@pytest.mark.parametrize(("dtype", "concerned"), [(ir.DataType.FLOAT, {"Conv"}), (ir.DataType.FLOAT16, set()), (None, {"Conv"})])
def test_tf32_concerns_float32_only(dtype: ir.DataType | None, concerned: set[str]) -> None:
    kind = None if dtype is None else ir.TensorType(dtype)
    x, weight, y = (ir.Value(name=name, type=kind, shape=ir.Shape([1, 1, 1])) for name in ("x", "w", "y"))
    graph = ir.Graph([x, weight], [y], nodes=[ir.Node("", "Conv", [x, weight, None], outputs=[y])], opset_imports={"": 18}, name="g")
    assert Program.of(ir.Model(graph, ir_version=9), cuda.PROVIDER).float32_operators == concerned


def test_convolution_algorithms_follow_cudnn_flags() -> None:
    assert Numerics.now(products=False, convolutions=True).algorithms == "HEURISTIC"
    torch.backends.cudnn.benchmark = True
    assert Numerics.now(products=False, convolutions=True).algorithms == "EXHAUSTIVE"
    torch.use_deterministic_algorithms(True)
    assert Numerics.now(products=False, convolutions=True).algorithms == "DEFAULT"
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = True
    assert Numerics.now(products=False, convolutions=True).algorithms == "DEFAULT"


def test_memory_is_torch_s_and_the_stream_with_it() -> None:
    options = cuda.provider_options(1, NUMERICS, ALLOCATOR, {})
    assert options == {
        "device_id": "1",
        "use_tf32": "0",
        "cudnn_conv_algo_search": "HEURISTIC",
        "gpu_external_alloc": "11",
        "gpu_external_free": "12",
        "gpu_external_empty_cache": "13",
    }


def test_an_arena_of_the_user_s_works_on_the_default_stream() -> None:
    """Without a stream ONNX Runtime would make one that does not wait for PyTorch's. With both, it refuses."""
    options = cuda.provider_options(0, NUMERICS, ALLOCATOR, {"gpu_mem_limit": 1 << 30})
    assert options["gpu_mem_limit"] == str(1 << 30)
    assert options["user_compute_stream"] == "1"
    assert "gpu_external_alloc" not in options


def test_a_stream_of_the_user_s_stays() -> None:
    options = cuda.provider_options(0, NUMERICS, ALLOCATOR, {"user_compute_stream": 4096})
    assert options["user_compute_stream"] == "4096"
    assert "gpu_external_alloc" not in options


def test_the_user_s_options_come_last() -> None:
    assert cuda.provider_options(0, NUMERICS, ALLOCATOR, {"use_tf32": 1})["use_tf32"] == "1"


def test_callbacks_call_python_and_a_refusal_is_a_null_pointer() -> None:
    freed: list[int] = []
    emptied: list[bool] = []

    def allocate(size: int) -> int:
        if size > 100:
            raise torch.OutOfMemoryError("too much")
        return 4096 + size

    made, kept = cuda.callbacks(allocate, freed.append, lambda: emptied.append(True))
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(made.alloc)
    assert alloc(5) == 4101
    assert cuda.take_failure() is None
    assert alloc(101) is None
    assert isinstance(cuda.take_failure(), torch.OutOfMemoryError)
    assert cuda.take_failure() is None
    for address in (4101, None):  # ONNX Runtime frees null pointers, too
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(made.free)(address)
    ctypes.CFUNCTYPE(None)(made.empty_cache)()
    assert freed == [4101, 0] and emptied == [True]
    assert kept


def test_functions_of_pytorchs_libraries() -> None:
    address = cuda.exported("libtorch_cpu.so", "aoti_torch_device_type_cpu")  # int32_t aoti_torch_device_type_cpu()
    assert address is not None and ctypes.CFUNCTYPE(ctypes.c_int32)(address)() == 0
    assert cuda.exported("libtorch_cpu.so", "no_such_function") is None
    assert cuda.exported("libtorch_nothing.so", "aoti_torch_device_type_cpu") is None


@pytest.mark.parametrize("address", [None, 4096])
def test_memory_is_freed_by_c_where_pytorch_has_a_function_for_it(address: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_made", {})
    monkeypatch.setattr(cuda, "exported", lambda *_: address)
    for name in ("_cuda_cudaCachingAllocator_raw_alloc", "_cuda_cudaCachingAllocator_raw_delete", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    made = cuda.torch_allocator(0)
    assert (made.free == 4096) == (address is not None) and made.alloc != made.free
    assert cuda.torch_allocator(0) is made


def test_an_allocation_that_failed_earlier_is_not_the_reason_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _kept = cuda.callbacks(lambda size: [][size], lambda address: None, lambda: None)
    session = Session.__new__(Session)
    session._config, session._registrations, session._stream, session.on_cuda = SessionConfig(provider=cuda.PROVIDER), [], None, True
    session._program, session.name, session.has_python_ops = mock.Mock(lines={}), "g", False
    monkeypatch.setattr(Fence, "of", lambda *_: None)
    alloc = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(made.alloc)
    with mock.patch.object(torch.cuda, "device", lambda index: contextlib.nullcontext()):
        session.call(alloc, 1)  # a null pointer: ONNX Runtime tried less
        session.call(lambda: None)
        assert isinstance(session.failure(RuntimeError("another")), SessionError)
        session.call(alloc, 1)
        assert isinstance(session.failure(RuntimeError("no memory")), IndexError)


def test_onnxruntime_is_told_whose_gpu_it_is() -> None:
    device = binding.ort_device(torch.device("cuda", 1))
    assert device.device_id() == 1 and device.device_type() == C.OrtDevice.cuda()
    assert getattr(device, "vendor_id", lambda: 0x10DE)() == 0x10DE
    assert binding.ort_device(torch.device("cpu")).device_type() == C.OrtDevice.cpu()


class _Stream:
    def __init__(self, name: str, events: list[Any]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: _Stream) -> None:
        self.events.append((self.name, "waits for", other.name))


def test_a_fence_orders_the_streams_in_both_directions() -> None:
    events: list[Any] = []
    fence = Fence(_Stream("current", events), _Stream("default", events))  # type: ignore[arg-type]
    fence.to_onnxruntime()
    fence.to_torch()
    assert events == [("default", "waits for", "current"), ("current", "waits for", "default")]


def test_there_is_no_fence_on_the_default_stream() -> None:
    with mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True):
        assert Fence.of(0) is None


def test_products_inside_loops_count() -> None:
    x, y, z = (ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, 4])) for name in "xyz")
    condition, out = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([])), ir.Value(name="out")
    branch = ir.Graph([], [z], nodes=[ir.Node("", "MatMul", [x, y], outputs=[z])], name="branch")
    node = ir.Node("", "If", [condition], [ir.AttrGraph("then_branch", branch)], outputs=[out])
    graph = ir.Graph([condition, x, y], [out], nodes=[node], opset_imports={"": 18}, name="graph")
    assert Program.of(ir.Model(graph, ir_version=9)).float32_operators == {"MatMul"}
