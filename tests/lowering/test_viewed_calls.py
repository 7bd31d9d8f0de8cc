"""Reshapes beside nodes that call PyTorch on a device: views inside the calls. The graphs are interpreted here, as such nodes run on a GPU only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch

from ort_backend.lowering.calls_on_device.merged_calls import merge_calls
from ort_backend.lowering.calls_on_device.viewed_calls import view_in_calls
from ort_backend.lowering.python_op import PythonCall

X = torch.arange(24.0).reshape(2, 3, 4)
SIZES = {"s0": 2, "3*s0": 6, "s1": 4}


class Written:
    """A graph of reshapes and calls over `x` (2 x 3 x 4)."""

    def __init__(self) -> None:
        self.x = self._value("x", X.shape)
        self.graph = ir.Graph([self.x], [], nodes=[], opset_imports={"": 18, "com.microsoft": 1}, name="graph")
        self.calls: list[PythonCall] = []

    def reshape(self, value: ir.Value, *sizes: int | str, op_type: str = "Reshape") -> ir.Value:
        return self._node("", op_type, [value], f"v{len(self.graph)}", sizes)

    def call(self, function: Callable[..., torch.Tensor], *values: ir.Value, sizes: Sequence[int | str]) -> ir.Value:
        name = f"call#{len(self.calls)}"
        self.calls.append(PythonCall(name, "call", lambda *tensors: [function(*tensors)], op_type="TritonOp"))
        return self._node("com.microsoft", "TritonOp", values, f"v{len(self.graph)}", sizes, ir.AttrString("func_name", name))

    def kernel(self, value: ir.Value) -> ir.Value:
        """Something of ONNX Runtime's own."""
        return self._node("", "Neg", [value], f"v{len(self.graph)}", list(value.shape))  # type: ignore[arg-type]

    def run(self) -> list[torch.Tensor]:
        """What the outputs are, and that each has the shape that it says."""
        calls = {call.name: call.function for call in self.calls}
        values: dict[ir.Value | None, torch.Tensor] = {self.x: X}
        for node in self.graph:
            given = [values[value] for value in node.inputs]
            (result,) = node.outputs
            if node.op_type == "TritonOp":
                (values[result],) = calls[node.attributes["func_name"].as_string()](*given)  # type: ignore[misc]
            elif node.op_type == "Neg":
                values[result] = -given[0]
            else:
                values[result] = given[0].reshape(_sizes(result))
            assert list(values[result].shape) == _sizes(result), node
        return [values[output] for output in self.graph.outputs]

    def rewritten(self, *outputs: ir.Value) -> list[str]:
        """Runs before and behind the pass, with the same results: the operators that are left."""
        self.graph.outputs.extend(outputs)
        names, before = [output.name for output in outputs], self.run()
        self.calls = merge_calls(self.graph, self.calls, view_in_calls(self.graph), largest=1)
        assert [output.name for output in self.graph.outputs] == names
        torch.testing.assert_close(self.run(), before, rtol=0, atol=0)
        return [node.op_type for node in self.graph]

    def _value(self, name: str, sizes: Sequence[int | str]) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(list(sizes)))

    def _node(self, domain: str, op_type: str, inputs: Sequence[ir.Value], name: str, sizes: Sequence[int | str], *attributes: ir.Attr) -> ir.Value:
        node = ir.Node(domain, op_type, inputs, attributes, outputs=[self._value(name, sizes)])
        self.graph.append(node)
        return node.outputs[0]


def _sizes(value: ir.Value) -> list[int]:
    assert value.shape is not None
    return [size if isinstance(size, int) else SIZES[str(size.value)] for size in value.shape]


def test_before_and_behind_calls() -> None:
    written = Written()
    rows = written.reshape(written.x, 6, 4)
    first = written.call(torch.exp, rows, sizes=(6, 4))
    whole = written.reshape(first, 2, 3, 4)
    second = written.call(lambda a, b: a * b.sum(0), whole, rows, sizes=(2, 3, 4))
    assert written.rewritten(written.kernel(written.reshape(second, 6, 4))) == ["TritonOp", "TritonOp", "Neg"]


def test_a_call_that_reads_the_result_as_it_was() -> None:
    written = Written()
    first = written.call(torch.exp, written.x, sizes=(2, 3, 4))
    rows = written.kernel(written.reshape(first, 6, 4))
    second = written.call(lambda a: a.sum(0, keepdim=True), first, sizes=(1, 3, 4))
    assert written.rewritten(rows, written.reshape(second, 3, 4, op_type="Squeeze")) == ["TritonOp", "Neg", "TritonOp"]


def test_two_of_one_shape_and_an_output() -> None:
    written = Written()
    first = written.call(torch.exp, written.x, sizes=(2, 3, 4))
    some = [written.reshape(first, 6, 4), written.reshape(first, 6, 4)]
    assert written.rewritten(some[0], written.kernel(some[1])) == ["TritonOp", "Neg"]


def test_a_symbolic_size() -> None:
    written = Written()
    first = written.call(torch.exp, written.x, sizes=("s0", 3, 4))
    rows = written.reshape(first, "3*s0", 4)
    second = written.call(torch.exp, written.reshape(written.kernel(rows), "s0", 3, 2, 2), sizes=("s0", 3, 2, 2))
    assert written.rewritten(second) == ["TritonOp", "Neg", "TritonOp"]


def test_what_stays() -> None:
    """What a kernel of ONNX Runtime's reads, or is handed out, as it is; shapes that differ; two sizes that are not known; no elements."""
    written = Written()
    rows = written.reshape(written.x, 6, 4)
    one, other = (written.call(torch.exp, written.x, sizes=(2, 3, 4)) for _ in range(2))
    unknown = written.call(torch.exp, written.x, sizes=("s0", 3, "s1"))
    outputs = [written.call(torch.exp, rows, sizes=(6, 4)), written.kernel(rows)]
    outputs += [written.kernel(one), written.reshape(one, 24)]
    outputs += [written.reshape(other, 24), written.reshape(other, 6, 4)]
    outputs += [written.kernel(written.reshape(unknown, "s1", 3, "s0"))]
    assert written.rewritten(*outputs).count("Reshape") == 5
    empty = Written()
    nothing = empty.call(lambda x: x[:, :0], empty.x, sizes=(2, 0, 4))
    assert empty.rewritten(empty.reshape(nothing, 0, 2)) == ["TritonOp", "Reshape"]


def test_a_call_in_a_branch() -> None:
    """It reads what it has read before."""
    written = Written()
    first = written.call(torch.exp, written.x, sizes=(2, 3, 4))
    rows = written.reshape(first, 6, 4)
    inner = ir.Node("com.microsoft", "TritonOp", [first], [ir.AttrString("func_name", "inner#0")], outputs=[ir.Value(name="inner")])
    branch = ir.Graph([], list(inner.outputs), nodes=[inner], name="branch")
    written.graph.append(ir.Node("", "If", [written.x], [ir.AttrGraph("then_branch", branch)]))
    written.graph.outputs.append(rows)
    (views,) = view_in_calls(written.graph).values()
    assert not views.inputs and not views.outputs
    assert inner.inputs == (first,) and rows.producer().op_type == "Reshape"  # type: ignore[union-attr]
