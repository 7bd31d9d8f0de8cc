"""What a forward returns has eager's structure, types, flags, values and aliases; gradients flow back through all of it."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, same_as_eager, same_gradients, same_module, same_tree, twin
from default_device import seeded
from torch import nn
from torch.utils import _pytree as pytree
from torch_version import VIEWS_WITHOUT_GRADIENTS
from transformers.modeling_outputs import BaseModelOutput


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*(shape or (2, 3)), generator=seeded(seed))
    return made.requires_grad_()


A, B = tensor(), tensor(seed=1)


class Pair(NamedTuple):
    first: Any
    second: Any


Late = namedtuple("Late", "left right")


@dataclasses.dataclass
class Answer:
    value: torch.Tensor
    label: str
    more: torch.Tensor | None = None


class Plain:
    """A class of the user's own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


STRUCTURES: dict[str, Any] = {
    "tensor": lambda x, y: x * y,
    "tuple_of_one": lambda x, y: (x * y,),
    "tuple": lambda x, y: (x * y, x + y),
    "list": lambda x, y: [x * y, x + y],
    "dict": lambda x, y: {"z": x * y, "a": x + y},
    "ordered_dict": lambda x, y: OrderedDict(z=x * y, a=x + y),
    "model_output": lambda x, y: BaseModelOutput(last_hidden_state=x * y, hidden_states=(x + y, x)),
    "named_tuple": lambda x, y: Pair(x * y, {"a": x + y}),
    "named_tuple_made_at_run_time": lambda x, y: Late(x * y, x + y),
    "nested": lambda x, y: {"z": [x * y, (x + y, {"k": x - y})], "a": (x.exp(),)},
    "tuple_of_tuples": lambda x, y: ((x * y, x + y), (x - y,), ()),
    "dict_of_tuples": lambda x, y: {"one": (x * y, x + y), "two": (x - y, y.exp())},
    "one_inside_two": lambda x, y: (x * y, (x + y, y.exp())),
    "dataclass": lambda x, y: Answer(x * y, "right", x + y),
    "dataclass_with_none": lambda x, y: Answer(x * y, "right"),
    "own_class": lambda x, y: Plain(x * y),
    "none_among_tensors": lambda x, y: (None, x * y, None, x + y, None),
    "none_in_dict": lambda x, y: {"a": None, "b": x * y},
    "python_values_among_tensors": lambda x, y: (x * y, 3, 2.5, "text", True, (1, x + y), torch.float32, x.shape),
    "twelve": lambda x, y: tuple(x * i + y for i in range(12)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_structure_of_a_result_is_kept(structure: str) -> None:
    same_as_eager(STRUCTURES[structure], call(A, B), graphs=1)


def test_the_order_of_many_results_is_kept() -> None:
    def function(x: torch.Tensor) -> Any:
        return tuple(x.detach() + i if i % 3 == 0 else x * i if i % 3 == 1 else (x > i) for i in range(12))

    same_as_eager(function, call(A), graphs=1)


def test_a_result_returned_twice_gets_the_sum_of_both_gradients() -> None:
    def function(x: torch.Tensor) -> Any:
        result = x.sin()
        return result, result, x.cos(), result

    same_as_eager(function, call(A), graphs=1)
    reference, own = twin(A), twin(A)
    with on_ort(graphs=1):
        for x, side in ((own, compiled(function)), (reference, function)):
            one, other, *_ = side(x)
            (one * 2 + other * 3).sum().backward()
            if x is own:
                assert one is other
    same_gradients([own], [reference])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_input_passed_through_is_the_input_itself(requires_grad: bool) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, y * 2, {"again": x}

    x = tensor().detach().requires_grad_(requires_grad)
    same_as_eager(function, call(x, B), graphs=1)
    with on_ort(graphs=1):
        same, double, nested = compiled(function)(x, B)
        assert same is x and nested["again"] is x
        (same.sum() + double.sum()).backward()
    assert (x.grad is not None) == requires_grad
    x.grad = None


def test_a_view_of_an_input_shares_its_memory() -> None:
    def function(x: torch.Tensor) -> Any:
        return x[0], x.t(), x.view(-1), x * 2

    same_as_eager(function, call(A), graphs=1)
    x = A.detach().clone()
    with on_ort(graphs=1):
        row, transposed, flat, double = compiled(function)(x)
    assert all(view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for view in (row, transposed, flat))
    assert double.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    x[0, 0] = 77.0
    assert row[0] == transposed[0, 0] == flat[0] == 77.0


def test_results_that_are_views_of_each_other_share_memory() -> None:
    def function(x: torch.Tensor) -> Any:
        base = x.exp()
        return base, base[0], base.t()

    same_as_eager(function, call(A), graphs=1)
    with on_ort(graphs=1):
        base, row, transposed = compiled(function)(A.detach())
    base[0, 0] = 77.0
    assert row[0] == transposed[0, 0] == 77.0


def windows(x: torch.Tensor) -> torch.Tensor:
    """Overlapping ones, as Longformer takes them of its masks."""
    return x.view(-1, 4, x.shape[1]).as_strided((x.shape[0] // 2 - 1, 4, x.shape[1]), (2 * x.shape[1], x.shape[1], 1))


def test_windows_that_overlap_share_memory_with_what_they_are_taken_from() -> None:
    def of_argument(x: torch.Tensor) -> Any:
        return x, windows(x)

    def of_result(x: torch.Tensor) -> Any:
        base = x.exp()
        return base, windows(base)

    calls = [call(tensor(rows, 3).detach()) for rows in (8, 12)]
    for function in (of_argument, of_result):
        for dynamic in (False, True):
            in_pytorch = ["aten::as_strided"] if dynamic else []
            same_as_eager(function, *calls, graphs=1 if dynamic else 2, train=False, python_ops=in_pytorch, dynamic=dynamic)
            with on_ort(graphs=1, python_ops=in_pytorch):
                base, view = compiled(function, dynamic=dynamic)(tensor(8, 3).detach())
            assert view.stride() == (6, 3, 1)
            base[2, 0] = 77.0
            assert view[0, 2, 0] == view[1, 0, 0] == 77.0


def test_a_loss_of_a_result_and_of_one_computed_from_it() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        hidden = (x * y).tanh()
        return hidden, hidden.exp().sum(), hidden * hidden.sum()

    same_as_eager(function, call(A, B), graphs=1)


class Heads(nn.Module):
    """A trunk and three heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        hidden = self.trunk(x).tanh()
        return [head(hidden) for head in self.heads]


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_heads_that_the_loss_does_not_use_get_no_gradient(used: list[int]) -> None:
    same_as_eager(Heads(), call(tensor()), graphs=1, keep=lambda heads: [heads[i] for i in used])


def test_inputs_reached_only_by_an_unused_result_get_no_gradient() -> None:
    same_as_eager(lambda x, y: (x.sin(), y.cos(), x * y), call(A, B), graphs=1, keep=lambda results: results[0])
    same_as_eager(lambda x, y: (x.sin(), y.cos(), x * y), call(A, B), graphs=1, keep=lambda results: results[2])


def test_the_gradients_of_a_result_belong_to_the_graph_that_made_it() -> None:
    """The second graph's first result is a view of what the first graph gave, and so comes from the first graph's node."""

    def first(x: torch.Tensor) -> Any:
        return x.sin(), x.exp()

    def second(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
        return x.view(-1), x * y, x * z

    for kept in ([0, 1], [0, 2], [1], [2]):
        inputs = [tensor(seed=seed) for seed in range(3)]
        theirs = twin(inputs)
        with on_ort(graphs=2):
            for one, other, arguments in ((first, second, theirs), (compiled(first), compiled(second), inputs)):
                results = other(one(arguments[0])[0], *arguments[1:])
                sum(results[i].sum() for i in kept).backward()
        same_gradients(inputs, theirs)


class Inside(nn.Module):
    """Returns what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("offset", torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x) + self.offset, self.linear.weight, self.offset


def test_a_parameter_or_buffer_returned_is_the_models_own() -> None:
    same_as_eager(Inside(), call(tensor()), graphs=1)
    model = Inside()
    reference, runner = copy.deepcopy(model), compiled(model)
    with on_ort(graphs=1, forwards=3):
        for _ in range(3):
            for side in (runner, reference):
                result, weight, offset = side(A.detach())
                if side is runner:
                    assert weight is model.linear.weight and offset.data_ptr() == model.offset.data_ptr()
                (result.sum() + weight.square().sum()).backward()
                del result, weight, offset
            same_module(model, reference)


def test_results_without_gradient_between_others_keep_their_flags() -> None:
    def function(x: torch.Tensor, i: torch.Tensor) -> Any:
        return x.sin(), x.argmax(1), i + 1, x.detach() * 2, x > 0, x.cos(), x.sum().detach()

    same_as_eager(function, call(A, torch.arange(3)), graphs=1, python_ops=if_on_cuda("aten::argmax"))


def test_results_and_tangents_survive_the_backward_bit_for_bit() -> None:
    # Every result here is something that the backward reads or could write over; `backward` in check.py compares the bits.
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        a = x @ w
        b = a.tanh()
        c = torch.softmax(b, -1)
        d = nn.functional.layer_norm(c, (4,))
        e = d.relu().view(-1)
        return a, b, c, d, e, e.sum(), c.transpose(0, 1)

    same_as_eager(function, call(tensor(5, 3), tensor(3, 4, seed=1)), graphs=1)


def test_a_result_that_is_a_gradients_operand_may_be_changed_when_the_backward_does_not_need_it() -> None:
    with on_ort(graphs=1):
        x, reference = twin(A), twin(A)
        for side, one in ((compiled(lambda x: x * 2), x), (lambda x: x * 2, reference)):
            result = side(one)
            result.add_(1)
            result.sum().backward()
    same_gradients([x], [reference])


def test_gradients_belong_to_the_user() -> None:
    with on_ort(graphs=1, backwards=2):
        step = compiled(lambda x: x.sin() * x)
        grads = []
        for _ in range(2):
            x = twin(A)
            step(x).sum().backward()
            grads.append(x.grad)
    first = grads[0].clone()
    grads[1].zero_()
    same_tree(grads[0], first)
    assert first.abs().sum() > 0


COPIES: dict[str, Any] = {
    "clone": lambda h: (h, h.clone()),
    "two_clones": lambda h: (h.clone(), h.clone(), h),
    "clone_of_view": lambda h: (h, h[0].clone(), h.t().contiguous()),
    "cast_there_and_back": lambda h: (h, h.double().float()),
    "times_one": lambda h: (h, h * 1, h + 0),
    "reshape_of_clone": lambda h: (h, h.clone().view(-1)),
    "copy": lambda h: (h, torch.empty_like(h).copy_(h)),
    "in_another_order": lambda h: (h, h.mT.contiguous().mT),
    "in_another_order_first": lambda h: (h.mT.contiguous().mT, h),
    "in_two_orders": lambda h: (h.mT.contiguous(), h.mT.contiguous().mT, h.mT.contiguous().mT, h),
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("kind", COPIES)
def test_copies_are_memory_of_their_own(kind: str, train: bool) -> None:
    def function(x: torch.Tensor) -> Any:
        return COPIES[kind](x.exp())

    x = A if train else A.detach()
    same_as_eager(function, call(x), graphs=1, train=train)
    with on_ort(graphs=1, idle=True):
        results = [result.detach() for result in compiled(function)(x)]
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(results)


@pytest.mark.parametrize("train", [True, False])
def test_a_copy_of_an_input_is_not_the_input(train: bool) -> None:
    x = A if train else A.detach()
    same_as_eager(lambda x: (x.clone(), x * 2, x.contiguous().clone()), call(x), graphs=1, train=train)
    with on_ort(graphs=1, idle=True):
        results = compiled(lambda x: (x.clone(), x * 2, x.to(torch.float32, copy=True)))(x)
    assert len({x.data_ptr(), *(result.data_ptr() for result in results)}) == 4


RELAID: dict[str, Any] = {
    "reshape": lambda x: (torch.ops.aten.view_copy(x, [-1]), torch.ops.aten.unsqueeze_copy(x, 0), torch.ops.aten.squeeze_copy(x)),
    "transpose_of_rows": lambda x: torch.ops.aten.permute_copy(x[:1], [1, 0]),
    "whole_slice": lambda x: (torch.ops.aten.slice_copy(x, 0, 0, 99), torch.ops.aten.expand_copy(x, [1, -1, -1])),
    "of_one": lambda x: (torch.cat([x]), torch.stack([x])[0].clone(), x.repeat(1, 1), nn.functional.pad(x, (0, 0))),
    "known_by_value": lambda x: (x[x == x], x.masked_select(x == x)),
    "halves": lambda x: (x.to(torch.bfloat16), x.to(torch.bfloat16, copy=True) + 0, (x > 0).clone()),
}


@pytest.mark.parametrize("kind", RELAID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_result_does_not_lie_in_an_input(kind: str, dtype: torch.dtype) -> None:
    """A session reads its inputs where they are, and may lose them behind its run."""
    x = A.detach().to(dtype)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        wanted, results = RELAID[kind](x), compiled(RELAID[kind])(x)
        for one, other in zip(pytree.tree_leaves(results), pytree.tree_leaves(wanted), strict=True):
            assert (one.untyped_storage().data_ptr() == x.data_ptr()) is (other.untyped_storage().data_ptr() == x.data_ptr())
        same_tree(results, wanted)
        x.zero_()
        same_tree(results, wanted)


def test_a_detached_result_beside_itself() -> None:
    def function(x: torch.Tensor) -> Any:
        hidden = x.sin()
        return hidden, hidden.detach(), hidden.detach() * 2

    same_as_eager(function, call(A), graphs=1)


def test_a_detached_result_before_itself() -> None:
    def function(x: torch.Tensor) -> Any:
        hidden = x.sin()
        return hidden.detach(), hidden

    same_as_eager(function, call(A), graphs=1)


@VIEWS_WITHOUT_GRADIENTS
def test_views_without_gradients_of_what_has_some() -> None:
    """Such a view requires gradients, as its base does, and passes none on: there is nothing for a backward to do."""

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        largest, index = (x * y).max(0)
        with torch.no_grad():
            return largest.view(-1), index

    found = []
    with on_ort(graphs=1):
        for side in (compiled(function), function):
            leaves = twin(A), twin(B)
            result, index = side(*leaves)
            assert result.requires_grad
            result.sum().backward()
            assert leaves[0].grad is None and leaves[1].grad is None
            found.append((result.detach(), index))
    same_tree(*found)


REPEATED = {
    "transposed": lambda x: (x.t() * 1).sin(),
    "complex": lambda x: x.to(torch.complex64).sin(),
    "booleans": lambda x: x.sin() > 0,
    "plain": lambda x: x.sin(),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", REPEATED)
def test_one_tensor_under_two_names(kind: str, grad: bool) -> None:
    """What `to` returns where there is nothing to do is its argument: a write to one result is a write to both."""

    def function(x: torch.Tensor) -> Any:
        made = REPEATED[kind](x)
        return made, made.to(made.dtype), x.sum()

    with on_ort(graphs=1, python_ops=None):
        one, other, total = compiled(function)(twin(A) if grad else A.detach().clone())
        if grad:
            total.backward()
    assert one is other
