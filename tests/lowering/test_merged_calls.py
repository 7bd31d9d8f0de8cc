"""Calls of PyTorch that become one node. The graphs are interpreted here, as such nodes run on a GPU only."""

from __future__ import annotations

import itertools
import pickle
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ort_backend import graph_pickle
from ort_backend.lowering.builder import Builder
from ort_backend.lowering.calls_on_device.bridged_calls import bridge_calls
from ort_backend.lowering.calls_on_device.counters import count_together
from ort_backend.lowering.calls_on_device.merged_calls import merge_calls
from ort_backend.lowering.calls_on_device.parameter_casts import cast_together
from ort_backend.lowering.calls_on_device.picture_order import put_channels_last
from ort_backend.lowering.calls_on_device.viewed_calls import view_in_calls
from ort_backend.lowering.dtypes import carrier, to_torch
from ort_backend.lowering.python_op import PythonCall, callable_of, write_python_op
from ort_backend.target import TRITON

aten = torch.ops.aten

# Nodes between calls, as PyTorch has them.
_KERNELS: dict[str, Callable[..., Any]] = {
    "Neg": torch.neg,
    "Add": torch.add,
    "Relu": torch.relu,
    "Cast": lambda x: x,
    "YieldOp": lambda *given: given[0].clone(),
}


