"""The partition function: AOTAutograd's joint graph becomes one ONNX training graph around a `YieldOp`.

AOTAutograd is handed a forward and a backward graph as it expects, each one call of an operator that stands for a half of the session.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from ort_backend import compiled_autograd
from ort_backend.boundary import Results, add_inputs, add_outputs, device_of, input_of, tangent_outputs
from ort_backend.lowering.fx_nodes import written_arguments
from ort_backend.lowering.graph import GraphLowering, writes_behind
from ort_backend.lowering.kernels.part_writes import copy_of_parts
from ort_backend.lowering.kernels.write_back import IMPLEMENTATIONS as WRITES_HERE
from ort_backend.lowering.kernels.write_back import written_argument
from ort_backend.lowering.lowered import LoweredGraph
from ort_backend.lowering.passes.cross_entropy import fuse_cross_entropy
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.embedding_gradients import add_rows_in_place, add_to_tied_gradients
from ort_backend.lowering.passes.hoist_random import hoist
from ort_backend.lowering.passes.input_gradients import split_input_gradients
from ort_backend.lowering.passes.moved_pairs import move_pairs
from ort_backend.lowering.passes.number_checks import join_number_checks
from ort_backend.lowering.passes.optimizer_steps import fuse_optimizer_steps
from ort_backend.lowering.passes.part_writes import join_writes, parts_read
from ort_backend.lowering.passes.probabilities import keep_probabilities
from ort_backend.lowering.passes.products import choose_products
from ort_backend.lowering.passes.read_parts import read_parts
from ort_backend.lowering.passes.recompute import recompute
from ort_backend.lowering.passes.rms_norms import fuse_rms_norms
from ort_backend.lowering.passes.scales import fuse_scales
from ort_backend.lowering.passes.tall_products import divide_tall_products
from ort_backend.lowering.passes.tangents import loose_among, loosen_tangents
from ort_backend.lowering.passes.write_back import write_back_parts
from ort_backend.lowering.passes.zero_scatters import put_into_zeros
from ort_backend.lowering.simplify import simplify
from ort_backend.lowering.splitting.dependencies import note_runs
from ort_backend.lowering.splitting.partition import JointPartition, divide
from ort_backend.lowering.splitting.saved import read_behind_yield
from ort_backend.runtime.binding import Output
from ort_backend.runtime.inference_graph import InferencePlan
from ort_backend.runtime.loose_tangents import zeros_for
from ort_backend.runtime.training_graph import TrainingPlan
from ort_backend.target import OrtTarget

# What stands in the graphs that AOTAutograd gets. They are never run: the compilers hand out the session's halves.
_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("forward(Tensor[] primals) -> Tensor[]")
_library.define("backward(Tensor[] saved, Tensor token, Tensor[] tangents) -> Tensor[]")


@torch.library.register_fake("ort_training::backward", lib=_library)
def _(saved: Any, token: Any, tangents: Any) -> Any:
    raise compiled_autograd.untraceable()


@dataclasses.dataclass(frozen=True)
class TrainingLowering:
    """A joint graph in ONNX, with what the runtime needs to run it and what AOTAutograd needs to use it."""

    lowered: LoweredGraph
    plan: TrainingPlan
    partition: JointPartition


Rewrite = Callable[[LoweredGraph], LoweredGraph]


def lower_joint(
    module: fx.GraphModule, num_fwd_outputs: int, target: OrtTarget, *, strict: bool, name: str, rewrite: Rewrite = lambda lowered: lowered
) -> TrainingLowering:
    """Lowers a joint graph into one ONNX graph: forward nodes, `YieldOp`, backward nodes, gradients as outputs.

    `rewrite` sees the result first; it keeps inputs, outputs and the `YieldOp`.
    """
    graph = module.graph
    note_runs(graph)
    simplify(graph, target)
    fuse_rms_norms(graph, target)
    fuse_cross_entropy(graph)
    fuse_scales(graph)
    split_input_gradients(graph, target)
    hoisted = hoist(graph)
    if recompute(module, num_fwd_outputs):
        fuse_rms_norms(graph, target, checkpoints=True)
    # Behind `recompute`, where PyTorch's partitioner weighs operators that it knows.
    if not strict:
        join_number_checks(graph)
        write_back_parts(graph, target, num_fwd_outputs)
    read_parts(graph)
    join_writes(graph, target)
    move_pairs(graph, target)
    divide_tall_products(graph, target)
    if not strict:
        add_rows_in_place(graph, target)
        put_into_zeros(graph, target)
    add_to_tied_gradients(graph, target)
    keep_probabilities(graph, target)
    choose_products(graph, target)
    loosen_tangents(graph)
    changing = list(written_arguments(graph, num_fwd_outputs))
    partition = divide(graph, num_fwd_outputs, changing)
    lowering = GraphLowering(target, name, strict=strict)
    inputs = add_inputs(lowering, partition.primals, partition.draws, (*partition.forward, *partition.backward), partition.gradients)
    lowering.run(partition.forward)
    outputs, yielded, values = _yield(lowering, partition)
    lowering.run(partition.backward)
    gradients, fetched = _add_gradients(lowering, partition)
    for value in values:
        # The user holds this memory. As a graph output (never fetched as one) no node of the backward may write its own result there.
        lowering.add_output(value)
    lowered = rewrite(lowering.finish())
    values = list(lowered.model.graph.outputs)[-len(values) :]
    read = read_behind_yield(lowered.model.graph, values)
    plan = TrainingPlan(
        inputs=inputs,
        outputs=outputs,
        tangents=tuple(input_of(partition.tangents.index(node), node.meta["val"], as_it_lies=False) for node in _entering(partition)),
        gradients=gradients,
        draws=hoisted.draws,
        draws_inside=bool(hoisted.left),
        yield_devices=tuple(device_of(node) for node in yielded),
        gradient_devices=tuple(device_of(node) for node in fetched),
        saved=partition.saved_primals,
        returned=_may_be_returned(partition),
        saved_outputs=tuple(i for i, one in enumerate(outputs) if one.source == "fetch" and one.dtype and values[one.index] in read),
        replayed=partition.replayed,
        changing={i: functools.partial(copy_of_parts, parts=parts_read(partition.primals[i])) for i in partition.changing},
        depends_on=partition.depends_on,
        tangent_outputs=tangent_outputs(graph, len(partition.outputs), partition.tangents),
        loose=zeros_for(loose_among(partition.tangents)),
    )
    return TrainingLowering(lowered, plan, partition)


def lower_inference(
    graph: fx.Graph, target: OrtTarget, *, strict: bool, name: str, rewrite: Rewrite = lambda lowered: lowered
) -> tuple[LoweredGraph, InferencePlan]:
    """Lowers a graph that needs no gradient into one ONNX graph; `rewrite` sees the result first."""
    simplify(graph, target)
    fuse_rms_norms(graph, target)
    choose_products(graph, target)
    if not strict:
        join_number_checks(graph)
        write_back_parts(graph, target, inside=True)
        fuse_optimizer_steps(graph, target)
        put_into_zeros(graph, target)
    read_parts(graph)
    join_writes(graph, target)
    move_pairs(graph, target)
    hoisted = hoist(graph)
    drop_unread(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    primals = [node for node in placeholders if "draw" not in node.meta]
    draws = [node for node in placeholders if "draw" in node.meta]
    calls = [node for node in graph.nodes if node.op in ("call_function", "get_attr")]
    results = list(graph.output_node().args[0])  # type: ignore[arg-type]
    lowering = GraphLowering(target, name, strict=strict)
    inputs = add_inputs(lowering, primals, draws, [node for node in calls if not writes_behind(node)], ())
    lowering.run(calls)
    outputs, fetched = add_outputs(lowering, list(map(written_argument, results)), primals, views=True)
    for node in calls:
        if node.target in WRITES_HERE and not (value := lowering.value(node)).is_graph_output():
            lowering.add_output(value)  # Never fetched as one: it makes this memory that no other node writes its result to.
    plan = InferencePlan(inputs, outputs, hoisted.draws, tuple(device_of(node) for node in fetched))
    return rewrite(lowering.finish()), plan


def _yield(lowering: GraphLowering, partition: JointPartition) -> tuple[tuple[Output, ...], list[fx.Node], list[ir.Value]]:
    """Writes the `YieldOp`: it hands out what the forward returns, and what comes back must have the tangents' types."""
    collected = Results(lowering, partition.primals, partition.outputs, views=True, taken=partition.taken, read=partition.read)
    outputs = tuple(collected.add(node) for node in partition.outputs)
    values, nodes = list(collected.values), list(collected.nodes)
    # ONNX Runtime gives the YieldOp's i-th output the type of its i-th differentiable input. Which outputs AOTAutograd has tangents for
    # is its own affair (aliases, mutated inputs), so that each tangent is paired with an input of its type; the others are marked.
    partners: list[int] = []
    for tangent in _entering(partition):
        start = partners[-1] + 1 if partners else 0
        match = next((i for i in range(start, len(values)) if values[i].dtype == lowering.dtype_of(tangent)), None)
        if match is None:
            values.append(lowering.placeholder_of_dtype(tangent))
            nodes.append(tangent)
            match = len(values) - 1
        partners.append(match)
    for node in partition.copied:  # the lowering left the copy out; what has an output of its own lies in memory of its own
        values.append(lowering.fresh(lowering.value(node), node.meta["val"]))
        nodes.append(node)
        lowering.bind(node, values[-1])
    if (last := lowering.last_python) is not None and last not in values:
        # The user's Python runs in the forward, also where nothing uses its results.
        values.append(last)
        nodes.append(next(node for node in reversed(partition.forward) if "val" in node.meta))  # a check has none
    lowering.yield_op(values, _entering(partition), [i for i in range(len(values)) if i not in partners])
    return outputs, nodes, values


