"""Pictures between calls of PyTorch on a CUDA device lie in memory with the channels as the last dimension.

So cuDNN's kernels for half precision take them; what they get in another order they copy. PyTorch's batch normalizations are faster in this one, too.

In eager PyTorch that is `memory_format=torch.channels_last`, which a program has to ask for; inductor does it by itself, under the same conditions.
(ResNet-50 in bfloat16, 64 images of 224 x 224, H100: of eager's 30 ms batch normalization took 15, and copies for cuDNN 3.5.)
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ort_backend.lowering.calls_on_device.viewed_calls import Views
from ort_backend.lowering.permuting import inverse
from ort_backend.lowering.python_op import PythonCall, Recipe, Slot, callable_of

aten = torch.ops.aten

_LAST = (0, 2, 3, 1)
_CONVOLUTIONS = {aten.convolution.default: 8, aten.convolution_backward.default: 9}  # which argument is the number of groups
# Arguments and results that are pictures. The kernels give a result in the order of their first argument.
_SEEDS: dict[Any, tuple[Collection[int], Collection[int]]] = {
    aten.convolution.default: ({0}, {0}),
    aten.convolution_backward.default: ({0, 1}, {0}),
    aten._native_batch_norm_legit_functional.default: ({0}, {0}),
    aten._native_batch_norm_legit_no_training.default: ({0}, {0}),
    aten.native_batch_norm_backward.default: ({0, 1}, {0}),
    aten.max_pool2d_with_indices.default: ({0}, {0, 1}),
    aten.max_pool2d_with_indices_backward.default: ({0, 1, 7}, {0}),
}
# Those that do not care.
_OTHERS: dict[Any, tuple[Collection[int], Collection[int]]] = {
    aten.threshold_backward.default: ({0, 1}, {0}),
    aten.silu.default: ({0}, {0}),
    aten.silu_backward.default: ({0, 1}, {0}),
    aten.gelu.default: ({0}, {0}),
    aten.gelu_backward.default: ({0, 1}, {0}),
    aten.sigmoid.default: ({0}, {0}),
    aten.mean.dim: ({0}, ()),
}
_PICTURES = {**_SEEDS, **_OTHERS}
# Nodes of ONNX Runtime's that do not care, if all that they take and give has one shape.
_ELEMENTWISE = {"Relu", "Add", "Sub", "Mul", "Div", "Cast", "Identity", "Sigmoid", "Tanh", "Sum", "Neg"}
# Where no convolution has more channels, the order does not pay (inductor's `decide_layout_opt` in torch 2.13).
_FEW_CHANNELS = 64
# Elements that may be copied at the border, for each of a picture that comes in the other order.
_MOST_COPIES = 0.2


class _Pictures:
    """Which values of a graph are pictures that change their order, and what takes them.

    Attributes:
        chosen: Those that come in the other order where they are made.
        wanted: Others that are taken in that order.
    """

    def __init__(self, graph: ir.Graph, recipes: Mapping[str, Recipe], views: Mapping[str, Views]) -> None:
        self._graph, self._recipes, self._views = graph, recipes, views
        self.chosen: set[ir.Value] = set()
        for node in graph:
            if self._is_active(node):
                self.chosen.update(value for i, value in enumerate(node.outputs) if self._gives(node, i))
        taken = {value for node in graph for i, value in enumerate(node.inputs) if value is not None and self.takes(node, i)}
        self.wanted = taken - self.chosen

    def recipe(self, node: ir.Node) -> Recipe | None:
        """Of a call that may take pictures."""
        return self._recipes.get(callable_of(node) or "")

    def takes(self, node: ir.Node, i: int) -> bool:
        """Whether an input is taken in the other order."""
        value = node.inputs[i]
        if value is None or not _is_picture(value) or not self._is_active(node):
            return False
        recipe = self.recipe(node)
        if recipe is None:
            return True
        pictures, _ = _PICTURES[inspect.unwrap(recipe.target)]
        is_viewed = i in self._views.get(callable_of(node) or "", Views()).inputs
        return not is_viewed and any(k < len(recipe.args) and recipe.args[k] is recipe.slots[i] for k in pictures)

    def _gives(self, node: ir.Node, i: int) -> bool:
        if not _is_picture(node.outputs[i]):
            return False
        recipe = self.recipe(node)
        if recipe is None:
            return True
        _, pictures = _PICTURES[inspect.unwrap(recipe.target)]
        is_viewed = i in self._views.get(callable_of(node) or "", Views()).outputs
        return not is_viewed and (recipe.results[i][0] or 0) in pictures and recipe.results[i][1] is not None

    def _is_active(self, node: ir.Node) -> bool:
        if node.graph is not self._graph:  # in the body of a branch or loop
            return False
        recipe = self.recipe(node)
        if recipe is not None and inspect.unwrap(recipe.target) in _SEEDS:
            return True
        if recipe is None and not _is_elementwise(node):
            return False
        return not self.chosen.isdisjoint(value for value in node.inputs if value is not None)

    def in_order(self, node: ir.Node, recipe: Recipe) -> Recipe:
        """The same call, of pictures in the other order."""
        slots = [dataclasses.replace(slot, order=_LAST) if self.takes(node, i) else slot for i, slot in enumerate(recipe.slots)]
        new = {id(old): slot for old, slot in zip(recipe.slots, slots, strict=True)}
        args = tuple(new.get(id(one), one) for one in recipe.args)
        results = tuple(
            (number, dtype, _LAST) if node.outputs[i] in self.chosen else (number, dtype, order)
            for i, (number, dtype, order) in enumerate(recipe.results)
        )
        return dataclasses.replace(recipe, args=args, slots=tuple(slots), results=results)


def put_channels_last(graph: ir.Graph, calls: Sequence[PythonCall], views: Mapping[str, Views]) -> list[PythonCall]:
    """Rewrites the graph in place where it pays; the calls, with the order of their arguments and results.

    Args:
        graph: With the nodes of the calls. It may not be in an order in which it can run any more.
        calls: All callables of the graph's nodes.
        views: How tensors are viewed around a call, by its name (`viewed_calls`).
    """
    recipes = {call.name: call.recipe for call in calls if call.recipe is not None and _may_take_pictures(call.recipe)}
    with_recipe = [(node, recipe) for node in graph if (recipe := recipes.get(callable_of(node) or "")) is not None]
    if not _pays(with_recipe):
        return list(calls)
    pictures = _Pictures(graph, recipes, views)
    left = [(value, use) for value in pictures.chosen for use in value.uses() if not pictures.takes(use.node, use.idx)]
    outputs = {value for value in pictures.chosen if value.is_graph_output()}
    copied = sum(map(_elements, {*pictures.wanted, *outputs, *(value for value, _ in left)}))
    if copied > _MOST_COPIES * sum(map(_elements, pictures.chosen)):
        return list(calls)
    new = {callable_of(node): pictures.in_order(node, recipe) for node, recipe in with_recipe}
    for value in pictures.wanted:
        uses = [use for use in value.uses() if pictures.takes(use.node, use.idx)]
        turned = _transposed(graph, value, _LAST)
        for use in uses:
            use.node.replace_input_with(use.idx, turned)
    for value in pictures.chosen:
        _turn_back(graph, value, [use for other, use in left if other is value])
    return [dataclasses.replace(call, recipe=new.get(call.name, call.recipe)) for call in calls]


def _may_take_pictures(recipe: Recipe) -> bool:
    return inspect.unwrap(recipe.target) in _PICTURES and not any(
        isinstance(one, list) and any(isinstance(x, Slot) for x in one) for one in recipe.args
    )


def _pays(nodes: Sequence[tuple[ir.Node, Recipe]]) -> bool:
    """Whether there are convolutions for which it does, and none for which it is slow, and the program has not chosen an order itself."""
    many = False
    for node, recipe in nodes:
        target = inspect.unwrap(recipe.target)
        if target not in _CONVOLUTIONS:
            continue
        weight = next(value for value, slot in zip(node.inputs, recipe.slots) if slot is recipe.args[1 if target is aten.convolution.default else 2])
        if weight is None or weight.shape is None or len(weight.shape) != 4 or any(slot.order is not None for slot in recipe.slots):
            return False
        out, into = weight.shape[0], weight.shape[1]
        if not isinstance(out, int) or not isinstance(into, int) or (recipe.args[_CONVOLUTIONS[target]] > 1 and into > 1):
            return False
        many = many or max(out, into) > _FEW_CHANNELS
    return many


def _is_picture(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 4 and any(size != 1 for size in value.shape[2:])


def _is_elementwise(node: ir.Node) -> bool:
    if node.domain or node.op_type not in _ELEMENTWISE:
        return False
    shape = node.outputs[0].shape
    return shape is not None and all(value is not None and (value.shape == shape or _is_number(value)) for value in node.inputs)


def _is_number(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) < 2 and all(size == 1 for size in value.shape)


def _elements(value: ir.Value) -> int:
    return 0 if value.shape is None else math.prod(size for size in value.shape if isinstance(size, int))


def _in_order(shape: ir.Shape | None, order: Sequence[int]) -> ir.Shape | None:
    return None if shape is None else ir.Shape([shape[d] for d in order])


def _transposed(graph: ir.Graph, value: ir.Value, order: Sequence[int]) -> ir.Value:
    made = ir.Value(name=f"{value.name}_{'last' if order == _LAST else 'first'}", type=value.type, shape=_in_order(value.shape, order))
    graph.append(ir.Node("", "Transpose", [value], [ir.AttrInt64s("perm", list(order))], outputs=[made]))
    return made


def _turn_back(graph: ir.Graph, value: ir.Value, uses: Sequence[Any]) -> None:
    """Gives a picture its new shape, and those that do not take it so, a copy in the order before."""
    value.shape = _in_order(value.shape, _LAST)
    if not uses and not value.is_graph_output():
        return
    name, is_output = value.name, value.is_graph_output()
    back = _transposed(graph, value, inverse(_LAST))
    for use in uses:
        use.node.replace_input_with(use.idx, back)
    if is_output:
        graph.outputs[:] = [back if output is value else output for output in graph.outputs]
        value.name, back.name = f"{name}_last", name
