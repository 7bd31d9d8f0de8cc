"""How a Function gets into a graph: the hook, the options, output shapes, guards, the ONNX nodes, the report."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from autograd_function.harness import leaves, same_as_eager
from behaviours.check import single_session
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch.autograd import Function

import ort_backend
from ort_backend import compiler
from ort_backend.lowering.functions import dynamo_hook


class Cube(Function):
    @staticmethod
    def forward(ctx, x, k=1.0):
        ctx.save_for_backward(x)
        ctx.k = k
        return x**3 * k

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g * ctx.k, None


def test_inline_traces_the_body() -> None:
    (graph,) = same_as_eager(lambda x: Cube.apply(x * 2), (4,), options={"autograd_functions": "inline"})
    assert (graph.functions, graph.inlined_functions) == (0, 1)
    (graph,) = same_as_eager(lambda x: Cube.apply(x * 2), (4,))
    assert (graph.functions, graph.inlined_functions) == (1, 0)
    assert "1 autograd.Functions, " in graph.summary()


def test_inline_is_counted_without_gradients_too() -> None:
    compiled = torch.compile(lambda x: Cube.apply(Cube.apply(x)), backend="ort_training", options={"autograd_functions": "inline"})
    with torch.no_grad():
        torch.testing.assert_close(compiled(torch.full((2,), 2.0)), torch.full((2,), 512.0))
    graph = ort_backend.report().graphs[-1]
    assert (graph.functions, graph.inlined_functions) == (0, 2)


def test_an_unknown_choice_is_an_error() -> None:
    with pytest.raises(Exception, match="autograd_functions"):
        torch.compile(lambda x: x * 2, backend="ort_training", options={"autograd_functions": "no"})(torch.ones(2))


@pytest.mark.parametrize("options", [{"strict": True}, {"verify": 2}], ids=["strict", "verify"])
def test_other_options(options: dict[str, object]) -> None:
    (graph,) = same_as_eager(lambda x: Cube.apply(x * 2), (4,), functions=1, options=options)
    assert all(one.is_choice for one in graph.outside)


def test_the_hook_is_ours_alone_and_can_be_undone() -> None:
    graphs = []

    def other(gm, example_inputs):
        graphs.append(gm)
        return gm.forward

    torch.compile(lambda x: Cube.apply(x), backend=other)(*leaves((3,)))
    assert any(node.target is torch.ops.higher_order.autograd_function_apply for node in graphs[0].graph.nodes)
    hooked = AutogradFunctionVariable.call_apply
    dynamo_hook.uninstall()
    try:
        assert AutogradFunctionVariable.call_apply is hooked.__wrapped__
    finally:
        assert dynamo_hook.install(lambda backend: backend is compiler.ort_training, compiler._autograd_functions)


def test_a_backend_in_a_partial() -> None:
    backend = functools.partial(ort_backend.ort_training, options={"opset": 19})
    before = len(ort_backend.report().graphs)
    torch.compile(lambda x: Cube.apply(x), backend=backend)(*leaves((3,))).sum().backward()
    assert ort_backend.report().graphs[before].functions == 1


def test_without_a_hook_the_traced_bodies_become_opaque(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    dynamo_hook.uninstall()
    monkeypatch.setattr(compiler, "HAS_HOOK", False)
    try:
        same_as_eager(lambda x: Cube.apply(x * 2, 0.5), (4, 3), sweep=[[(5, 3)], [(6, 3)]], functions=1, dynamic=True)
    finally:
        dynamo_hook.install(lambda backend: backend is compiler.ort_training, compiler._autograd_functions)
    assert "no place for the hook" in caplog.text


class Repeat(Function):
    """Runs on no fake tensors."""

    runs = 0

    @staticmethod
    def forward(ctx, x, k):
        Repeat.runs += 1
        ctx.k = k
        return torch.from_numpy(np.repeat(x.cpu().numpy(), k, 0)).to(x.device)

    @staticmethod
    def backward(ctx, g):
        return g.reshape(-1, ctx.k, g.shape[-1]).sum(1), None


SWEEP = [[(4, 2)], [(7, 2)]]


def test_shapes_that_follow_the_batch_are_found_by_running_it() -> None:
    graphs = same_as_eager(lambda x: Repeat.apply(x * 1, 2), (3, 2), sweep=SWEEP, functions=1, fullgraph=True, dynamic=True)
    assert len(graphs) == 1


def test_shapes_that_the_user_tells() -> None:
    class Told(Repeat):
        pass

    class Inferred(Repeat):
        @staticmethod
        def infer_shape(node, shapes, dtypes):
            return [[shapes[0][0] * 2, shapes[0][1]]], [dtypes[0]]

    @ort_backend.register_fake(Told)
    def _(x, k):
        return x.new_empty(x.shape[0] * k, x.shape[1])

    for function in (Told, Inferred):
        Repeat.runs = 0
        compiled = torch.compile(lambda x, f=function: f.apply(x * 1, 2), backend="ort_training", dynamic=True, fullgraph=True)
        for batch in (3, 4, 7):
            compiled(*leaves((batch, 2))).sum().backward()
        assert Repeat.runs == 3  # never while it was compiled


@pytest.mark.parametrize(
    ("source", "tells", "said"),
    [
        ("register_fake", lambda x: x, "failed: TypeError: .* takes 1 positional argument but 2 were given"),
        ("register_fake", lambda x, k: (2, 2), r"failed: TypeError: it returned \(2, 2\), and not a tensor"),
        ("register_fake", lambda x, k: [x], "failed: TypeError: it returned list"),
        ("infer_shape", lambda node, shapes: shapes, "failed: TypeError: .* takes 2 positional arguments but 3 were given"),
        ("infer_shape", lambda node, shapes, dtypes: (shapes, []), "failed: ValueError"),
    ],
    ids=["arguments", "shape", "list", "infer_shape, arguments", "no dtypes"],
)
def test_what_the_user_tells_fails_under_its_name(source: str, tells: Any, said: str) -> None:
    told = type("Told", (Repeat,), {"infer_shape": staticmethod(tells)} if source == "infer_shape" else {})
    if source == "register_fake":
        ort_backend.register_fake(told)(tells)
    with pytest.raises(Exception, match=rf"(?s)OrtBackendError: the {source} of autograd.Function .*Told {said}.*from user code.*told.apply\(x, 2\)"):
        torch.compile(lambda x: told.apply(x, 2), backend="ort_training")(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize(
    ("shape", "dtype", "said"), [((3, 2), torch.float32, r"\(3, 2\) and torch.float32"), ((4, 2), torch.float64, r"\(4, 2\) and torch.float64")]
)
def test_what_the_user_tells_is_not_so(shape: tuple[int, ...], dtype: torch.dtype, said: str) -> None:
    told = type("Told", (Repeat,), {})
    ort_backend.register_fake(told)(lambda x, k: x.new_empty(shape, dtype=dtype))
    with pytest.raises(
        RuntimeError, match=rf"Told.forward returned a tensor of shape \(4, 2\) .* but of shape {said} as its register_fake says(\n|$)"
    ):
        torch.compile(lambda x: told.apply(x, 2), backend="ort_training")(torch.ones(2, 2, requires_grad=True))


@pytest.mark.parametrize("function", [3, "mine::operator", torch.nn.Linear, Repeat.apply], ids=["int", "name", "module", "apply"])
def test_only_a_function_is_told_of(function: Any) -> None:
    with pytest.raises(TypeError, match="takes a subclass of torch.autograd.Function"):
        ort_backend.register_fake(function)


def test_what_tells_of_a_function_can_be_called() -> None:
    with pytest.raises(TypeError, match=r"register_fake\(Repeat\) decorates a function"):
        ort_backend.register_fake(Repeat)(3)  # type: ignore[arg-type]


class Windows(Function):
    """Functions of PyTorch that know symbolic sizes by their formulas in Python alone, padding, windows and a transform, in both directions."""

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        windows = torch.nn.functional.unfold(torch.nn.functional.pad(x, (1, 1)).unsqueeze(1).unsqueeze(1), (1, 3))
        return torch.fft.rfft(windows.sum(1)).abs()

    @staticmethod
    def backward(ctx, g):
        pictures = torch.fft.irfft(torch.complex(g, -g), n=ctx.shape[1]).unsqueeze(1).unsqueeze(1)
        return torch.nn.functional.interpolate(pictures, size=(1, ctx.shape[1]), mode="bilinear").view(ctx.shape)


def test_sizes_stay_symbolic_when_it_runs_on_fake_tensors() -> None:
    graphs = same_as_eager(lambda x: Windows.apply(x * 1), (3, 8), sweep=[[(4, 8)], [(7, 8)]], functions=1, fullgraph=True)
    assert len(graphs) == 2, "the first size, then any"


def test_sizes_stay_symbolic_in_what_the_user_tells() -> None:
    class Told(Windows):
        pass

    ort_backend.register_fake(Told)(lambda x: torch.nn.functional.unfold(x.unsqueeze(1).unsqueeze(1), (1, 4)).sum(1))
    graphs = same_as_eager(lambda x: Told.apply(x * 1), (3, 8), sweep=[[(4, 8)], [(7, 8)]], functions=1, fullgraph=True)
    assert len(graphs) == 2, "the first size, then any"


def test_unknown_shapes_break_the_graph_and_say_what_to_write() -> None:
    class Select(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x[x > 0]

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return torch.zeros_like(x).masked_scatter(x > 0, g)

    with pytest.warns(UserWarning, match=r"Select.*register_fake.*infer_shape"):
        same_as_eager(lambda x: Select.apply(x * 2) * 2, (6,))


def test_floats_that_change_compile_once_more_and_stay_exact() -> None:
    compiled = torch.compile(lambda x, k: Cube.apply(x, k), backend="ort_training")
    before = len(ort_backend.report().graphs)
    for i in range(6):
        x, k = torch.ones(3, requires_grad=True), 0.1 * i + 0.05
        y = compiled(x, k)
        y.sum().backward()
        assert torch.equal(y, torch.ones(3) * k)
        assert torch.equal(x.grad, torch.ones(3) * 3 * k)
    assert len(ort_backend.report().graphs) - before == 2


def test_one_compile_for_a_sweep_of_batch_sizes() -> None:
    sweep = [[(batch, 3)] for batch in (2, 5, 9)]
    graphs = same_as_eager(lambda x: Cube.apply(x * 2, x.shape[0]).mean(), (4, 3), sweep=sweep, functions=1, dynamic=True)
    assert len(graphs) <= 2


def test_a_size_of_a_result_comes_from_no_tangent() -> None:
    """The tangent of `rows` has the size that the forward needs for its product."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = Cube.apply(torch.cat([x, x], 1) * 0.1, 0.5)
        return rows, x @ rows.mT

    same_as_eager(program, (2, 4, 3), sweep=[[(3, 5, 3)], [(4, 6, 2)]], functions=1, dynamic=True, fullgraph=True)