def _entering(partition: JointPartition) -> list[fx.Node]:
    """The tangents that are values: where a result is a DTensor, its mesh comes as a tangent as well (seen in torch 2.13)."""
    return [node for node in partition.tangents if isinstance(node.meta["val"], (torch.Tensor, torch.SymInt, torch.SymFloat, int, float))]


def _add_gradients(lowering: GraphLowering, partition: JointPartition) -> tuple[tuple[Output, ...], list[fx.Node]]:
    returned = [partition.primals[partition.saved_primals[i]] for i in _may_be_returned(partition)]
    gradients, nodes = add_outputs(lowering, partition.gradients, [*partition.tangents, *returned], like=partition.primals)
    if not nodes:  # a session needs an output
        if entering := _entering(partition):
            nodes = entering[:1]
            value = lowering.fresh(lowering.value(nodes[0]), nodes[0].meta["val"])
        else:  # all results are views that the user took without gradients
            nodes = [next(node for node in partition.primals if isinstance(node.meta["val"], torch.Tensor))]
            value = lowering.placeholder_of_dtype(nodes[0])
        lowering.add_output(value)
    return gradients, nodes


def _may_be_returned(partition: JointPartition) -> tuple[int, ...]:
    """Which of the saved primals the backward returns as they are, and not a copy: whole numbers.

    The offsets of a nested tensor are a part of its gradient. By them PyTorch knows that the two have one shape: they must be the very same tensor.
    """
    returned = {node for node in partition.gradients if isinstance(node, fx.Node) and node.op == "placeholder"}
    saved = [partition.primals[i] for i in partition.saved_primals]
    whole = [i for i, node in enumerate(saved) if not (node.meta["val"].is_floating_point() or node.meta["val"].is_complex())]
    return tuple(i for i in whole if saved[i] in returned)


