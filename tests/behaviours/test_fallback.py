"""What ONNX Runtime cannot run, PyTorch runs inside the session, or between sessions: same values and gradients, said once, never hidden."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, refused, same_as_eager, same_gradients, same_tree, twin
from behaviours.operators import BOTH, FAILING, Refusal, cube, parts
from default_device import DEVICE, random_state, seeded
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import ort_backend
from ort_backend import compiler
from ort_backend.lowering import registry
from ort_backend.runtime import capabilities


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*(shape or (4, 3)), generator=seeded(seed))
    return made.requires_grad_()


A, B = tensor(), tensor(seed=1)


@pytest.fixture
def failing() -> Iterator[dict[str, bool]]:
    yield FAILING
    FAILING.update(forward=False, backward=False)


@pytest.fixture
def warnings_of_the_backend(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """A function that gives the warnings logged so far; what was said before in this process counts as unsaid."""
    compiler._warned.clear()
    with caplog.at_level(logging.INFO, logger="ort_backend"):
        yield lambda: [
            record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING and record.name.startswith("ort_backend")
        ]


def test_an_operator_without_a_lowering_runs_in_pytorch() -> None:
    ran = same_as_eager(lambda x: cube(x.sin(), 0.5) * 2, call(A), graphs=1, python_ops=BOTH)
    (one, other) = [one for one in ran.graphs[0].outside if not one.is_choice]
    assert one.count == other.count == 1 and "no lowering" in one.reason
    assert "test_fallback.py" in one.where
    assert ran.graphs[0].onnx_nodes > 2


def test_the_users_line_is_named_where_a_default_device_is_set() -> None:
    """Then a file of PyTorch's calls every operator."""
    with torch.device(DEVICE):
        ran = same_as_eager(lambda x: cube(x.sin(), 0.5) * 2, call(A), graphs=1, python_ops=BOTH)
    assert "test_fallback.py" in next(one.where for one in ran.graphs[0].outside if not one.is_choice)


def test_results_of_several_dtypes_come_back() -> None:
    def function(x: torch.Tensor) -> Any:
        doubled, positive, place = parts(x.detach() + 1)
        return x * doubled, positive, ~positive, place + 1

    same_as_eager(function, call(A), graphs=1, python_ops=["behaviours::parts"])


def test_the_warning_comes_once_and_names_the_line(warnings_of_the_backend: Any) -> None:
    with on_ort(python_ops=BOTH, graphs=2):
        for function in (lambda x: cube(x), lambda x: cube(x) + 1):
            step = compiled(function)
            for _ in range(3):
                step(A).sum().backward()
    said = warnings_of_the_backend()
    assert len([text for text in said if "behaviours::cube runs" in text]) == 1, said
    assert "test_fallback.py" in said[0] and "no lowering" in said[0]
    A.grad = None


def test_a_graph_that_runs_whole_warns_of_nothing(warnings_of_the_backend: Any) -> None:
    same_as_eager(nn.Linear(3, 2), call(A), graphs=1)
    assert warnings_of_the_backend() == []


def test_complex_tensors() -> None:
    z = torch.randn(4, 3, dtype=torch.complex64, generator=seeded(2)).requires_grad_()

    def function(z: torch.Tensor, x: torch.Tensor) -> Any:
        w = z * z.conj() + x * 1j
        return w, w.abs(), torch.view_as_real(w).sum()

    one, other = twin((z, A)), twin((z, A))
    with on_ort(graphs=1, python_ops=None) as ran:
        results = [compiled(function)(*one), function(*other)]
        same_tree(*results)
        for result in results:
            (result[1].sum() + result[2]).backward()
        same_gradients(one, other)
    (graph,) = ran.graphs
    assert not [one for one in graph.outside if "lowering" in one.reason]