def test_a_class_defined_anew_and_values_that_change() -> None:
    factor = 2.0

    def define(own):
        class Cell(Function):
            @staticmethod
            def forward(ctx, x):
                return x * own * factor

            @staticmethod
            def backward(ctx, g):
                return g * own * factor

        return Cell

    cell = define(1.0)
    compiled = torch.compile(lambda x: cell.apply(x), backend="ort_training")
    x = torch.ones(1, requires_grad=True)
    assert compiled(x).item() == 2
    cell = define(5.0)
    assert compiled(x).item() == 10
    factor = 3.0
    assert compiled(x).item() == 15


@single_session
def test_the_nodes_say_what_they_are(tmp_path: pathlib.Path) -> None:
    class Mixed(Function):
        @staticmethod
        def forward(ctx, x, i, f, b, ints, floats, bools, text, mixed, things):
            ctx.save_for_backward(x)
            return x * f

        @staticmethod
        def backward(ctx, g):
            return g * 1.5, *[None] * 9

    same_as_eager(
        lambda x: Mixed.apply(x * 1, 3, 1.5, True, (1, 2), (0.5,), (True, False), "text", (1, 2.0), {"a": 1}),
        (3,),
        options={"dump_dir": str(tmp_path)},
    )
    (file,) = [file for file in tmp_path.glob("*.onnx") if "optimized" not in file.name]
    nodes = {node.op_type: node for node in onnx.load(file).graph.node}
    found = {a.name: onnx.helper.get_attribute_value(a) for a in nodes["PythonOp"].attribute}
    assert found["input_convention"] == b"dccccccccc" + b"d"  # the last keeps the order
    assert (found["input_int_scalars"], found["input_int_scalar_positions"]) == ([3], [1])
    assert (found["input_float_scalars"], found["input_float_scalar_positions"]) == ([1.5], [2])
    assert (found["input_bool_scalars"], found["input_bool_scalar_positions"]) == ([1], [3])
    assert (found["input_int_tuples"], found["input_int_tuple_positions"], found["input_int_tuple_begins"]) == ([1, 2], [4], [0])
    assert (found["input_float_tuples"], found["input_float_tuple_positions"]) == ([0.5], [5])
    assert (found["input_bool_tuples"], found["input_bool_tuple_positions"]) == ([1, 0], [6])
    assert found["input_pointer_scalar_positions"] == [7, 8, 9]
    assert found["training_mode"] == 1
    assert b"Mixed(tensor, 3, 1.5, True, (1, 2), (0.5,), (True, False), 'text', (1, 2.0), dict)" in found["comment"]
    backward = {a.name: onnx.helper.get_attribute_value(a) for a in nodes["PythonOpGrad"].attribute}
    assert backward["func_name"] == found["func_name"]
    assert b"test_the_nodes_say_what_they_are" in found["func_name"]