def halves(module: fx.GraphModule, partition: JointPartition, saved_outputs: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two graphs that AOTAutograd gets: `(primals) -> (outputs, saved, token)` and `(saved, token, tangents) -> gradients`."""
    forward, backward = fx.Graph(), fx.Graph()
    primals = [_placeholder(forward, node, node.name) for node in partition.primals]
    own = dict(zip(partition.primals, primals, strict=True))
    call = forward.call_function(torch.ops.ort_training.forward.default, (primals,))
    outputs = [own[node] if node in own else _item(forward, call, i, node) for i, node in enumerate(partition.outputs)]
    token = forward.call_function(operator.getitem, (call, len(outputs)))
    token.meta["val"] = _token_fake(module)
    saved = [primals[i] for i in partition.saved_primals] + [outputs[i] for i in saved_outputs]
    forward.output((*outputs, *saved, token))

    held = [_placeholder(backward, node, f"saved_{i}") for i, node in enumerate(saved)]
    token_in = _placeholder(backward, token, "token")
    tangents = [_placeholder(backward, node, node.name) for node in partition.tangents]
    call = backward.call_function(torch.ops.ort_training.backward.default, (held, token_in, tangents))
    backward.output(tuple(_item(backward, call, i, node) for i, node in enumerate(partition.gradients)))
    return fx.GraphModule(module, forward), fx.GraphModule(module, backward)


def _placeholder(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    made = graph.placeholder(name)
    made.meta = dict(node.meta)
    return made


def _item(graph: fx.Graph, call: fx.Node, index: int, like: Any) -> Any:
    """`call[index]` with the metadata of the node that it stands for; constants stay constants."""
    if not isinstance(like, fx.Node):
        return like
    made = graph.call_function(operator.getitem, (call, index))
    made.meta = dict(like.meta)
    return made


def _token_fake(module: fx.GraphModule) -> torch.Tensor:
    fakes = (node.meta.get("val") for node in module.graph.nodes)
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    with mode:
        return torch.zeros((), dtype=torch.int64)