class Graph:
    """A graph as it is lowered for CUDA, and what its values are."""

    def __init__(self) -> None:
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": 18, "com.microsoft": 1, "org.pytorch.aten": 1}, name="graph")
        self.op = Builder(self.graph, "cuda", call_type=TRITON).op
        self.calls: list[PythonCall] = []
        self.given: dict[ir.Value, Tensor] = {}
        self.fakes: dict[ir.Value, Tensor] = {}
        self.said: list[str] = []

    def input(self, tensor: Tensor) -> ir.Value:
        value = ir.Value(name=f"x{len(self.given)}")
        self.graph.inputs.append(value)
        self.given[value] = tensor
        return self._typed(value, tensor)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of PyTorch, of tensors that lie in memory as they are."""
        fakes = [self.fakes[one] for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, ir.Value)]
        result = target(*torch.utils._pytree.tree_map_only(ir.Value, self.fakes.__getitem__, args), **kwargs)
        values, call = write_python_op(self.op, target, str(target), args, kwargs, result, fakes)
        self.calls.append(call)
        results = result if isinstance(result, (tuple, list)) else [result]
        made = [None if value is None else self._typed(value, tensor) for value, tensor in zip(values, results, strict=True)]
        return made if isinstance(result, (tuple, list)) else made[0]

    def kernel(self, op_type: str, *values: ir.Value) -> ir.Value:
        """A node of ONNX Runtime's own."""
        domain = {"_domain": "com.microsoft", "_version": 1, "_outputs": 1} if op_type == "YieldOp" else {}
        made = getattr(self.op, op_type)(*values, **domain)
        return self._typed(made[0] if isinstance(made, (list, tuple)) else made, _KERNELS[op_type](*(self.fakes[value] for value in values)))

    def cast(self, value: ir.Value, dtype: torch.dtype) -> ir.Value:
        node = ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(carrier(dtype).dtype))], outputs=[ir.Value(name=f"cast{len(self.graph)}")])
        self.graph.append(node)
        return self._typed(node.outputs[0], self.fakes[value].to(dtype))

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        node = ir.Node("", "Reshape", [value], outputs=[ir.Value(name=f"reshaped{len(self.graph)}")])
        self.graph.append(node)
        return self._typed(node.outputs[0], self.fakes[value].reshape(sizes))

    def split(self, value: ir.Value, *lengths: int) -> list[ir.Value]:
        """Along the last dimension."""
        parts = self.fakes[value].split(lengths, -1)
        outputs = [ir.Value(name=f"part{len(self.graph)}_{i}") for i in range(len(parts))]
        self.graph.append(ir.Node("", "Split", [value], [ir.AttrInt64("axis", -1)], outputs=outputs))
        return [self._typed(one, part) for one, part in zip(outputs, parts, strict=True)]

    def rewritten(self, *outputs: ir.Value, takes_parts: Sequence[str] = (), pictures: bool = False, bridges: bool = False) -> list[str]:
        """Runs before and behind the passes, with the same results: the nodes that are left, calls by what they call."""
        self.graph.outputs.extend(outputs)
        names, before = [output.name for output in outputs], self.run()
        views = view_in_calls(self.graph, {call.name for call in self.calls if call.title in takes_parts})
        if pictures:
            self.calls = put_channels_last(self.graph, self.calls, views)
        if bridges:
            made, said = bridge_calls(self.graph, self.calls)
            self.calls, self.said = [*self.calls, *made], [one.operator for one in said]
        self.calls = merge_calls(self.graph, self.calls, views)
        assert [output.name for output in self.graph.outputs] == names
        for one, other in zip(self.run(), before, strict=True):
            assert one.is_contiguous()
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        titles = {call.name: call.title.replace("aten.", "").replace("aten::", "").replace(".default", "") for call in self.calls}
        return [titles.get(callable_of(node) or "", node.op_type) for node in self.graph if node.op_type != "Constant"]

    def run(self) -> list[Tensor]:
        """Each node once all that it takes is there, as the graph says."""
        calls = {call.name: call for call in self.calls}
        values = dict(self.given)
        for node in self.graph:
            given = [values[value] for value in node.inputs if value is not None and value in values]
            name = callable_of(node)
            if name is not None:
                function = calls[name].function
                assert function is not None and not calls[name].allocates and all(one.is_contiguous() for one in given)
                made: Sequence[Tensor] = function(*given)
            elif node.op_type == "Reshape":
                made = [given[0].reshape(_sizes(node.outputs[0]))]
            elif node.op_type == "Transpose":
                made = [given[0].permute(*node.attributes["perm"].as_ints()).contiguous()]
            elif node.op_type == "Split":
                made = [one.contiguous() for one in given[0].split([_sizes(output)[-1] for output in node.outputs], -1)]
            elif node.op_type == "Constant":
                continue
            elif node.op_type == "Cast" and "to" in node.attributes:
                made = [given[0].to(to_torch(ir.DataType(node.attributes["to"].as_int())))]
            else:
                made = [_KERNELS[node.op_type](*given)]
            for value, tensor in zip(node.outputs, made, strict=True):
                known = (
                    [] if value.shape is None else [(size, is_there) for size, is_there in zip(value.shape, tensor.shape) if isinstance(size, int)]
                )
                assert all(size == is_there for size, is_there in known), node
                values[value] = tensor
        return [values[output] for output in self.graph.outputs]

    def _typed(self, value: ir.Value, tensor: Any) -> ir.Value:
        self.fakes[value] = tensor
        if isinstance(tensor, Tensor):
            value.shape, value.type = ir.Shape(list(tensor.shape)), ir.TensorType(carrier(tensor.dtype).dtype)
        return value


def _sizes(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [int(size) for size in value.shape]  # type: ignore[arg-type]


def _randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator("cpu").manual_seed(len(sizes)), device="cpu")


def test_a_perceptron() -> None:
    made = Graph()
    x, w, b, v, c = (made.input(_randn(*sizes)) for sizes in ((2, 3, 8), (8, 16), (16,), (16, 8), (8,)))
    hidden = made.call(aten.addmm.default, b, made.reshape(x, 6, 8), w)
    active = made.call(aten.gelu.default, made.reshape(hidden, 2, 3, 16), approximate="tanh")
    out = made.reshape(made.call(aten.addmm.default, c, made.reshape(active, 6, 16), v), 2, 3, 8)
    assert made.rewritten(made.kernel("Neg", out), hidden) == ["addmm+gelu+addmm", "Neg"]


