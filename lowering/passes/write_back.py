"""New values of large arguments that differ from the old ones in a part alone: only the part is computed, and written where the argument lies."""

from __future__ import annotations

import math
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, written_arguments
from ort_backend.lowering.kernels.write_back import BY_INDEX, BY_INDEX_HERE, WRITE_BACK, WRITE_HERE
from ort_backend.lowering.passes.effects import drop_unread
from ort_backend.lowering.passes.part_writes import LARGE, Write, is_for, write_of
from ort_backend.lowering.splitting.partition import root, view_chain
from ort_backend.lowering.symbolic import hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

_SAVED = "SavedForBackwardsAOTOutput"  # of AOTAutograd's descriptors, read in torch 2.13


def write_back_parts(graph: fx.Graph, target: OrtTarget, outputs: int | None = None, *, alone: bool = False, inside: bool = False) -> int:
    """Replaces, in place, new values of arguments on the CPU among the first `outputs` results (None: all) by writes to these arguments.

    What else reads a new value still has it computed, of its slices only these (`read_less`).

    Args:
        graph: The graph.
        target: What it is lowered for.
        outputs: How many results are the forward's.
        alone: Whether nothing but the writes may read what they write to, as where they may run before the rest, which then is the same.
        inside: Whether there is one session, and no other: one that reads the whole new value may write it where the argument lies.

    Returns:
        How many arguments are written to.
    """
    described = graph.output_node().meta.get("desc") or ()
    if target.device_type != "cpu" or target.kernels == "onnxruntime" or any(map(is_sparse, graph.nodes)):
        return 0
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    arguments = written_arguments(graph, outputs)
    count = 0
    for argument, place in arguments.items():
        value = results[place]
        is_followed = _read_instead_of_copies(argument)
        steps = _steps(value, argument, arguments.keys())
        if steps is None or (alone and not all(map(_is_alone, steps))):
            continue
        if is_followed and any(one is value and type(kind).__name__ == _SAVED for one, kind in zip(results, described, strict=False)):
            continue  # autograd has AOTAutograd write the argument to itself, behind the forward, and would notice
        returned = [one for i, one in enumerate(results) if i not in arguments.values()]
        if inside and _is_read(value, steps) and _may_be_written_inside(argument, steps, returned):
            value.replace_all_uses_with(_written_here(graph, argument, steps))
            results = list(graph.output_node().args[0])  # type: ignore[arg-type]
            count += 1
            continue
        new = argument
        with graph.inserting_before(graph.output_node()):
            for step in steps:
                new = _in_place(graph, new, step)
        results = [new if one is value else one for one in results]  # it comes again where the program returns the argument, or keeps it
        graph.output_node().args = (tuple(results),)
        read_less(graph, value)
        count += 1
    if count:
        drop_unread(graph)
    return count


def is_sparse(node: fx.Node) -> bool:
    """What is computed behind the session may read the argument, too."""
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in leaves)


def _steps(value: Any, argument: fx.Node, written: Set[fx.Node]) -> list[Write | fx.Node] | None:
    """The writes that make `value` of the argument, the first one first; None where there is something else, or not much to save."""
    fake = argument.meta["val"]
    if fake.is_complex() or fake.layout != torch.strided or fake.requires_grad or _elements(fake) < LARGE:
        return None
    steps: list[Write | fx.Node] = []
    while isinstance(value, fx.Node) and value is not argument:
        step: Write | fx.Node | None = value if value.target in BY_INDEX else write_of(value, symbolic=True)
        if step is None:
            return None
        used = [step.source] if isinstance(step, Write) else [one for one in value.all_input_nodes if one is not value.args[0]]
        # What is written is to be there before anything is written over.
        if any(root(one) in written or 2 * _elements(one.meta.get("val")) > _elements(fake) for one in used):
            return None
        steps.append(step)
        value = step.base if isinstance(step, Write) else value.args[0]
    return steps[::-1] if value is argument and steps else None


def _read_instead_of_copies(argument: fx.Node) -> bool:
    """Whether there are copies of an argument: where autograd follows a write, AOTAutograd copies it first. Nothing but results reads these then.

    Views of a copy that leave the graph keep it: what they show is not to change with the argument.
    """
    copies = [user for user in argument.users if user.target is aten.clone.default]
    output = argument.graph.output_node()
    chains = [view_chain(result, through_copies=False) for result in output.all_input_nodes]
    leaving = {output, *(node for chain in chains if chain[-1] in copies for node in chain)}
    for copy in copies:
        copy.replace_all_uses_with(argument, delete_user_cb=lambda user: user not in leaving)
        if not copy.users:
            argument.graph.erase_node(copy)
    return bool(copies)


def _is_alone(step: Write | fx.Node) -> bool:
    return isinstance(step, Write) and is_for(step.base, step.node, step.used)


def _is_read(value: fx.Node, steps: list[Write | fx.Node]) -> bool:
    """Whether something reads a new value of which more than slices that `read_less` takes."""
    last = steps[-1]
    readers = [user for user in value.users if user.op != "output"]
    return any(isinstance(last, fx.Node) or reader.target is not aten.slice.Tensor or not _has_part(arguments_of(reader), last) for reader in readers)