class Scaled(Function):
    """By a function of the user's, or by what an object of the user's holds."""

    @staticmethod
    def forward(ctx, scale, x):
        ctx.scale = scale
        return scale(x)

    @staticmethod
    def backward(ctx, g):
        return None, ctx.scale(g)


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    __call__ = times


def _graphs_of_steps(scales: Iterable[Any]) -> list[ort_backend.GraphReport]:
    """Those of a program that gets each of the scales, with gradients that are as large as the scale's factor."""
    compiled = torch.compile(lambda scale, x: Scaled.apply(scale, x.sin()).cos(), backend="ort_training")
    before = len(ort_backend.report().graphs)
    for scale in scales:
        (x,) = leaves((4,))
        (y,) = leaves((4,))
        compiled(scale, x).sum().backward()
        scale(y.sin()).cos().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        del scale
    return ort_backend.report().graphs[before:]


def test_a_method_of_one_object_is_one_graph() -> None:
    scale = Scale(3.0)
    (graph,) = _graphs_of_steps(scale.times for _ in range(4))
    assert graph.functions == 1


def test_methods_of_two_objects_are_two_graphs() -> None:
    scales = [Scale(3.0), Scale(5.0)]
    graphs = _graphs_of_steps(scale.times for scale in (*scales, *scales))
    assert [graph.functions for graph in graphs] == [1, 1]


@pytest.mark.parametrize("make", [Scale, lambda factor: Scale(factor).times, lambda factor: lambda x: x * factor], ids=["object", "method", "lambda"])
def test_what_gets_a_new_object_at_every_call_breaks_the_graph(make: Callable[[float], Any]) -> None:
    with pytest.warns(UserWarning, match="a new object at every call"):
        graphs = _graphs_of_steps(make(1.0 + i) for i in range(20))
    assert [graph.functions for graph in graphs[:4]] == [1, 1, 1, 1]
    others = [graph for graph in graphs[4:] if graph.kind == "training"]
    assert [graph.functions for graph in others] == [0, 0]  # those of the parts before the call, and behind it
    assert [graph.counts.forward for graph in others] == [16, 16]


def test_objects_of_programs_before_a_reset_do_not_count() -> None:
    for i in range(6):
        torch._dynamo.reset()
        (graph,) = _graphs_of_steps([Scale(1.0 + i)])
        assert graph.functions == 1