def test_pickling_asks_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    made = Graph()
    x, y = made.input(_randn(3, 4)), made.input(_randn(4, 5))
    product = made.call(aten.mm.default, made.call(aten.exp.default, x), y)
    assert made.rewritten(product) == ["exp+mm"]
    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    function = pickle.loads(graph_pickle.dumps(made.calls[0].function))
    assert "run" not in asked
    torch.testing.assert_close(function(*made.given.values())[0], made.given[x].exp() @ made.given[y])


def test_what_a_kernel_between_makes_is_waited_for() -> None:
    made = Graph()
    x, w, b = (made.input(_randn(*sizes)) for sizes in ((4, 4), (4, 4), (4,)))
    first = made.call(aten.addmm.default, b, x, w)
    second = made.call(aten.addmm.default, b, made.kernel("Neg", first), w)
    third = made.call(aten.gelu.default, first)
    assert made.rewritten(second, third) == ["addmm", "Neg", "addmm+gelu"]


def test_groups_that_need_each_other() -> None:
    """The last call could join either of the first two, but for what lies between."""
    made = Graph()
    x = made.input(_randn(4, 4))
    first = made.call(aten.gelu.default, x)
    other = made.call(aten.silu.default, made.kernel("Neg", first))
    both = made.call(aten.cat.default, [made.kernel("Relu", other), first])
    assert made.rewritten(both) == ["gelu", "Neg", "silu", "Relu", "cat"]


def test_both_sides_of_the_yield() -> None:
    made = Graph()
    x = made.input(_randn(4, 4))
    out = made.call(aten.gelu.default, x)
    grad = made.kernel("YieldOp", out)
    assert made.rewritten(made.call(aten.gelu_backward.default, grad, x)) == ["gelu", "YieldOp", "gelu_backward"]


def test_so_many_and_no_more() -> None:
    made = Graph()
    value = made.input(_randn(4, 4))
    for _ in range(11):
        value = made.call(aten.gelu.default, value)
    assert made.rewritten(value) == ["+".join(["gelu"] * 9), "gelu+gelu"]


