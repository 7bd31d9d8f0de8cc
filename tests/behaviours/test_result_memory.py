"""Memory for large results of PyTorch's kernels inside a session: used again, never while a result lives."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ort_backend.lowering.kernels import dense_products, given_memory
from ort_backend.lowering.passes import products
from ort_backend.runtime import capabilities, result_memory
from ort_backend.runtime.result_memory import ResultMemory
from ort_backend.target import LARGE_RESULT

aten = torch.ops.aten
_training = pytest.mark.skipif(not capabilities.has_training(), reason="PythonOp, where such kernels run, needs onnxruntime-training")
LARGE = LARGE_RESULT // 4  # elements of float32


def _address(memory: ResultMemory, elements: int = LARGE) -> tuple[torch.Tensor, int]:
    tensor = memory.empty((elements,), torch.float32)
    return tensor, tensor.data_ptr()


def _bytes(memory: ResultMemory) -> int:
    return sum(size * len(blocks) for size, blocks in memory._blocks.items())


def test_a_result_that_was_given_up_leaves_its_memory_to_the_next() -> None:
    memory = ResultMemory()
    first, place = _address(memory)
    second, other = _address(memory)
    assert place != other
    del first
    again, same = _address(memory)
    assert same == place
    assert _address(memory)[1] not in (place, other)
    assert again.is_contiguous() and again.shape == (LARGE,) and second.dtype == torch.float32


def test_the_memory_used_last_comes_first() -> None:
    memory = ResultMemory()
    first, _ = _address(memory)
    second, place = _address(memory)
    del first, second
    assert _address(memory)[1] == place


def test_what_looks_into_a_result_keeps_it() -> None:
    memory = ResultMemory()
    tensor, place = _address(memory)
    seen = torch._C._from_dlpack(torch._C._to_dlpack(tensor))[3:]
    del tensor
    other, elsewhere = _address(memory)
    assert elsewhere != place
    del seen
    assert _address(memory)[1] == place


@pytest.mark.parametrize("shape, dtype", [((3, 5), torch.float64), ((0, 1 << 20), torch.float32), ((), torch.float32), ((512, 256), torch.bfloat16)])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = ResultMemory().empty(shape, dtype)
    assert (tensor.shape, tensor.dtype, tensor.is_contiguous()) == (torch.Size(shape), dtype, True)


def test_memory_is_bounded_where_sizes_change() -> None:
    memory = ResultMemory()
    for i in range(40):
        held = [memory.empty((LARGE + 1000 * i,), torch.float32) for _ in range(3)]
        assert _bytes(memory) <= result_memory._SLACK * sum(one.nbytes for one in held)
        del held


def test_sizes_that_come_back_stay() -> None:
    memory = ResultMemory()
    places = []
    for _ in range(4):
        held = [_address(memory, elements) for elements in (LARGE, 2 * LARGE, 3 * LARGE)]
        places.append([place for _, place in held])
        del held
    assert places[1] == places[2] == places[3]


def test_release_gives_back_what_is_free() -> None:
    memory = ResultMemory()
    held, place = _address(memory)
    _address(memory)
    memory.release()
    assert _bytes(memory) == held.nbytes
    del held
    assert _address(memory)[1] == place


def test_a_release_in_the_middle_waits() -> None:
    memory = ResultMemory()
    _address(memory)
    with memory._lock:  # as the garbage collector would, during an allocation
        memory.release()
        assert _bytes(memory)
    held, _ = _address(memory, 2 * LARGE)
    assert _bytes(memory) == held.nbytes


def test_threads() -> None:
    memory, wrong = ResultMemory(), []

    def work(number: int) -> None:
        for i in range(300):
            tensor = memory.empty((LARGE + (i % 3),), torch.float32).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)
            if i % 50 == 0:
                memory.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def _given() -> tuple[list[torch.Tensor], given_memory.Empty]:
    """What was given, and what gives it."""
    given: list[torch.Tensor] = []

    def empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        given.append(torch.empty(shape, dtype=dtype))
        return given[-1]

    return given, empty


_X = torch.rand(6, 700) + 0.1
_PICTURE = torch.rand(2, 3, 8, 8)


@pytest.mark.cpu_only(reason="memory for results")
@pytest.mark.parametrize(
    "target, args",
    [
        *((getattr(aten, name).default, (_X,)) for name in ("gelu", "hardswish", "log", "log1p", "rsqrt", "softplus", "silu", "relu", "exp")),
        *((getattr(aten, name).default, (_X, _X + 1)) for name in ("gelu_backward", "silu_backward", "sigmoid_backward", "atan2")),
        (aten.leaky_relu_backward.default, (_X, _X, 0.1, False)),
        (aten.pow.Tensor_Scalar, (_X, 3.0)),
        (aten.pow.Tensor_Scalar, (torch.arange(4), 2.5)),
        (aten.threshold_backward.default, (_X, _X, 0.0)),
        (aten.add.Tensor, (_X, _X[0])),
        (aten.add.Tensor, (_X.bfloat16(), _X)),
        (aten.mul.Tensor, (_X[:, :1], _X[0])),
        (aten.mul.Tensor, (torch.complex(_X, -_X), torch.complex(-_X[0], _X[0]))),
        (aten.div.Tensor, (torch.arange(4), torch.tensor(3))),
        (aten.where.self, (_X > 0.5, _X, torch.tensor(0.0))),
        (aten.clamp.default, (_X, 0.2, 0.5)),
        (aten.gt.Scalar, (_X, 0.5)),
        (aten._softmax.default, (_X, 0, False)),
        (aten._log_softmax_backward_data.default, (_X, -_X, 1, torch.float32)),
        (aten.cumsum.default, (_X, 1)),
        (aten.nll_loss_backward.default, (torch.tensor(1.0), _X, torch.arange(6), None, 1, -100, torch.tensor(6.0))),
        (aten.max_pool2d_with_indices_backward.default, (_PICTURE[..., :4, :4], _PICTURE, [2, 2], [2, 2], [0, 0], [1, 1], False,
         torch.nn.functional.max_pool2d(_PICTURE, 2, return_indices=True)[1])),
        (aten.relu.default, (torch.tensor([float("nan"), -1.0, 2.0]),)),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)  # fmt: skip
def test_kernels_write_into_what_they_are_given(target: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = target(*args)
    assert given_memory.into_given_memory(target, expected) is None  # too small
    monkeypatch.setattr(given_memory, "LARGE_RESULT", 0)
    given, empty = _given()
    into = given_memory.into_given_memory(target, expected)
    assert into is not None
    found = into(empty, *args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    assert [one.data_ptr() for one in given] == [found.data_ptr()]


@pytest.mark.cpu_only(reason="memory for results")
def test_named_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_memory, "LARGE_RESULT", 0)
    given, empty = _given()
    into = given_memory.into_given_memory(aten.cumsum.default, torch.zeros(6, 700, dtype=torch.float64))
    assert into is not None
    torch.testing.assert_close(into(empty, _X, 1, dtype=torch.float64), _X.cumsum(1, dtype=torch.float64), rtol=0, atol=0)
    assert len(given) == 1


@pytest.mark.parametrize(
    "target, args",
    [
        (aten.bernoulli.p, (_X, 0.5)),  # draws
        (aten.native_dropout_backward.default, (_X, _X > 0.5, 2.0)),  # whose variant copies
        (aten.pow.Tensor_Scalar, (_X, 1j)),
        (aten.sum.dim_IntList, (_X, [1])),
    ],
)
def test_others_make_their_own(target: Any, args: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given_memory, "LARGE_RESULT", 0)
    assert given_memory.into_given_memory(target, target(*args)) is None


@pytest.mark.cpu_only(reason="memory for results")
@_training
def test_results_of_symbolic_and_of_known_sizes() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: torch.digamma(x) * torch.atan2(x, y), backend="ort_training", dynamic=True)
    fixed = torch.compile(lambda x, y: torch.digamma(x) * torch.atan2(x, y), backend="ort_training", dynamic=False)
    before = result_memory.memory._takes
    for rows in (300, 200):
        x, y = torch.rand(rows, 256) + 1, torch.rand(256)
        expected = torch.digamma(x) * torch.atan2(x, y)
        for call in (compiled, fixed):
            torch.testing.assert_close(call(x, y), expected, rtol=1e-5, atol=1e-6)
    assert result_memory.memory._takes > before


@pytest.mark.cpu_only(reason="memory for results")
@_training
def test_results_outlive_the_next_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients that a program keeps lie in such memory, and the next steps must not write there."""
    monkeypatch.setattr(dense_products, "mkl_is_at_home", lambda: True)
    monkeypatch.setattr(products, "product_by_mkl", lambda *sizes, transposed: True)
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    compiled = torch.compile(model, backend="ort_training", options={"verify": 1}, fullgraph=True)
    before = result_memory.memory._takes
    steps = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(512, 256, requires_grad=True)
        out = compiled(x)
        pending = compiled(x.detach() + 1)  # its backward comes behind the other's
        out.square().sum().backward()
        pending.sum().backward()
        steps.append((x, out, pending, x.grad, [one.grad for one in model.parameters()]))
        model.zero_grad()
    assert result_memory.memory._takes > before
    for x, out, pending, of_input, of_weights in steps:
        own = x.detach().clone().requires_grad_()
        expected = model(own), model(own.detach() + 1)
        expected[0].square().sum().backward()
        expected[1].sum().backward()
        of_eager = [one.grad for one in model.parameters()]
        torch.testing.assert_close((out, pending, of_input, of_weights), (*expected, own.grad, of_eager), rtol=1e-3, atol=1e-2)
        model.zero_grad()


_ENDS = """
import gc, torch
from ort_backend.lowering.kernels import dense_products
from ort_backend.lowering.passes import products
from ort_backend.runtime.result_memory import memory
torch.set_num_threads(1)
dense_products.mkl_is_at_home = lambda: True
products.product_by_mkl = lambda *sizes, transposed: True
def held():
    gc.collect()
    return sum(size * len(blocks) for size, blocks in memory._blocks.items())
model = torch.nn.Linear(256, 512)
compiled = torch.compile(model, backend="ort_training")
compiled(torch.randn(512, 256)).sum().backward()
gradient = model.weight.grad
del model
print(held())
torch._dynamo.reset()
del compiled
print(held(), gradient.untyped_storage().nbytes())
"""


@_training
def test_a_session_that_ends_leaves_what_is_in_use() -> None:
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, check=True)
    before, after, in_use = map(int, done.stdout.split())
    assert before > after == in_use
