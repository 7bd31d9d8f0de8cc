"""Writes to parts of large arguments: what is written where, what else shares that memory, and that the whole is not computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from behaviours.check import WHOLE_GRAPHS
from default_device import seeded
from ops.harness import trace
from torch import Tensor, nn

import ort_backend
from ort_backend.lowering.passes import write_back

aten = torch.ops.aten

pytestmark = pytest.mark.cpu_only(reason="arguments on the CPU alone are written to")

ROWS, WIDTH = 512, 160  # more than 65,536 numbers


def _slice(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + len(y)] = y
    return y * 2


def _columns_of_rows(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[: 4 * len(y)][at : at + len(y), 3:7] = y[:, 3:7]
    return y @ cache[: at + len(y), :].sum(0, keepdim=True).T


def _row(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at] = y[0]
    return y + cache[at + 1]


def _from_the_end(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[-at - 2 : -at] = y[:2]
    return y + cache[:-at].sum(0) + cache[: ROWS - at - 1].mean(0)


def _at_fixed_places_from_the_end(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[-4:-2] = y[:2]
    other[:, -4:-2] = y[:1, -4:-2]
    return y + cache[:-2].cos().sum(0) + cache[:-1].mean(0) + other[:, :-2].sum() + other[:-3, :].mean(0)


def _repeated(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + 3] = y[:1]
    other[at : at + 3, :3] = y[:3, :1].double()
    return y + cache[: at + 3].sum(0) + cache[: at + 3, :40].sum() + other[: at + 4, :5].sum() + other[:, :3].mean()


def _filled(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + 2] = 7.0
    return y + cache[: at + 3].mean(0)


def _twice(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + len(y)] = y
    cache[at + 1 : at + 3, ::2] += 1
    return y * cache[: at + len(y)].sum(0)


def _reads_the_old_one(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    scores = y @ cache.clone().T
    cache[at : at + len(y)] = y
    return scores


def _returns_the_old_one(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    rows, whole = cache[at : at + len(y)].clone(), cache.clone()
    cache[at : at + len(y)] = y
    cache[torch.tensor([1, 4])] = torch.tensor(5.0)
    return torch.cat((rows * 1, whole.view_as(other), cache[:9] + y[:1]))


def _reads_all(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache.index_copy_(0, index, y[: len(index)])
    return y @ cache.T


def _reads_all_in_many_ways(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    """What computes in the memory of what it reads would change the cache."""
    cache.index_copy_(0, index, y[: len(index)])
    cache[:, at] = y[0, 0]
    cache.index_put_((index,), y[: len(index)], accumulate=True)
    other[at : at + 2, 3:9] = y[:2, 3:9]
    normalized = cache.clone().softmax(-1).sum(0) + cache.view(2, -1, WIDTH).relu().sum((0, 1))
    return y * normalized + other.clone().tanh_().sum(0) + other.exp().mean()


def _copied_to_the_other(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + len(y)] = y
    other.copy_(cache)
    return y * 2


def _reads_the_sizes(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache.index_copy_(0, index, y[: len(index)])
    return y + torch.zeros_like(cache)[:1]


def _reads_all_and_returns_a_copy(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at : at + len(y)] = y
    return torch.cat([cache.clone()]) * 1.0 if at == 0 else cache.clone().view_as(other) + 0 * cache.mean()


def _added(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache.index_put_((index,), y[: len(index)], accumulate=True)
    return y * 3


def _of_each_other(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[:8] = other[8:16]
    other[8:16] = y[:1]
    return y * 2


def _of_itself(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[1:9] = cache[:8].clone()
    return y * 2


def _whole_other(cache: Tensor, other: Tensor, y: Tensor, at: int, index: Tensor) -> Tensor:
    cache[at:4] = other[:1, :]
    other.mul_(2)
    return y * 2


PROGRAMS = [
    _slice,
    _columns_of_rows,
    _row,
    _from_the_end,
    _at_fixed_places_from_the_end,
    _repeated,
    _filled,
    _twice,
    _reads_the_old_one,
    _returns_the_old_one,
    _reads_all,
    _reads_all_in_many_ways,
    _copied_to_the_other,
    _reads_the_sizes,
    _reads_all_and_returns_a_copy,
    _added,
    _of_each_other,
    _of_itself,
    _whole_other,
]


def _run(program: Callable[..., Any], with_gradient: bool, transposed: bool) -> list[Any]:
    generator = seeded(0)
    cache, other = (torch.randn(WIDTH, ROWS, generator=generator).T for _ in range(2))
    if not transposed:
        cache, other = cache.contiguous(), other.contiguous()
    seen: list[Any] = []
    for at in (2, 3, 5):
        x = torch.randn(6, WIDTH, generator=generator, requires_grad=with_gradient)
        result = program(cache, other, x, at, torch.tensor([at, at + 7]))
        seen += [result.detach(), cache.clone(), other.clone()]
        if with_gradient:
            result.square().sum().backward(retain_graph=True)
            result.sum().backward()
            seen.append(x.grad)
    return seen


def _without_gradient(program: Callable[..., Any]) -> Callable[..., Any]:
    """The program, whose writes no gradient goes through."""

    def run(cache: Tensor, other: Tensor, x: Tensor, at: int, index: Tensor) -> Any:
        y = x.tanh()
        with torch.no_grad():
            program(cache, other, y.detach(), at, index)
        return program(cache.clone(), other.clone(), y, at, index)

    return run


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("dynamic", [False, None])
@pytest.mark.parametrize("program", PROGRAMS)
def test_equals_eager(program: Callable[..., Any], dynamic: bool | None, with_gradient: bool, transposed: bool) -> None:
    torch._dynamo.reset()
    function = _without_gradient(program) if with_gradient else program
    compiled = torch.compile(function, backend="ort_training", fullgraph=True, dynamic=dynamic)
    # Gradients are sums of numbers up to a thousand, which may cancel.
    tolerance = 1e-3 if with_gradient else 1e-4
    torch.testing.assert_close(_run(compiled, with_gradient, transposed), _run(function, with_gradient, transposed), rtol=tolerance, atol=tolerance)


def _followed(program: Callable[..., Any], memory: list[int]) -> list[Any]:
    """Autograd follows the writes: what is computed from the arguments afterwards has a gradient, too; the next call gets them without."""
    generator = seeded(0)
    cache, other = (torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))
    seen: list[Any] = []
    for at in (2, 3, 5):
        x = torch.randn(6, WIDTH, generator=generator, requires_grad=True)
        memory += [cache.data_ptr(), other.data_ptr()]
        result = program(cache, other, x.tanh(), at, torch.tensor([at, at + 7]))
        seen += [result.detach().clone(), cache.detach().clone(), other.detach().clone(), cache.requires_grad, other.requires_grad]
        result.square().sum().backward(retain_graph=True)
        (result.sum() + (cache * 0.1).exp().sum() + other.sin().sum()).backward(retain_graph=True)
        if cache.requires_grad:
            cache.square().sum().backward(retain_graph=True)
        cache, other = cache.detach(), other.detach()
        result.sum().backward()
        seen.append(x.grad)
    return seen


@pytest.mark.parametrize("program", PROGRAMS)
def test_autograd_follows(program: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    memory: list[int] = []
    compiled = torch.compile(program, backend="ort_training", fullgraph=True)
    torch.testing.assert_close(_followed(compiled, memory), _followed(program, []), rtol=1e-4, atol=2e-3)
    assert len(set(memory)) == 2


def test_where_autograd_follows_a_slice_is_written_alone() -> None:
    torch._dynamo.reset()
    _followed(torch.compile(_slice, backend="ort_training", fullgraph=True, dynamic=False), memory=[])
    found = {one.operator for one in ort_backend.report().graphs[-1].outside}
    assert BACK in found and "ort_training::write_parts" not in found


BACK, HERE, ROWS_HERE = "ort_training::write_back", "ort_training::write_here", "ort_training::index_copy_here"
# Of fixed places a part that was not written to is read of the old tensor (`passes.read_parts`), by a session that may run later than the write.
BETWEEN_AT_FIXED_PLACES: dict[Any, set[str]] = {_columns_of_rows: set(), _row: set(), _twice: {BACK}}
WRITES = {BACK, HERE, ROWS_HERE, "ort_training::index_put_here", "aten::index_copy_", "aten::index_put_"}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("program", "operators", "between"),
    [
        (_slice, {BACK}, {BACK}),
        (_columns_of_rows, {HERE}, {BACK}),
        (_row, {HERE}, {BACK}),
        (_reads_all, {ROWS_HERE}, set()),
        (_reads_all_in_many_ways, {HERE, ROWS_HERE, "ort_training::index_put_here"}, {BACK}),
        (_reads_all_and_returns_a_copy, {BACK}, {BACK}),
        (_added, {"aten::index_put_"}, set()),
        (_of_each_other, {BACK}, set()),  # of one alone
        (_whole_other, set(), set()),
        (_reads_the_old_one, {BACK}, set()),
        (_twice, {BACK}, set()),
    ],
)
def test_which_are_written(program: Callable[..., Any], operators: set[str], between: set[str], dynamic: bool) -> None:
    """`between`: where sessions are several, which may run before or behind a write."""
    torch._dynamo.reset()
    _run(torch.compile(program, backend="ort_training", fullgraph=True, dynamic=dynamic), with_gradient=False, transposed=False)
    found = {one.operator for one in ort_backend.report().graphs[-1].outside}
    if not dynamic:
        between = BETWEEN_AT_FIXED_PLACES.get(program, between)
    assert found & WRITES == (operators if WHOLE_GRAPHS else between)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_every_dtype(dtype: torch.dtype) -> None:
    def write(cache: Tensor, x: Tensor, index: Tensor) -> Tensor:
        cache.index_copy_(0, index, x)
        cache[5] = x[0]
        cache[300:, 1:9] = x[:1, 1:9]
        return cache.float().sum(0)

    torch._dynamo.reset()
    compiled = torch.compile(write, backend="ort_training", fullgraph=True)
    caches = [(torch.randn(ROWS, WIDTH, generator=seeded(0)) * 3).to(dtype) for _ in range(2)]
    for at in (2, 3):
        x, index = (torch.randn(2, WIDTH, generator=seeded(at)) * 3).to(dtype), torch.tensor([at, at + 7])
        torch.testing.assert_close(compiled(caches[0], x, index), write(caches[1], x, index), rtol=1e-3, atol=1e-2)
        assert torch.equal(*caches)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_parts_of_results(with_gradient: bool) -> None:
    def write(cache: Tensor, x: Tensor, at: int) -> tuple[Tensor, ...]:
        y, z = x * 2, x.tanh()
        with torch.no_grad():
            cache[at : at + 2] = y[:2]
            cache[at + 3 : at + 5] = z.view(2, 3, WIDTH)[0, :2]
            cache[at + 9] = z[5]
        return x + 1, z, y, y.view(-1), z[1:]

    torch._dynamo.reset()
    compiled = torch.compile(write, backend="ort_training", fullgraph=True, dynamic=False)
    for at in (3, 4):
        x = torch.randn(6, WIDTH, generator=seeded(at), requires_grad=with_gradient)
        caches = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
        torch.testing.assert_close(compiled(caches[0], x, at), write(caches[1], x, at))
        torch.testing.assert_close(*caches)


@pytest.mark.parametrize("kind", ["copy", "copies", "itself", "view", "kept", "old", "views of the old one"])
def test_what_shares_memory(kind: str) -> None:
    torch._dynamo.reset()

    class Model(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(ROWS, WIDTH))

        def forward(self, x: Tensor) -> Any:
            old = self.cache[:4].clone(), self.cache.clone()
            views = self.cache.clone()[:4].view(-1), self.cache.clone().view(WIDTH, ROWS)
            self.cache[1:3] = x
            if kind == "views of the old one":
                return views
            if kind == "old":
                return old
            if kind == "kept":
                self.cache = self.cache.to(x)
                return x * 2, self.cache[:2].sum()
            if kind == "copies":
                return self.cache.relu().sum(), torch.cat([self.cache.clone()]).view(-1, WIDTH)
            return x * 2, {"copy": self.cache.clone(), "itself": self.cache, "view": self.cache[:4]}[kind]

    model = Model()
    compiled = torch.compile(model, backend="ort_training", fullgraph=True)
    for value in (3.0, 4.0):
        before = model.cache
        was = before.clone()
        with torch.no_grad():
            part, result = compiled(torch.full((2, WIDTH), value))
        assert model.cache is before and (before[1:3] == value).all() and not before[0].any() and not before[3:].any()
        if kind == "kept":
            assert result == value * WIDTH
        elif "old" in kind:
            assert torch.equal(part.view(4, -1), was[:4]) and torch.equal(result.view_as(was), was) and result.data_ptr() != before.data_ptr()
        else:
            torch.testing.assert_close(result, before[: len(result)])
            assert (result.data_ptr() == before.data_ptr()) == (kind not in ("copy", "copies"))


def test_slices_are_taken_before_the_write() -> None:
    def attend(cache: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        new = aten.slice_scatter(cache, aten.slice_scatter(aten.slice(cache, 0, 0, 2), keys, 1, 3, 5), 0, 0, 2)
        return new[:2, :5], new[:3, :, :7], new[:2, :4], new[:1], new[:2, 3:9]

    given = [torch.zeros(3, ROWS, WIDTH), torch.ones(2, 2, WIDTH)]
    module = trace(attend, given)
    (whole,) = (node for node in module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default) if len(node.users) > 1)
    write_back.read_less(module.graph, whole)
    module.recompile()
    for result, expected in zip(module(*given), attend(*given), strict=True):
        torch.testing.assert_close(result, expected)
    left = {user.args[1:] for user in whole.users if user.users}  # what has half of the part, or begins elsewhere
    assert left == {(0, 0, 1)} and len(module.graph.find_nodes(op="call_function", target=aten.slice_scatter.default)) > 4
