"""Every way of handing arguments to a forward gives eager's results and gradients."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import OrderedDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from behaviours.check import call, compiled, if_on_cuda, on_ort, same_as_eager, same_module, same_tree
from default_device import seeded
from torch import nn


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*(shape or (2, 3)), generator=seeded(seed))
    return made.requires_grad_()


A, B, C, D = (tensor(seed=seed) for seed in range(4))


class Calls(nn.Module):
    """One forward with every kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, a: Any, b: Any = None, /, c: Any = 2.0, *rest: Any, d: Any = None, e: int = 1, **more: Any) -> torch.Tensor:
        result = a * self.weight * c
        if b is not None:
            result = result + b.exp()
        for i, one in enumerate(rest):
            result = result + (i + 2) * one.sin()
        if d is not None:
            result = result - d * e
        for name, one in more.items():
            result = result + len(name) * one.cos()
        return result


CALLS = {
    "first_only": call(A),
    "two_positional": call(A, B),
    "three_positional": call(A, B, C),
    "number_for_a_tensor": call(A, B, 3.0),
    "none_then_number": call(A, None, 3),
    "one_of_rest": call(A, B, C, D),
    "two_of_rest": call(A, B, C, D, A),
    "the_same_tensor_four_times": call(A, A, A, A),
    "keyword_of_positional": call(A, c=C),
    "keyword_after_none": call(A, None, c=C),
    "keyword_only_tensor": call(A, d=D),
    "keyword_only_both": call(A, d=D, e=4),
    "keyword_only_swapped": call(A, e=4, d=D),
    "number_without_its_tensor": call(A, e=7),
    "one_more": call(A, extra=B),
    "two_more": call(A, extra=B, other=C),
    "two_more_swapped": call(A, other=C, extra=B),
    "more_and_keyword_only": call(A, d=B, extra=C),
    "rest_and_keyword_only": call(A, B, C, D, d=A),
    "rest_and_more": call(A, B, C, D, extra=A),
    "rest_more_and_keyword_only": call(A, B, C, D, A, d=B, e=2, extra=C, other=D),
    "none_everywhere": call(A, None, 1.0, d=None),
    "python_floats": call(A, None, 0.5, d=B, e=-1),
    "bool_for_a_number": call(A, None, True),
    "the_same_tensor_as_keyword": call(A, d=A, extra=A),
}


@pytest.mark.parametrize("form", CALLS)
def test_every_form_of_call_binds_its_arguments_as_python_does(form: str) -> None:
    same_as_eager(Calls(), CALLS[form], graphs=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: x * 2 + y.exp() * z,
        lambda x, y=A, z=B: x * 2 + y.exp() * z,
        lambda *, x, y, z: x * 2 + y.exp() * z,
        lambda z, x, *, y: x * 2 + y.exp() * z,
        lambda **all: all["x"] * 2 + all["y"].exp() * all["z"],
    ],
    ids=["plain", "defaults", "keyword_only", "mixed", "catch_all"],
)
@pytest.mark.parametrize("order", ["xyz", "zyx", "yzx"])
def test_keywords_may_come_in_any_order(function: Any, order: str) -> None:
    values = {"x": A, "y": B, "z": C}
    same_as_eager(function, call(**{name: values[name] for name in order}), graphs=1, repeat=1)


def test_each_pattern_of_none_arguments_gets_one_graph_and_finds_it_again() -> None:
    def function(a: Any = None, b: Any = None, c: Any = None, d: Any = None, e: Any = None) -> Any:
        return sum(((i + 1) * one).tanh() for i, one in enumerate((a, b, c, d, e)) if one is not None)

    given = (A, B, C, D, torch.randn_like(A))
    patterns = [call(*(one if bits >> i & 1 else None for i, one in enumerate(given))) for bits in range(1, 21)]
    with torch._dynamo.config.patch(recompile_limit=32):
        ran = same_as_eager(function, *patterns, *reversed(patterns), graphs=20, repeat=1)
    assert all(graph.counts.forward == 2 for graph in ran.graphs)


def test_the_number_of_arguments_may_change_between_calls() -> None:
    ran = same_as_eager(Calls(), call(A), call(A, B, C, D), call(A, d=D), call(A, B, C, D, A, A), call(A), graphs=4, repeat=1)
    assert ran.graphs[0].counts.forward == 2


