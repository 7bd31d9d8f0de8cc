"""`options={"fx_passes": [...], "onnx_passes": [...]}`: the user's own passes over what is lowered, and over the ONNX graph."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from behaviours.check import single_session
from onnxscript import rewriter
from onnxscript.rewriter import pattern
from torch import fx, nn

import ort_backend
from ort_backend import CompileOptions, OptionError, PassError, graph_report

aten = torch.ops.aten


class Net(nn.Module):
    """Two layers around a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.activation(self.first(x)))

    activation = staticmethod(torch.relu)


class SummedNet(Net):
    """Likewise, around a sum of three."""

    @staticmethod
    def activation(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + x.sin() + x.cos())


def gradients_of(model: nn.Module, x: torch.Tensor, call: Any = None) -> list[torch.Tensor]:
    """The output, and the gradients of a loss: of the input, of the parameters."""
    x = x.clone().requires_grad_()
    result = (model if call is None else call)(x)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), [x, *model.parameters()])]


def assert_same(model: nn.Module, reference: nn.Module, x: torch.Tensor, **options: Any) -> None:
    """`model` through the backend with `options` equals `reference` in eager."""
    graph_report.clear()
    compiled = torch.compile(model, backend="ort_training", options=options)
    torch.testing.assert_close(gradients_of(model, x, compiled), gradients_of(reference, x))
    (graph,) = ort_backend.report().graphs
    assert graph.kind == "training" and graph.python_ops == 0 and graph.onnx_nodes > 0


def like(model: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """A model of another class with the same parameters."""
    made = kind()
    made.load_state_dict(model.state_dict())
    return made


def relu_to_softplus(module: fx.GraphModule) -> None:
    """Replaces an operator and its gradient: `relu` and `threshold_backward` by `softplus` and its gradient."""
    for node in list(module.graph.nodes):
        if node.target is aten.relu.default:
            with module.graph.inserting_before(node):
                new = module.graph.call_function(aten.softplus.default, node.args)
            argument = node.args[0]
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)
        elif node.target is aten.threshold_backward.default:
            with module.graph.inserting_before(node):
                new = module.graph.call_function(aten.softplus_backward.default, (node.args[0], argument, 1, 20))
            node.replace_all_uses_with(new)
            module.graph.erase_node(node)


class SoftplusNet(Net):
    """Likewise, around a softplus."""

    activation = staticmethod(nn.functional.softplus)


def test_an_fx_pass_replaces_an_operator_and_its_gradient() -> None:
    model = Net()
    assert_same(model, like(model, SoftplusNet), torch.randn(5, 4), fx_passes=[relu_to_softplus])


def test_an_fx_pass_may_return_another_module_or_graph() -> None:
    def another_module(module: fx.GraphModule) -> fx.GraphModule:
        module = copy.copy(module)
        relu_to_softplus(module)
        return module

    def another_graph(module: fx.GraphModule) -> fx.Graph:
        graph = fx.Graph()
        graph.output(graph.graph_copy(module.graph, {}))
        return graph

    model = Net()
    assert_same(model, like(model, SoftplusNet), torch.randn(5, 4), fx_passes=[another_graph, another_module])


def test_shapes_and_dtypes_behind_a_new_node_are_worked_out() -> None:
    class Halved(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, :1]], dim=0).exp().sum(0)

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:, :3]], dim=0).exp().sum(0)[:1]

    def keep_three(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            if node.target is aten.slice.Tensor:
                node.args = (*node.args[:3], 3)
                del node.meta["val"]
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            first = module.graph.call_function(aten.slice.Tensor, (output.args[0][0], 0, 0, 1))
        output.args = ((first, *output.args[0][1:]),)

    x = torch.randn(5, 4)
    compiled = torch.compile(Halved(), backend="ort_training", options={"fx_passes": [keep_three]})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), Whole()(x))


def test_the_forward_alone_goes_through_the_passes_too() -> None:
    model, x = Net(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="ort_training", options={"fx_passes": [relu_to_softplus]})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), like(model, SoftplusNet)(x))