def _may_be_written_inside(argument: fx.Node, steps: list[Write | fx.Node], returned: list[Any]) -> bool:
    """Whether nothing reads the old value, and no result may be what lies there, as a copy may be that a lowering leaves out.

    The argument has to be contiguous: else a session gets a copy.
    """
    size = _elements(argument.meta["val"])
    new = steps[-1] if isinstance(steps[-1], fx.Node) else steps[-1].node
    others = [one.meta["val"] for one in returned if isinstance(one, fx.Node) and one is not new]
    has_its_size = any(isinstance(fake, torch.Tensor) and _elements(fake) == size for fake in others)
    return argument.meta["val"].is_contiguous() and not has_its_size and all(map(_is_read_once, steps))


def _is_read_once(step: Write | fx.Node) -> bool:
    """Whether only a write reads what it writes to."""
    return _is_alone(step) if isinstance(step, Write) else list(step.args[0].users) == [step]  # type: ignore[union-attr]


def _written_here(graph: fx.Graph, argument: fx.Node, steps: list[Write | fx.Node]) -> fx.Node:
    new = argument
    for step in steps:
        node = step if isinstance(step, fx.Node) else step.node
        with graph.inserting_before(node):
            if isinstance(step, fx.Node):
                written = graph.call_function(BY_INDEX_HERE[step.target], (new, *step.args[1:]), dict(step.kwargs))  # type: ignore[index]
            else:
                written = graph.call_function(WRITE_HERE, (new, step.source, [number for view in step.views for number in view]))
        written.meta = dict(node.meta)
        new = written
    return new


def _elements(fake: Any) -> int:
    return math.prod(map(hint, fake.shape)) if isinstance(fake, torch.Tensor) else 1


def _in_place(graph: fx.Graph, tensor: fx.Node, step: Write | fx.Node) -> fx.Node:
    if isinstance(step, fx.Node):
        target: Any = step.target
        node = graph.call_function(BY_INDEX[target], (tensor, *step.args[1:]), dict(step.kwargs))
    else:
        node = graph.call_function(WRITE_BACK, (tensor, step.source, [number for view in step.views for number in view]))
    node.meta = {"val": tensor.meta["val"], "stack_trace": (step if isinstance(step, fx.Node) else step.source).meta.get("stack_trace")}
    return node


def read_less(graph: fx.Graph, value: Any) -> None:
    """Takes slices of an argument's new value before the write, where they begin with the argument and have all of the part that is written."""
    write = write_of(value, symbolic=True)
    if write is None or any(view.step != 1 for view in write.views) or len({view.dim for view in write.views}) < len(write.views):
        return
    for reader in list(value.users):
        if reader.target is not aten.slice.Tensor or not _has_part(given := arguments_of(reader), write):
            continue
        with graph.inserting_before(reader):
            dim, bounds = given["dim"], (given["dim"], given["start"], given["end"])
            base = _call(graph, aten.slice.Tensor, write.base, *bounds)
            source = write.source if any(view.dim == dim for view in write.views) else _call(graph, aten.slice.Tensor, write.source, *bounds)
            parts = [base]
            for view in write.views:
                parts.append(_call(graph, aten.slice.Tensor, parts[-1], view.dim, view.start, view.end))
            source = _call(graph, aten.copy.default, parts.pop(), source)  # which may have another dtype, and be repeated
            for part, view in zip(parts[::-1], write.views[::-1], strict=True):
                source = _call(graph, aten.slice_scatter.default, part, source, view.dim, view.start, view.end)
        reader.replace_all_uses_with(source)
        read_less(graph, source)


def _has_part(given: dict[str, Any], write: Write) -> bool:
    if given["start"] not in (0, None) or given["step"] != 1 or write.source.meta["val"].dim() != write.base.meta["val"].dim():
        return False
    within = [view for view in write.views if view.dim == given["dim"]]
    from_front = [given["dim"], given["end"], *(view.dim for view in write.views), *(bound for view in within for bound in (view.start, view.end))]
    if not all(map(_is_from_front, from_front)):  # what is counted from the end is elsewhere in a slice
        return False
    return not within or _number(within[0].end) == _number(given["end"]) or _is_less(within[0].end, given["end"])


def _is_from_front(number: Any) -> bool:
    """Whether a dimension, or a bound, is not negative: the tracer guards the sign of a symbolic one that has an example."""
    value = number.meta["val"] if isinstance(number, fx.Node) else number
    return isinstance(value, (int, torch.SymInt)) and (isinstance(value, int) or value.node.has_hint()) and hint(value) >= 0


def _number(number: Any) -> Any:
    return number.meta["val"].node.expr if isinstance(number, fx.Node) else number


def _is_less(one: Any, other: Any) -> bool:
    return isinstance(one, int) and isinstance(other, int) and 0 <= one < other


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*(arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args))
    return node
