"""Random draws move in front of the graph: PyTorch makes them, in graph order, and they enter as inputs.

So eager and compiled training see the same numbers under one seed, the generator ends in the same state, and ONNX Runtime, which is free to
reorder independent nodes, has none to reorder. An operator whose distribution depends on computed values cannot be drawn in front;
it and every random operator behind it stay in the graph.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ort_backend.lowering.sizes import evaluator
from ort_backend.lowering.splitting.partition import is_random

aten = torch.ops.aten

Draw = Callable[[Sequence[Any]], torch.Tensor]

_WITH_GENERATOR = {"default": "generator", "low": "low_generator", "low_dtype": "low_generator_dtype"}


def _and_with_generator(*targets: torch._ops.OpOverload) -> set[torch._ops.OpOverload]:
    """And those that a call with `generator=None` becomes, as far as this version of torch has them."""
    others = {getattr(target.overloadpacket, _WITH_GENERATOR[target._overloadname], None) for target in targets}
    return {*targets, *(other for other in others if other is not None)}


# The first argument gives size, stride, dtype and device; its values are not read.
_LIKE = {
    aten.bernoulli.p,
    *_and_with_generator(aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype),
    aten.uniform.default,
    aten.normal_functional.default,
    aten.exponential.default,
    aten.log_normal.default,
    aten.cauchy.default,
    aten.geometric.default,
}
# Of which the functional form fills memory in another order than the form in place, which the program has (`contiguous_draws`).
_IN_PLACE: dict[Any, torch._ops.OpOverload] = {aten.bernoulli.p: aten.bernoulli_.float}
# No tensor arguments at all.
_FACTORIES = {
    *_and_with_generator(aten.rand.default, aten.randn.default, aten.randint.default, aten.randint.low, aten.randperm.default),
    aten.normal.float_float,
}


@dataclasses.dataclass(frozen=True)
class Hoisted:
    """What `hoist` did.

    Attributes:
        draws: One function per new placeholder (`node.meta["draw"]` is its index): takes the graph's original arguments, draws a tensor.
        left: Random nodes that stay in the graph.
    """

    draws: tuple[Draw, ...]
    left: tuple[fx.Node, ...]


def hoist(graph: fx.Graph) -> Hoisted:
    """Replaces random nodes by placeholders, in place, up to the first one that cannot be."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    # A size that follows from values shows in tangents too, which are not there yet where the forward draws.
    arguments = [node for node in placeholders if not node.name.startswith("tangents")]
    draws: list[Draw] = []
    random = [node for node in graph.nodes if is_random(node)]
    for i, node in enumerate(random):
        draw = _draw_of(node, arguments)
        if draw is None:
            return Hoisted(tuple(draws), tuple(random[i:]))
        inputs = [*placeholders, *(n for n in graph.nodes if "draw" in n.meta)]
        with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(f"random_{len(draws)}")
        placeholder.meta["draw"] = len(draws)
        _replace(graph, node, placeholder)
        draws.append(draw)
    return Hoisted(tuple(draws), ())


def _draw_of(node: fx.Node, placeholders: Sequence[fx.Node]) -> Draw | None:
    if node.kwargs.get("generator") is not None:  # one of the user's
        return None
    if node.target is aten.native_dropout.default:
        return _mask_of(node, placeholders)
    if node.target in _FACTORIES:
        return _factory(node, placeholders)
    if node.target in _LIKE:
        return _like(node, placeholders)
    return None


def _mask_of(node: fx.Node, placeholders: Sequence[fx.Node]) -> Draw | None:
    fake, p = node.meta["val"][1], float(node.args[1])  # type: ignore[arg-type]
    is_fused = fake.device.type == "cuda" and 0.0 < p < 1.0
    # The fused kernel draws several numbers at a time, how many and in what order depends on its input: dtype, strides, address.
    source = node.args[0].meta["val"] if is_fused else fake  # type: ignore[union-attr]
    layout = evaluator((*source.shape, *source.stride()), placeholders)
    train = node.args[2] if len(node.args) > 2 else None
    if layout is None or train is False:
        return None
    rank, dtype, device = source.dim(), source.dtype, source.device
    fused = aten.native_dropout.default if is_fused else None  # not looked up where it draws: the namespace cannot be pickled

    def draw(args: Sequence[Any]) -> torch.Tensor:
        numbers = layout(args)
        like = torch.empty_strided(numbers[:rank], numbers[rank:], dtype=dtype, device=device)
        if fused is not None:
            return fused(like, p, True)[1]
        return like.fill_(False) if p == 1.0 else like.bernoulli_(1.0 - p)  # eager draws nothing for p = 1

    return draw