def test_sizes_may_be_symbolic() -> None:
    model = Net()
    reference = like(model, SoftplusNet)
    compiled = torch.compile(model, backend="ort_training", dynamic=True, options={"fx_passes": [relu_to_softplus]})
    for rows in (5, 3, 7):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(gradients_of(model, x, compiled), gradients_of(reference, x))


def one_sum() -> pattern.RewriteRuleSet:
    """`a + b + c` as `Sum(a, b, c)`: a rule of onnxscript's rewriter."""

    def sums(op: Any, a: Any, b: Any, c: Any) -> Any:
        return op.Add(op.Add(a, b), c)

    def one(op: Any, a: Any, b: Any, c: Any) -> Any:
        return op.Sum(a, b, c)

    return pattern.RewriteRuleSet([pattern.RewriteRule(sums, one)])


def dumped_operators(folder: Path) -> set[str]:
    """The ONNX operators of the dumped graph."""
    (dumped,) = [file for file in folder.glob("*.onnx") if "optimized" not in file.name]
    return {node.op_type for node in ir.load(dumped).graph}


@single_session
def test_an_onnx_pass_applies_a_rule_of_onnxscripts_rewriter(tmp_path: Path) -> None:
    def use_sum(model: ir.Model) -> ir.Model:
        return rewriter.rewrite(model, pattern_rewrite_rules=one_sum())

    model = SummedNet()
    assert_same(model, copy.deepcopy(model), torch.randn(5, 4), onnx_passes=[use_sum], dump_dir=str(tmp_path))
    assert "Sum" in dumped_operators(tmp_path)


@single_session
def test_an_onnx_pass_that_is_an_onnx_ir_pass(tmp_path: Path) -> None:
    class UseSum(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            return ir.passes.PassResult(model, one_sum().apply_to_model(model) > 0)

    model = SummedNet()
    assert_same(model, copy.deepcopy(model), torch.randn(5, 4), onnx_passes=[UseSum()], dump_dir=str(tmp_path))
    assert "Sum" in dumped_operators(tmp_path)


def test_an_onnx_pass_changes_what_runs() -> None:
    def relu_to_sigmoid(model: ir.Model) -> None:
        for node in model.graph:
            if node.op_type == "Relu":
                node.op_type = "Sigmoid"

    class SigmoidNet(Net):
        activation = staticmethod(torch.sigmoid)

    model, x = Net(), torch.randn(5, 4)
    compiled = torch.compile(model, backend="ort_training", options={"onnx_passes": [relu_to_sigmoid]})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), like(model, SigmoidNet)(x))


@single_session
def test_passes_run_in_order_and_are_on_the_report(tmp_path: Path) -> None:
    ran: list[str] = []

    def first(module: fx.GraphModule) -> None:
        ran.append("first")

    def second(module: fx.GraphModule) -> None:
        ran.append("second")

    def third(model: ir.Model) -> None:
        ran.append("third")
        next(node for node in model.graph if node.op_type == "Relu").name = "seen_by_third"

    model = Net()
    assert_same(model, copy.deepcopy(model), torch.randn(5, 4), fx_passes=[first, second], onnx_passes=[third], dump_dir=str(tmp_path))
    assert ran == ["first", "second", "third"]
    (graph,) = ort_backend.report().graphs
    assert [name.rsplit(".", 1)[-1] for name in graph.passes] == ran
    assert all(name in str(ort_backend.report()).replace("\n", "") for name in ("first", "second", "third"))
    (dumped,) = [file for file in tmp_path.glob("*.onnx") if "optimized" not in file.name]
    assert "seen_by_third" in {node.name for node in ir.load(dumped).graph}