def test_more_in_front_of_the_yield() -> None:
    """There the inputs of a node are not what a backward would give up."""
    made = Graph()
    value = made.input(_randn(4, 4))
    for _ in range(20):
        value = made.call(aten.gelu.default, value)
    grad = made.kernel("YieldOp", value)
    for _ in range(10):
        grad = made.call(aten.silu.default, grad)
    assert made.rewritten(grad) == ["+".join(["gelu"] * 20), "YieldOp", "+".join(["silu"] * 9), "silu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lies_between_calls_is_one(dtype: torch.dtype) -> None:
    """As in a residual network, both sides; what the casts make are gradients."""
    made = Graph()
    x, w = made.input(_randn(4, 4).to(dtype)), made.input(_randn(4, 4).to(dtype))
    first = made.call(aten.mm.default, x, w)
    active = made.kernel("Relu", first)
    second = made.call(aten.mm.default, active, w)
    both = made.kernel("Relu", made.kernel("Add", second, x))
    out = made.call(aten.mm.default, both, w)
    grad = made.kernel("YieldOp", out)
    of_both = made.call(aten.mm.default, grad, w)
    of_weight = made.call(aten.mm.default, both, of_both)
    other = torch.float32 if dtype is torch.bfloat16 else torch.bfloat16
    results = made.cast(of_weight, other), made.kernel("Neg", of_both)
    assert made.rewritten(*results, bridges=True) == ["mm+relu+mm+add+relu+mm", "YieldOp", "mm+mm+to", "Neg"]
    assert made.said == ["aten::relu", "aten::add", "aten::relu", "aten::to"]


def test_what_stays_between_calls() -> None:
    """What leads to no call, comes from none, has integers or constants, and a cast of what others read."""
    made = Graph()
    x, n = made.input(_randn(4, 4)), made.input(torch.arange(16).view(4, 4))
    called = made.call(aten.gelu.default, made.kernel("Relu", x))
    counted = made.call(aten.cumsum.default, made.kernel("Add", made.call(aten.cumsum.default, n, 0), n), 1)
    grad = made.kernel("YieldOp", made.kernel("Relu", called))
    behind = made.call(aten.silu.default, made.kernel("Add", grad, called))
    results = counted, made.cast(behind, torch.bfloat16), made.kernel("Neg", behind)
    assert "add" not in "".join(made.rewritten(*results, bridges=True)) and made.said == []


def test_results_that_nothing_reads_are_not_handed_over() -> None:
    made = Graph()
    x, w = made.input(_randn(2, 3, 8, 8)), made.input(_randn(4, 3, 3, 3))
    grad = made.input(_randn(2, 4, 6, 6))
    settings = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    _, of_weight, _ = made.call(aten.convolution_backward.default, grad, x, w, [4], *settings, [True, True, True])
    assert made.rewritten(of_weight) == ["convolution_backward"]
    assert len(made.graph[-1].outputs) == 1


def test_an_operator_that_may_return_its_argument() -> None:
    """Its result is copied: ONNX Runtime may use the argument's memory again."""
    made = Graph()
    x = made.input(_randn(4, 4))
    same = made.call(aten.view.default, x, [4, 4])
    assert made.rewritten(made.call(aten.gelu.default, same), same) == ["view+gelu"]
    assert made.run()[1].data_ptr() != made.given[x].data_ptr()


def test_parts_of_a_tensor() -> None:
    """Attention takes queries, keys and values where the product left them."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    made = Graph()
    x, w, b = (made.input(_randn(*sizes)) for sizes in ((6, 8), (8, 24), (24,)))
    product = made.reshape(made.call(aten.addmm.default, b, x, w), 2, 3, 24)
    heads = [made.reshape(part, 2, 3, 2, 4) for part in made.split(product, 8, 8, 8)]
    out = made.call(attention, *heads)
    again = made.call(attention, *reversed(heads))
    title = str(attention)
    assert made.rewritten(made.kernel("Neg", out), again, takes_parts=[title]) == [f"addmm+{title}+{title}", "Neg"]


def test_a_part_that_a_kernel_reads_stays() -> None:
    made = Graph()
    parts = made.split(made.input(_randn(2, 8)), 4, 4)
    out = made.call(torch.add, *parts)
    assert made.rewritten(out, made.kernel("Neg", parts[0]), takes_parts=[str(torch.add)]) == ["Split", str(torch.add), "Neg"]


def test_numbers_and_truth() -> None:
    made = Graph()
    x = made.input(_randn(4, 4))
    is_large = made.call(aten.gt.Scalar, x, 0.5)
    out = made.call(aten.masked_fill.Scalar, x, is_large, 2.0)
    (node,) = [one for one in made.rewritten(out) if "gt" in one]
    assert node == "gt.Scalar"  # a Cast to bool stands between


def _block(made: Graph, x: ir.Value, *, channels: int, groups: int = 1) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
    w = made.input(_randn(channels, _sizes(x)[1] // groups, 3, 3))
    scale, shift, mean, var = (made.input(torch.rand(channels, device="cpu") + 0.5) for _ in range(4))
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], groups)
    convolved = made.call(aten.convolution.default, x, w, None, *settings)
    normal, *statistics = made.call(aten._native_batch_norm_legit_functional.default, convolved, scale, shift, mean, var, True, 0.1, 1e-5)
    return w, normal, statistics


def test_pictures_between_convolutions_lie_with_their_channels_last() -> None:
    made = Graph()
    x = made.input(_randn(2, 3, 8, 8))
    _, first, _ = _block(made, x, channels=80)
    active = made.kernel("Relu", first)
    w, second, statistics = _block(made, active, channels=80)
    total = made.kernel("Relu", made.kernel("Add", second, active))
    pooled, positions = made.call(aten.max_pool2d_with_indices.default, total, [2, 2], [2, 2])
    mean = made.call(aten.mean.dim, pooled, [2, 3])
    grad = made.call(aten.threshold_backward.default, made.kernel("Neg", total), total, 0)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    of_image, of_weight, _ = made.call(aten.convolution_backward.default, grad, active, w, None, *settings, [True, True, False])
    left = made.rewritten(mean, statistics[0], of_weight, made.kernel("Neg", of_image), positions, pictures=True)
    assert left.count("Transpose") == 3  # of the image, of its gradient, of the positions
    assert len(left) < 20


def test_pictures_that_stay_as_they_are() -> None:
    few, grouped, alone = Graph(), Graph(), Graph()
    for made, channels, groups in ((few, 16, 1), (grouped, 80, 2)):
        _, first, _ = _block(made, made.input(_randn(2, 4, 8, 8)), channels=channels)
        _, second, _ = _block(made, made.kernel("Relu", first), channels=channels, groups=groups)
        assert "Transpose" not in made.rewritten(second, pictures=True)
    _, only, _ = _block(alone, alone.input(_randn(2, 80, 8, 8)), channels=80)  # more is copied around it than in it
    assert "Transpose" not in alone.rewritten(only, pictures=True)


def test_a_module_of_many_calls_has_names_for_all() -> None:
    made = Graph()
    x = made.input(_randn(3, 5))
    values = [made.call(aten.gelu.default, x)]
    for one, other in itertools.pairwise([aten.gelu.default, aten.silu.default, aten.gelu.default]):
        values += [made.call(one, values[-1]), made.call(other, values[0])]
    expected = nn.functional.gelu(made.given[x])
    assert made.rewritten(*values) == ["gelu+gelu+silu+silu+gelu"]
    torch.testing.assert_close(made.run()[0], expected)


def test_parameters_are_cast_together() -> None:
    """Those with as many numbers that the next one is aligned, once each, and in training alone."""

    def graph(*, trains: bool) -> tuple[Graph, list[ir.Value]]:
        made = Graph()
        parameters = [made.input(_randn(*sizes)) for sizes in ((64, 2), (128,), (2, 3, 64), (64,), (3,))]
        cast = [made.cast(one, torch.bfloat16) for one in (*parameters, parameters[0])]
        if trains:
            made.kernel("YieldOp", cast[0])
        return made, [made.kernel("Neg", one) for one in cast]

    made, outputs = graph(trains=True)
    made.graph.outputs.extend(outputs)
    before = made.run()
    calls, outside = cast_together(made.graph)
    made.calls += calls
    for one, other in zip(made.run(), before, strict=True):
        assert one.dtype is torch.bfloat16 and torch.equal(one, other)
    assert [one.operator for one in outside] == ["aten::_foreach_copy_"]
    assert [node.op_type for node in made.graph].count("Cast") == 1  # that of three numbers
    (node,) = [node for node in made.graph if callable_of(node) is not None]
    assert len(node.inputs) == len(node.outputs) == 4
    assert cast_together(graph(trains=False)[0].graph) == ([], [])


def test_counters_are_counted_together() -> None:
    """Single numbers that come in, where 1 is added; four of them at least."""
    made = Graph()
    numbers = [made.input(torch.tensor(i, device="cpu")) for i in range(6)]
    one, two = (made.op.Constant(value=ir.tensor(i, dtype=ir.DataType.INT64)) for i in (1, 2))
    made.given |= {one: torch.tensor(1), two: torch.tensor(2)}
    made.fakes |= {one: torch.tensor(1), two: torch.tensor(2)}
    counted = [made.kernel("Add", number, two if i == 5 else one) for i, number in enumerate(numbers)]
    twice = made.kernel("Add", counted[0], one)
    made.graph.outputs.extend([*counted, twice])
    calls, outside = count_together(made.graph)
    made.calls += calls
    assert made.run() == [1, 2, 3, 4, 5, 7, 2]
    assert [one.operator for one in outside] == ["aten::_foreach_add"]
    assert [node.op_type for node in made.graph if node.op_type != "Constant"] == [TRITON, "Add", "Add"]

    few = Graph()
    one = few.op.Constant(value=ir.tensor(1, dtype=ir.DataType.INT64))
    few.fakes[one] = torch.tensor(1)
    few.graph.outputs.extend(few.kernel("Add", few.input(torch.tensor(i, device="cpu")), one) for i in range(3))
    assert count_together(few.graph) == ([], [])