def fourier_as_in_eager(x: torch.Tensor, **close: float) -> Any:
    """The graphs and operators that ran, when a transform's magnitudes and their gradient were as in eager PyTorch."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.fft.rfft(x, dim=-1).abs().sum(-1)

    one, other = twin(x), twin(x)
    with on_ort(graphs=1, python_ops=None) as ran:
        results = [compiled(function)(one), function(other)]
        same_tree(*results)
        for result in results:
            result.sum().backward()
    same_gradients([one], [other], **close)
    return ran


def test_a_fourier_transform() -> None:
    ran = fourier_as_in_eager(A)
    assert not [one for graph in ran.graphs for one in graph.outside if "lowering" in one.reason]


def test_a_fourier_transform_of_a_large_prime_length() -> None:
    x = torch.randn(2, 1031, generator=seeded(2)).requires_grad_()
    ran = fourier_as_in_eager(x, rtol=1e-4, atol=1e-4)
    assert any("fft" in operator for operator in ran.python_ops)


def test_a_dtype_without_a_kernel_is_seen_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    has_kernel = capabilities.has_kernel

    def without_wide_exp(node: Any, **where: Any) -> bool:
        return has_kernel(node, **where) and not (node.op_type == "Exp" and str(node.inputs[0].dtype) == "DOUBLE")

    monkeypatch.setattr(capabilities, "has_kernel", without_wide_exp)
    wide = A.detach().double().requires_grad_()
    ran = same_as_eager(lambda x: x.exp() * 2, call(wide), graphs=1, python_ops=["aten::exp"])
    assert ran.graphs[0].outside[0].reason == f"{DEVICE.upper()}ExecutionProvider has no Exp kernel for DOUBLE"
    same_as_eager(lambda x: x.exp() * 2, call(A), graphs=1)


def test_strict_refuses_and_names_the_users_line() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return cube(y)  # the line to name

    with refused(ort_backend.LoweringError, "behaviours::cube does not run on ONNX Runtime: no lowering") as caught:
        compiled(function, options={"strict": True})(A)
    text = str(caught.value)
    assert "test_fallback.py" in text and "the line to name" in text and "in function" in text
    same_as_eager(lambda x: x.sin(), call(A), graphs=1, options={"strict": True})


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_of_the_users_own_comes_through_and_the_next_step_works(failing: dict[str, bool], where: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return cube(x.sin())

    with on_ort(graphs=1, python_ops=BOTH):
        step = compiled(function)
        for attempt in range(4):
            one, other = twin(A), twin(A)
            failing[where] = attempt % 2 == 0
            if failing[where]:
                with pytest.raises(Refusal, match="not"):
                    step(one).sum().backward()
                assert one.grad is None
                continue
            for side, x in ((step, one), (function, other)):
                side(x).sum().backward()
            same_gradients([one], [other])


@pytest.mark.cpu_only(reason="kernels of CUDA do not check")
@pytest.mark.parametrize(
    ("read", "index", "says"),
    [
        (lambda x, i: x[i] * 2, 77, "index 77 is out of bounds for a dimension of size 4"),
        (lambda x, i: x[i] * 2, -5, "index -5 is out of bounds for a dimension of size 4"),
        (lambda x, i: x[i, i] * 2, 4, "index 4 is out of bounds"),
        (lambda x, i: torch.nn.functional.embedding(i, x), -3, "index -3 is out of bounds for a dimension of size 4"),
        (lambda x, i: x.index_put((i,), x[:2] * 3), 4, "index 4 is out of bounds"),
        (lambda x, i: torch.nn.functional.cross_entropy(x[:2], i), 8, "an index is out of bounds"),
    ],
    ids=["rows", "below the first", "elements", "a token below 0", "written to", "a label"],
)
def test_an_index_out_of_range_is_an_index_error(read: Any, index: int, says: str) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with on_ort(graphs=1):
        step = compiled(read)
        same_tree(step(x, torch.tensor([1, 2])), read(x, torch.tensor([1, 2])))
        with pytest.raises(IndexError, match=rf"^{says}, in graph 'graph_\d+(\.forward)?'\n  at File .*test_fallback.py") as raised:
            step(x, torch.tensor([1, index]))
        assert isinstance(raised.value, ort_backend.OutOfRangeError)
        with pytest.raises(IndexError):  # as in eager PyTorch
            read(x, torch.tensor([1, index]))
        step(x, torch.tensor([3, 0])).sum().backward()


@pytest.mark.cpu_only(reason="kernels of CUDA do not check")
def test_an_error_in_a_module_of_pytorchs_that_was_compiled_by_itself_names_the_module() -> None:
    embeds = compiled(nn.Sequential(nn.Flatten(), nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))))
    with pytest.raises(IndexError, match=r"size 4, in graph '.*'\n  at module 1.0 \(Embedding\)$"):
        embeds(torch.tensor([[4]]))
    with pytest.raises(IndexError, match=r"out of bounds, in graph '.*'\n  at module CrossEntropyLoss$"):
        compiled(nn.CrossEntropyLoss())(tensor(), torch.tensor([999] * tensor().shape[0]))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_of_pytorchs_names_the_users_line_in_its_traceback() -> None:
    divided = compiled(lambda x, y: x // y + 1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as raised:
            divided(torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
        (note,) = raised.value.__notes__
        assert note.startswith("  at File ") and note.endswith("divided = compiled(lambda x, y: x // y + 1)")


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise KeyError("no gradient")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_of_a_functions_backward_names_the_line_of_its_call() -> None:
    loss = compiled(lambda x: _Refuses.apply(x.sin()).sum())(tensor())
    with pytest.raises(KeyError, match="no gradient") as raised:
        loss.backward()
    (note,) = raised.value.__notes__
    assert note.startswith("  at File ") and "_Refuses.apply(x.sin())" in note


def test_another_device_is_an_error_that_names_the_input() -> None:
    with pytest.raises(Exception, match=r"input l_\w*x_ is on device 'meta', but ONNX Runtime runs here on the CPU and on CUDA"):
        compiled(lambda x, y: x * y)(torch.ones(2, device="meta"), torch.ones(2, device="meta"))


def test_a_branch_on_data_breaks_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return (y * 2).exp() if y.sum() > 0 else y.cos()

    positive, negative = tensor(seed=3).detach().abs().requires_grad_(), -tensor(seed=3).detach().abs()
    ran = same_as_eager(function, call(positive), call(negative.requires_grad_()), graphs=range(3, 5), fullgraph=False)
    assert len(ran.graphs) >= 3


def test_a_print_in_between_breaks_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        print("between")
        return y.exp()

    same_as_eager(function, call(A), graphs=2, fullgraph=False)
    assert capsys.readouterr().out.count("between") == 4


def test_item_in_the_middle() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().max().item()

    same_as_eager(function, call(A), graphs=range(1, 3), fullgraph=False, python_ops=if_on_cuda("aten::max"))


def test_a_condition_inside_the_graph() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))

    with on_ort(graphs=1, forwards=2, python_ops=None):
        for sign in (1, -1):
            x = A.detach().abs() * sign
            same_tree(compiled(function)(x), function(x))


def test_a_condition_inside_a_graph_with_gradients() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,)) * 3

    with on_ort(graphs=1, backwards=2, python_ops=None):
        for sign in (1, -1):
            one, other = ((A.detach().abs() * sign).requires_grad_() for _ in range(2))
            for side, x in ((compiled(function), one), (function, other)):
                side(x).sum().backward()
            same_gradients([one], [other])


def test_results_whose_size_depends_on_values() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].exp() * 2

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), on_ort(graphs=1, backwards=3):
        step = compiled(function)
        for seed in range(3):
            one, other = tensor(seed=seed), tensor(seed=seed)
            for side, x in ((step, one), (function, other)):
                side(x).sum().backward()
            same_gradients([one], [other])


def test_a_disabled_function_stays_in_eager() -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x * x.detach().cpu().numpy().max().item()

    same_as_eager(lambda x: outside(x.sin()).exp(), call(A), graphs=2, fullgraph=False)


def test_verify_lets_right_graphs_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.ReLU())
    with on_ort(graphs=1):
        step = compiled(model, options={"verify": 2})
        reference = random_state()
        for _ in range(3):
            step(A.detach()).sum().backward()
    assert not torch.equal(reference, random_state())


def _parts(both: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return both[0], both[1]


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda: (both := torch.ones(4, 3), both[1]), lambda x, y: (x.add_(1), y.mul_(2), x * y)[2]),
        (lambda: _parts(torch.ones(2, 4)), lambda x, y: (x.add_(1), x * y)[1]),
        (lambda: _parts(torch.ones(2, 4, requires_grad=True) * 2), lambda x, y: (x.mul_(2), x.sin() + y)[1]),
        (lambda: (both := torch.ones(2, 4, requires_grad=True) * 2, both[1]), lambda x, y: (y.mul_(2), x.sin() + y)[1]),
        (lambda: (torch.ones(4, requires_grad=True) * 2, None), lambda x, y: x.mul_(2).sin()),
        (lambda: (both := torch.ones(4, requires_grad=True), both.detach()), lambda x, y: x.sin() + y),
        (lambda: (both := torch.ones(4), both.detach()), lambda x, y: (x.add_(1), x * 2 + y.sum())[1]),
        (lambda: ((both := torch.ones(4, 6)).view(torch.int32), both[0]), lambda x, y: (x * 2).sum() + y),
        (lambda: ((both := torch.ones(4, 3, dtype=torch.complex64)).real, both.imag), lambda x, y: x * y),
        (lambda: ((both := torch.ones(4, 3, dtype=torch.complex64)), both.conj()), lambda x, y: x * y * 1.1),
        (lambda: ((both := torch.ones(4, 6))[2:].detach()[:1], both), lambda x, y: x + y),
    ],
    ids=[
        *("base and view", "two views", "two views with gradients", "base and view with gradients", "in place", "detached"),
        *("detached in place", "two dtypes", "real and imaginary", "conjugate", "view of a detached part"),
    ],
)
def test_verify_keeps_what_arguments_share(make: Callable[[], tuple[Any, ...]], function: Callable[..., torch.Tensor]) -> None:
    with on_ort(graphs=1, idle=True):
        results = compiled(function, options={"verify": 1})(*make())
    torch.testing.assert_close(results, function(*make()))


def _two_tensors() -> TwoTensor:
    return TwoTensor(torch.randn(3, 4), torch.randn(3, 4)).requires_grad_()


@pytest.mark.parametrize(
    ("make", "operator", "what"),
    [
        (lambda: A, "sin", "output 0"),
        (lambda: A, "cos", "gradient of"),
        (_two_tensors, "sin", "output 0, a of its TwoTensor,"),
        (_two_tensors, "cos", "gradient of .*, a of its TwoTensor,"),
    ],
)
def test_verify_catches_a_wrong_lowering(monkeypatch: pytest.MonkeyPatch, make: Callable[[], torch.Tensor], operator: str, what: str) -> None:
    target = getattr(torch.ops.aten, operator).default
    registry.load()
    monkeypatch.setitem(registry._table, target, [registry.Lowering(target, lambda op, self: op.Exp(self))])
    with pytest.raises(ort_backend.VerificationError, match=f"{what}.* differs from eager"):
        compiled(lambda x: x.sin(), options={"verify": 1})(make())


def test_verify_of_a_tensor_subclass() -> None:
    def step(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin() * scale, x + scale

    x, scale = _two_tensors(), torch.randn(3, 4, requires_grad=True)
    gradients = []
    with on_ort(graphs=1):
        for function in (compiled(step, options={"verify": 2}), step):
            gradients.append(torch.autograd.grad(sum(one.sum() for one in function(x, scale)), [x, scale]))  # type: ignore[union-attr]
    for own, expected in zip(*gradients, strict=True):
        assert isinstance(own, TwoTensor) and isinstance(expected, TwoTensor)
        torch.testing.assert_close([own.a, own.b], [expected.a, expected.b])


def test_verify_compares_sparse_gradients() -> None:
    with on_ort(graphs=1, python_ops=None):
        compiled(nn.Embedding(10, 6, sparse=True), options={"verify": 1})(torch.arange(4)).square().sum().backward()


def test_verify_catches_a_wrong_step_of_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo's graph holds the parameters itself: they are no inputs."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    target = torch.ops.aten.add.Tensor
    registry.load()
    monkeypatch.setitem(registry._table, target, [registry.Lowering(target, lambda op, self, other, alpha=1: op.Add(self, self))])
    optimizer = torch.optim.SGD([parameter], 0.1)
    with pytest.raises(ort_backend.VerificationError, match=r"state after the call .*params.* differs from eager"):
        compiled(optimizer.step, options={"verify": 1}, fullgraph=False)()
    assert parameter.tolist() == [1.0, 1.0, 1.0]


def test_a_wrong_lowering_is_wrong_without_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests here would notice: what they compare with is not what they run."""
    target = torch.ops.aten.sin.default
    registry.load()
    monkeypatch.setitem(registry._table, target, [registry.Lowering(target, lambda op, self: op.Exp(self))])
    with pytest.raises(AssertionError, match="not close"):
        same_as_eager(lambda x: x.sin(), call(A))
    with pytest.raises(AssertionError, match="everything ran in eager"), on_ort():
        A.sin()
