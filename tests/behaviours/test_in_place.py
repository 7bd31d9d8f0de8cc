"""Forwards that write in place: into inputs, views, buffers and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, same_as_eager, same_gradients, same_tree, twin
from default_device import seeded
from torch import nn

import ort_backend


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (4, 3)), generator=seeded(seed))


A, B = tensor(), tensor(seed=1).requires_grad_()


def _add(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.add_(1)
    return x * y


def _row(x: torch.Tensor, y: torch.Tensor) -> Any:
    x[0] += 2
    x[:, 1].mul_(3)
    return x.sum(0) * y


def _returned(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.mul_(2)
    return x, y * x, x[1:]


def _through_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    flat = x.view(-1)
    flat[::2] = 0.5
    return flat * 2, (x * y).sum()


def _copied(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.copy_(y.detach() + 1)
    return y * x


def _value_of_y(x: torch.Tensor, y: torch.Tensor) -> Any:
    x.copy_(y.detach())
    return y * 2


def _intermediate(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = y * 3
    h[0] = 1.0
    h.mul_(2)
    h[:, 0] += x[:, 0]
    return h, h.sum()


def _masked(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = y * 1
    h.masked_fill_(x > 0, -1.0)
    h[x < -1] = 0.0
    return h.relu_()


def _index(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = y.clone()
    h.index_add_(0, torch.tensor([0, 0, 2]), x[:3])
    h.scatter_(1, torch.tensor([[1], [0], [2], [1]]), 7.0)
    return h * y


def _twice(x: torch.Tensor, y: torch.Tensor) -> Any:
    before = x + y
    x.add_(1)
    between = x - y
    x.zero_()
    return before, between, x + y


def _slices(x: torch.Tensor, y: torch.Tensor) -> Any:
    h = torch.zeros(4, 6)
    h[:, :3] = y
    h[:, 3:] = y.sin()
    return h


def _activations(x: torch.Tensor, y: torch.Tensor) -> Any:
    return nn.functional.relu(y * x, inplace=True), nn.functional.hardtanh(y + x, inplace=True)


WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    function.__name__.strip("_"): function
    for function in (*(_add, _row, _returned, _through_view, _copied, _value_of_y, _intermediate, _masked, _index, _twice, _slices, _activations),)
}


@pytest.mark.parametrize("kind", WRITES)
def test_writes_are_seen_inside_and_outside(kind: str) -> None:
    same_as_eager(WRITES[kind], call(A, B), graphs=1)


@pytest.mark.parametrize("kind", WRITES)
def test_writes_without_gradients(kind: str) -> None:
    same_as_eager(WRITES[kind], call(A, B.detach()), graphs=1, train=False)


@pytest.mark.parametrize("kind", ["add", "row", "returned", "masked", "intermediate", "twice"])
def test_writes_into_tensors_of_changing_size(kind: str) -> None:
    calls = [call(tensor(n, 3), tensor(n, 3, seed=1).requires_grad_()) for n in (4, 6, 9)]
    same_as_eager(WRITES[kind], *calls, graphs=1, repeat=1, dynamic=True)


def test_arguments_that_share_memory() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x.sum() + y * z.sum(0)[:2]

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            base, z = tensor(), twin(B)
            result = side(base[0], base[:, :2], z)
            result.sum().backward()
            found.append((result.detach(), base, z.grad))
    same_tree(found[0], found[1])


def test_a_write_into_what_requires_grad() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(3)
        return x.sin()

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            leaf = twin(B)
            inner = leaf * 1
            result = side(inner)
            (result.sum() + inner.sum()).backward()
            found.append((leaf, inner.detach(), result.detach()))
    same_gradients([found[0][0]], [found[1][0]])
    same_tree(found[0][1:], found[1][1:])


def test_a_write_into_a_parameter_without_gradients() -> None:
    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.linear.weight.div_(self.linear.weight.norm(dim=1, keepdim=True))
            return self.linear(x)

    same_as_eager(Normalized(), call(A), graphs=1)


def test_an_output_written_to_by_the_user_later() -> None:
    def function(x: torch.Tensor) -> Any:
        h = x * 2
        return h, h + 1, x.sum()

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            leaf = twin(B)
            one, other, total = side(leaf)
            one.zero_()
            (one.sum() + (other * 3).sum() + total).backward()
            found.append((leaf, other.detach()))
    same_gradients([found[0][0]], [found[1][0]])
    same_tree(found[0][1], found[1][1])


WRITTEN_LATER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in_order": lambda x: x * 2,
    "transposed": lambda x: (x * 2).mT + 1,
    "channels_last": lambda x: nn.functional.conv2d(x.to(memory_format=torch.channels_last), torch.ones(2, 2, 1, 1)),
    "permuted_without_gradients": lambda x: torch.zeros(4, 2, 2, 4).permute(1, 2, 3, 0) + 1,
    "complex": lambda x: torch.fft.rfft2(x),
    "complex_without_gradients": lambda x: torch.zeros(2, 2, 4, 4, dtype=torch.complex64),
}


COPIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "clone": torch.clone,
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x]),
    "repeat": lambda x: x.repeat(1, 1),
    "to": lambda x: x.to(torch.float32, copy=True),
    "clone of a view": lambda x: x.view(3, 2).clone(),
}


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_a_copy_of_what_the_backward_reads_written_to_later(copy: Callable[[torch.Tensor], Any], both: bool) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = x.exp()
        return (copy(kept), kept) if both else (copy(kept),)

    gradients = []
    for run in (function, compiled(function)):
        x = torch.randn(2, 3, generator=seeded(0)).requires_grad_()
        results = run(x)
        results[0].detach().zero_()
        gradients.append(torch.autograd.grad([one.sum() for one in results], x))
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("kind", WRITTEN_LATER)
def test_a_result_of_any_memory_order_or_dtype_written_to_later(kind: str) -> None:
    """Autograd forbids writes to a view that was taken where no gradients are recorded."""
    x = torch.randn(2, 2, 4, 4, generator=seeded(0))
    found = []
    with on_ort(graphs=1, idle=True):
        for side in (compiled(WRITTEN_LATER[kind]), WRITTEN_LATER[kind]):
            leaf, scale = twin(x.requires_grad_()), torch.ones(4, requires_grad=True)
            result = side(leaf)
            result[..., 0] = result[..., 1] * 3
            result.mul_(scale[: result.shape[-1]])
            (result.abs() + leaf.sum()).sum().backward()
            found.append(([leaf, scale], result.detach()))
    same_gradients(found[0][0], found[1][0])
    same_tree(found[0][1], found[1][1])


INPUT_WRITTEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hardswish": lambda h: nn.functional.hardswish(h, inplace=True) * 2,
    "hardtanh": lambda h: nn.functional.hardtanh(h, -0.5, 0.5, inplace=True),
    "clamp": lambda h: h.clamp_(-0.5, 0.5),
    "part": lambda h: h.view(-1)[3:7].sin_().sum() + h * h,
    "sin": lambda h: h.sin_() * 1,
    "silu": lambda h: nn.functional.silu(h, inplace=True),
    "view": lambda h: h.t().sin_() @ h,
    "chain": lambda h: h.abs_().sqrt_(),
}


@pytest.mark.parametrize("later", [False, True], ids=["", "written_again"])
@pytest.mark.parametrize("kind", INPUT_WRITTEN)
def test_the_backward_of_a_write_into_an_input_sees_what_was_there(kind: str, later: bool) -> None:
    """As a block with `inplace=True` writes that gets the result of another: autograd keeps a copy, AOTAutograd makes one in the graph."""
    function = INPUT_WRITTEN[kind]
    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            leaf = twin(torch.linspace(-1, 1, 25).reshape(5, 5).requires_grad_())
            hidden = leaf * 1.1
            result = side(hidden)
            if later and kind in ("hardswish", "hardtanh", "clamp"):
                with torch.no_grad():
                    hidden.add_(1)
            result.sin().sum().backward()
            found.append(([leaf], (result.detach(), hidden.detach())))
    same_gradients(found[0][0], found[1][0])
    same_tree(found[0][1], found[1][1])


def test_a_write_into_columns_of_a_tensor_of_symbolic_size() -> None:
    """Whose gradient is laid out by the sizes and steps of the tensor, and asks for none of its elements."""

    def normalized(hidden: torch.Tensor) -> torch.Tensor:
        part = hidden[..., :4]
        part /= 2.0
        return part.softmax(-1)

    found = []
    with on_ort(graphs=1):
        for side in (compiled(normalized, dynamic=True), normalized):
            leaf = tensor(5, 3, 12).requires_grad_()
            hidden = leaf * 1.5
            result = side(hidden)
            (result.sin().sum() + hidden.sum()).backward()
            found.append(([leaf], (result.detach(), hidden.detach())))
    same_gradients(found[0][0], found[1][0])
    same_tree(found[0][1], found[1][1])


class Codebook(nn.Module):
    """Quantizes, and moves the codes towards what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("codes", torch.randn(5, 3, generator=seeded(0)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(-1)
        found = self.codes[nearest]
        with torch.no_grad():
            self.codes.mul_(0.9).index_add_(0, nearest, hidden, alpha=0.1)
        return (hidden * found.detach()).sum()


def test_the_backward_of_a_write_into_a_buffer_sees_what_was_there() -> None:
    same_as_eager(Codebook(), call(tensor()), call(tensor(seed=1)), graphs=1, repeat=1, python_ops=if_on_cuda("aten::argmin"))


class Averaged(nn.Module):
    """Gives a buffer, or its weight, other memory by `tensor.data = other`, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(3, 3), kind
        self.register_buffer("center", torch.ones(3))
        self.register_buffer("bank", torch.ones(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "before":
            self.center.data = self.center * 0.9 + x.detach().mean(0)
        if self.kind == "normalised":
            self.linear.weight.data = nn.functional.normalize(self.linear.weight.data, dim=1)
        if self.kind == "grows":
            self.bank.data = torch.cat([self.bank.data, x.detach()[:1]])
        if self.kind == "written":
            self.center.data = self.center.data * 0.5
            self.center.add_(x.detach().mean())
        y = ((self.linear(x) - self.bank.mean()) * self.center).square()
        if self.kind == "behind":  # the backward reads what it was
            self.center.data = self.center.data + y.detach().mean(0)
        if self.kind == "weight_behind":
            self.linear.weight.data = self.linear.weight.data * 0.9
        return y


@pytest.mark.parametrize("kind", ["before", "normalised", "grows", "written", "behind", "weight_behind"])
def test_other_memory_for_what_enters(kind: str) -> None:
    modules = []
    for side in (compiled, lambda module: module):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, gradients = Averaged(kind), []
        run = side(module)
        for step in range(3):
            module.zero_grad()
            x = tensor(seed=step).requires_grad_()
            run(x).sum().backward()
            gradients.append([one.grad.clone() for one in (*module.parameters(), x) if one.grad is not None])
        modules.append((dict(module.state_dict()), gradients))
    assert len(modules[0][1][0]) == 3
    torch.testing.assert_close(*modules)


def test_a_result_that_the_backward_computes_again() -> None:
    """ONNX Runtime must not let the backward read the one that the user has written to."""
    for function in (lambda x: x / (x.abs() + 1), nn.functional.normalize):
        gradients = []
        for side in (compiled, lambda function: function):
            torch._dynamo.reset()
            x = tensor().requires_grad_()
            y = side(function)(x)
            y.mul_(100)
            gradients.append(torch.autograd.grad(y, x, tensor(seed=1)))
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-3)
    assert ort_backend.report().graphs[-1].counts.backward == 1


def _under_no_grad(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        x.mul_(2)
    return x * y, x


def _behind_a_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    flat = x.view(-1)
    with torch.no_grad():
        x.tril_()
    return flat, y * 2


def _no_results_with_gradients(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        x.copy_(y)
    return y.detach() + 1


def _with_others(x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        x += 1
    y *= 3
    return (y + x.detach()).sum()


HIDDEN = {one.__name__.strip("_"): one for one in (_under_no_grad, _behind_a_view, _no_results_with_gradients, _with_others)}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_hidden_write_leaves_the_history_as_it_is(name: str) -> None:
    """What was computed outside is written to where no gradient is recorded: gradients go through it as before."""
    found = []
    with on_ort(graphs=1, idle=True):
        for function in (compiled(HIDDEN[name]), HIDDEN[name]):
            leaves = [twin(B), twin(B)]
            x, y = leaves[0] * 2, leaves[1] * 3
            results = function(x, y)
            parts = [x, y, *(results if isinstance(results, tuple) else (results,))]
            torch.autograd.backward([one.sum() * (i + 1) for i, one in enumerate(parts) if one.requires_grad])
            found.append(([one.detach() for one in parts], [leaf.grad for leaf in leaves], x.grad_fn.name(), x._version))
    same_tree(*found)


def _expanded(x: torch.Tensor) -> Any:
    flat = x.view(-1)
    made = flat.expand(2, *flat.shape)
    flat.add_(1)
    return made


def _turned(x: torch.Tensor) -> Any:
    turned = x.t()
    made = turned.unfold(0, 2, 1)
    turned[0] *= 2
    return made, turned.expand(3, *turned.shape)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("function", [_expanded, _turned])
def test_views_of_an_argument_written_to_through_a_view(function: Callable[..., Any], dynamic: bool, grad: bool) -> None:
    """The argument's new value is a view itself, of what the graph computes: with symbolic sizes AOTAutograd takes the strides from the results."""
    found = []
    with on_ort(graphs=1):
        for one in (compiled(function, dynamic=dynamic), function):
            leaf = tensor(4, 5).requires_grad_(grad)
            x = leaf * 2
            results = one(x)
            parts = list(results) if isinstance(results, tuple) else [results]
            assert all(part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for part in parts)
            if grad:
                torch.autograd.backward([(part * part).sum() for part in parts])
            found.append(([part.detach() for part in parts], [part.stride() for part in parts], x.detach(), leaf.grad))
    same_tree(*found)