def _like(node: fx.Node, placeholders: Sequence[fx.Node]) -> Draw | None:
    source = node.args[0].meta["val"]  # type: ignore[union-attr]
    rest = [*node.args[1:], *node.kwargs.values()]
    layout = evaluator((*source.shape, *source.stride()), placeholders)
    if layout is None or any(isinstance(arg, fx.Node) for arg in rest):
        return None
    rank, dtype, device, target = source.dim(), source.dtype, source.device, _IN_PLACE.get(node.target, node.target)
    arguments, keywords = node.args[1:], dict(node.kwargs)

    def draw(args: Sequence[Any]) -> torch.Tensor:
        numbers = layout(args)
        return target(torch.empty_strided(numbers[:rank], numbers[rank:], dtype=dtype, device=device), *arguments, **keywords)  # type: ignore[operator]

    return draw


def _factory(node: fx.Node, placeholders: Sequence[fx.Node]) -> Draw | None:
    flat, spec = torch.utils._pytree.tree_flatten((node.args, dict(node.kwargs)))
    fakes = [leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf for leaf in flat]
    numbers = [i for i, fake in enumerate(fakes) if isinstance(fake, torch.SymInt)]
    values = evaluator([fakes[i] for i in numbers], placeholders)
    if values is None or any(isinstance(fake, torch.Tensor) for fake in fakes):
        return None
    target = node.target
    constants = [None if isinstance(fake, torch.SymInt) else fake for fake in fakes]

    def draw(args: Sequence[Any]) -> torch.Tensor:
        leaves = list(constants)
        for i, value in zip(numbers, values(args), strict=True):
            leaves[i] = value
        positional, keywords = torch.utils._pytree.tree_unflatten(leaves, spec)
        return target(*positional, **keywords)  # type: ignore[operator]

    return draw


def _replace(graph: fx.Graph, node: fx.Node, placeholder: fx.Node) -> None:
    """Puts the drawn tensor in the place of the node's result."""
    if node.target is not aten.native_dropout.default:
        placeholder.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        return
    placeholder.meta["val"] = node.meta["val"][1]
    _drop_by(graph, node, placeholder)
    graph.erase_node(node)


def draw_masks_only(graph: fx.Graph, dropouts: Sequence[fx.Node]) -> None:
    """Makes each `native_dropout` one whose mask alone is read, and a product with that mask, which can be computed again."""
    for node in dropouts:
        with graph.inserting_after(node):
            mask = graph.call_function(operator.getitem, (node, 1))
        mask.meta = {**node.meta, "val": node.meta["val"][1]}
        _drop_by(graph, node, mask)


def _drop_by(graph: fx.Graph, node: fx.Node, mask: fx.Node) -> None:
    """Lets everyone read the product with `mask` in the place of a dropout's result, and `mask` in that of its mask."""
    output, (source, p) = node.meta["val"][0], node.args[:2]
    scale = _scale(float(p), output)  # type: ignore[arg-type]
    with graph.inserting_after(max(node, mask)):
        scaled = graph.call_function(aten.native_dropout_backward.default, (source, mask, scale))
    scaled.meta = {**node.meta, "val": output}
    for user in [user for user in node.users if user is not mask]:
        user.replace_all_uses_with((scaled, mask)[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)


def _scale(p: float, output: torch.Tensor) -> float:
    """What eager multiplies by: a tensor of the result's dtype on the CPU, a number in float32 in the kernel of CUDA (torch's `Dropout.cu`)."""
    if p == 1.0:
        return 0.0
    if output.device.type == "cuda":
        return 1.0 / (1.0 - p)
    with unset_fake_temporarily():
        return torch.ones((), dtype=output.dtype).div(1.0 - p).item()