def test_the_forward_keeps_its_signature_and_documentation() -> None:
    def scaled(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
        """Scales."""
        return x * factor

    with on_ort(graphs=1):
        function = compiled(scaled)
        same_tree(function(x=A, factor=3.0).detach(), (A * 3.0).detach())
        function(A, factor=3.0).sum().backward()
    assert inspect.signature(function) == inspect.signature(scaled)
    assert function.__doc__ == "Scales."
    model = Calls()
    expected = inspect.signature(model.forward)
    model.compile(backend="ort_training", fullgraph=True)
    assert inspect.signature(model.forward) == expected


@pytest.mark.parametrize("number", [0, 1, -3, 2**24 + 1, 2**40 + 1, -(2**62) + 1])
def test_python_ints_are_exact(number: int) -> None:
    whole = torch.arange(3)
    same_as_eager(lambda x, n: (x + n, x * n, n), call(whole, number), graphs=1, train=False)


@pytest.mark.parametrize("number", [0.5, 1.2e10, 1e-7, 0.1, -3.0, float("inf")])
def test_python_floats_are_exact(number: float) -> None:
    double = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64, requires_grad=True)
    same_as_eager(lambda x, f: (x * f, f), call(double, number), graphs=1, rtol=1e-15, atol=0.0)


def test_python_numbers_that_change_are_never_stale() -> None:
    with torch._dynamo.config.patch(recompile_limit=16):
        same_as_eager(lambda x, n: x * n + n, *(call(A, n) for n in (2, 3, 5, 2**25 + 1, 7)), graphs=range(1, 4), repeat=1)
        same_as_eager(lambda x, f: x * f + f, *(call(A, f) for f in (0.1, 0.2, 1.2e10, 0.3)), graphs=range(1, 5), repeat=1)