@single_session
def test_a_backward_that_a_pass_makes_read_an_output_is_protected_from_writes() -> None:
    # exp's gradient reads exp's result, which is handed out. Before the pass, the backward has a copy of its own.
    class Exp(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.exp(), x.sin()

    def sine_of_the_output(model: ir.Model) -> None:
        passed, product = False, None
        stop = next(node for node in model.graph if node.op_type == "YieldOp")
        for node in model.graph:
            passed = passed or node.op_type == "YieldOp"
            if passed and node.op_type == "Cos":
                product = node
        assert product is not None
        product.replace_input_with(0, stop.inputs[0])

    x = torch.randn(4, requires_grad=True)
    compiled = torch.compile(Exp(), backend="ort_training", options={"onnx_passes": [sine_of_the_output]})
    one, other = compiled(x)
    (gradient,) = torch.autograd.grad([one, other], x, [torch.zeros(4), torch.ones(4)], retain_graph=True)
    torch.testing.assert_close(gradient, x.exp().cos())
    one.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.sum().backward()


@pytest.mark.parametrize("name", ["fx_passes", "onnx_passes"])
@pytest.mark.parametrize("given", [["not a function"], [None], print, "text", 3])
def test_what_is_no_list_of_functions_is_refused(name: str, given: Any) -> None:
    with pytest.raises(OptionError, match=name):
        CompileOptions(**{name: given})


def test_a_pass_that_raises_is_named() -> None:
    def faulty(graph: Any) -> None:
        raise KeyError("nothing here")

    for name in ("fx_passes", "onnx_passes"):
        torch._dynamo.reset()
        compiled = torch.compile(Net(), backend="ort_training", options={name: [faulty]})
        with pytest.raises(Exception, match="(?s)pass '.*faulty' failed: KeyError: 'nothing here'") as caught:
            compiled(torch.randn(2, 4))
        assert isinstance(getattr(caught.value, "inner_exception", caught.value), PassError)


def _drop_an_input(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output((graph.placeholder("only"),))
    return graph


def _leave_a_dangling_node(module: fx.GraphModule) -> fx.Graph:
    graph = fx.Graph()
    graph.output((next(iter(module.graph.nodes)),))
    return graph


def _unknown_arguments(module: fx.GraphModule) -> None:
    node = next(node for node in module.graph.nodes if node.target is aten.relu.default)
    with module.graph.inserting_after(node):
        node.replace_all_uses_with(new := module.graph.call_function(aten.view.default, (node, [-7])), lambda user: user is not new)


def _sum_the_result(module: fx.GraphModule) -> None:
    output = module.graph.output_node()
    first = output.args[0][0]  # type: ignore[index, union-attr]
    with module.graph.inserting_after(first):  # type: ignore[arg-type]
        output.replace_input_with(first, module.graph.call_function(aten.sum.default, (first,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("fx_passes", _sum_the_result, r"changed result 0 of the graph from torch.float32 \[2, 3\] to torch.float32 \[\]"),
        ("fx_passes", _drop_an_input, "changed the placeholders"),
        ("fx_passes", _leave_a_dangling_node, "not well formed"),
        ("fx_passes", _unknown_arguments, "cannot be worked out"),
        ("fx_passes", lambda module: 7, "returned int"),
        ("onnx_passes", lambda model: 7, "returned int"),
        ("onnx_passes", lambda model: model.graph.outputs.pop(), "returned Value"),
        ("onnx_passes", lambda model: model.graph.outputs.pop() and None, "changed the inputs or outputs"),
    ],
)
def test_a_pass_that_leaves_what_cannot_be_used_is_named(name: str, function: Any, message: str) -> None:
    compiled = torch.compile(Net(), backend="ort_training", options={name: [function]})
    with pytest.raises(Exception, match=f"(?s)pass '.*'.*{message}"):
        compiled(torch.randn(2, 4))


def test_the_repro_script_of_a_dump_runs_without_the_passes(tmp_path: Path, python: Any) -> None:
    model = Net()
    options = {"fx_passes": [relu_to_softplus], "dump_dir": str(tmp_path)}
    gradients_of(model, torch.randn(5, 4), torch.compile(model, backend="ort_training", options=options))
    (script,) = tmp_path.glob("*.repro.py")
    assert "equal eager's" in python("import runpy, sys; runpy.run_path(sys.argv[1])", str(script))