def test_a_bool_argument_that_flips_has_a_graph_for_each_value() -> None:
    def function(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return x.sin() if flag else x.cos() * 2

    ran = same_as_eager(function, *(call(A, flag) for flag in (True, False, True, False)), graphs=2, repeat=1)
    assert [graph.counts.forward for graph in ran.graphs] == [2, 2]


def test_a_string_argument_chooses_the_branch() -> None:
    def function(x: torch.Tensor, mode: str = "sin") -> torch.Tensor:
        return {"sin": torch.sin, "cos": torch.cos, "exp": torch.exp}[mode](x)

    same_as_eager(function, call(A), call(A, "cos"), call(A, mode="exp"), call(A, "sin"), graphs=3, repeat=1)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Batch:
    value: torch.Tensor
    scale: float
    unused: torch.Tensor | None = None


Dynamic = namedtuple("Dynamic", "left right")

CONTAINERS: dict[str, tuple[Any, Any]] = {
    "list": (lambda c: c[0] * c[1].sin(), [A, B]),
    "list_with_none_and_unused": (lambda c: c[0] * c[3].sin(), [A, None, C, B]),
    "tuple": (lambda c: c[0] * c[1].sin(), (A, B)),
    "dict": (lambda c: c["x"] * c["y"].sin(), {"y": B, "x": A, "unused": C, "none": None}),
    "ordered_dict": (lambda c: c["x"] * c["y"].sin(), OrderedDict(y=B, x=A)),
    "nested": (lambda c: c["x"][0] * c["x"][1]["z"].sin() + c["w"][1], {"x": [A, {"z": B}], "w": (None, C)}),
    "named_tuple": (lambda c: c.first * c.second.sin(), Pair(A, B)),
    "named_tuple_made_at_run_time": (lambda c: c.left * c.right.sin(), Dynamic(A, B)),
    "named_tuple_of_containers": (lambda c: c.first["x"] * c.second[1].sin(), Pair({"x": A}, [None, B])),
    "dataclass": (lambda c: c.value * c.scale, Batch(A, 3.0, B)),
    "dataclass_in_list": (lambda c: c[0].value * c[1].scale, [Batch(A, 3.0), Batch(B, 2.0)]),
    "the_same_tensor_twice": (lambda c: c[0] * c[1].sin(), [A, A]),
    "empty_beside_a_tensor": (lambda c: c[2] + len(c[0]) + len(c[1]), ([], {}, A)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_of_tensors_are_taken_and_gradients_reach_what_is_used(kind: str) -> None:
    function, container = CONTAINERS[kind]
    same_as_eager(function, call(container), graphs=1)


def test_dict_keywords_and_a_buffer_together() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)
            self.register_buffer("offset", torch.arange(3.0))

        def forward(self, batch: dict[str, torch.Tensor], *, scale: float = 1.0, extra: torch.Tensor | None = None) -> torch.Tensor:
            result = self.linear(batch["x"]) * scale + self.offset
            return result if extra is None else result * extra

    same_as_eager(Model(), call({"x": A}), call({"x": B, "y": C}, scale=2.0, extra=D), graphs=2)


def _strided(kind: str) -> torch.Tensor:
    base = torch.randn(4, 6, generator=seeded(1))
    return {
        "transposed": base.t(),
        "sliced": base[:, 1:5:2],
        "offset": base[2:],
        "expanded": base[:1].expand(5, 6),
        "selected": base[:, 2],
        "flipped_strides": base.as_strided((3, 2), (1, 6), 2),
        "channels_last": base.view(1, 4, 3, 2).contiguous(memory_format=torch.channels_last),
        "permuted": base.view(2, 2, 6).permute(2, 0, 1),
    }[kind].detach()


@pytest.mark.parametrize("kind", ["transposed", "sliced", "offset", "expanded", "selected", "flipped_strides", "channels_last", "permuted"])
def test_inputs_need_not_be_contiguous(kind: str) -> None:
    same_as_eager(lambda x: (x.sin() * 2, x.sum(0)), call(_strided(kind).requires_grad_()), graphs=1)


def test_non_contiguous_views_of_one_storage_do_not_mix() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        left, right = x[:, :2], x[:, 2:].t()
        return left * 3 + right.t().sin()

    same_as_eager(function, call(tensor(3, 4)), graphs=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integer_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> Any:
        return x + x, x * 2, x > 3, x[1:], x.flip(0)

    same_as_eager(function, call(torch.arange(6).to(dtype)), graphs=1, train=False)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_tensors_pass_through(dtype: torch.dtype) -> None:
    same_as_eager(lambda x, y: (x.view(2, 3), y * 2), call(torch.arange(6).to(dtype), A), graphs=1)


def test_bool_tensors_in_and_out() -> None:
    def function(mask: torch.Tensor, x: torch.Tensor) -> Any:
        return mask, ~mask, mask & (x > 0), torch.where(mask, x, -x), mask.any(), mask.sum()

    same_as_eager(function, call(torch.tensor([[True, False, True], [False, False, True]]), A), graphs=1, python_ops=if_on_cuda("aten::any"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_floats_of_other_widths_in_and_out(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> Any:
        return (x @ w).relu(), x.sum(), x.tanh() * 2

    x, w = tensor(4, 3).detach().to(dtype).requires_grad_(), tensor(3, 5).detach().to(dtype).requires_grad_()
    rtol, atol = {torch.float64: (1e-10, 1e-12), torch.float16: (5e-3, 5e-3), torch.bfloat16: (3e-2, 3e-2)}[dtype]
    in_pytorch = if_on_cuda("aten::le.Scalar", "aten::threshold_backward") if dtype == torch.bfloat16 else ()
    same_as_eager(function, call(x, w), graphs=1, rtol=rtol, atol=atol, python_ops=in_pytorch)


def test_mixed_dtypes_promote_as_in_eager() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, i: torch.Tensor) -> Any:
        return a + b, a * i, b / 3, i / 2, i + 0.5, torch.where(i > 1, a, b)

    same_as_eager(function, call(A, B.detach().double().requires_grad_(), torch.arange(3)), graphs=1)


def test_scalar_tensors_beside_others() -> None:
    def function(x: torch.Tensor, scale: torch.Tensor, count: torch.Tensor) -> Any:
        return x * scale + count, scale * count, x.sum() * scale

    same_as_eager(function, call(A, torch.tensor(2.5, requires_grad=True), torch.tensor(3)), graphs=1)


def test_an_in_place_change_of_an_input_reaches_the_caller() -> None:
    def function(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter += 1
        return x * counter

    same_as_eager(function, call(A, torch.zeros(3)), call(A, torch.tensor(3.0)), graphs=2)


@pytest.mark.cuda
def test_a_cpu_counter_beside_cuda_tensors() -> None:
    def function(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter += 1
        return x * counter

    same_as_eager(function, call(A.detach().cuda().requires_grad_(), torch.tensor(3.0)), graphs=1)


class Constants(nn.Module):
    """No parameters, no inputs."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device = device

    def forward(self) -> Any:
        return torch.arange(4, device=self.device), torch.full((2, 2), 0.5, device=self.device), torch.ones(3).cumsum(0)


@pytest.mark.parametrize("device", [None, "cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_a_model_without_parameters_and_inputs(device: str | None) -> None:
    same_as_eager(Constants(None if device is None else torch.device(device)), call(), graphs=1, train=False)


def test_a_model_without_parameters() -> None:
    same_as_eager(nn.Sequential(nn.Tanh(), nn.Flatten()), call(tensor(2, 3, 4)), graphs=1)


class Adjustable(nn.Module):
    """Attributes and methods of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = 1.0
        self.steps: list[int] = []

    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.twice(self.linear(x)) * self.scale


def test_attributes_and_methods_set_after_compiling_take_effect() -> None:
    model = Adjustable()
    reference = copy.deepcopy(model)
    step = compiled(model)
    with on_ort(graphs=range(3, 5)):
        for name, value in (("scale", 1.0), ("scale", 3.0), ("twice", torch.sin), ("linear", nn.Linear(3, 3, bias=False))):
            setattr(step, name, value)
            setattr(reference, name, copy.deepcopy(value))
            results = [side(A.detach()) for side in (step, reference)]
            same_tree(*results)
            for result in results:
                result.sum().backward()
            same_module(model, reference)
    assert step.twice is torch.sin and step.scale == 3.0 and step.steps == []
