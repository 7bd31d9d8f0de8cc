"""Forward nodes that cost little and whose results wait for the backward although what they are computed from waits there, too.

Eager PyTorch keeps both the input and the result of a GELU: its own backward reads the one, that of the next linear layer the other.
Inductor computes some of them again; here it is those of `_CHEAP`, so that a default step does without them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.symbolic import hint

aten = torch.ops.aten

# One pass over memory, at most with an exponential for each element.
_CHEAP = {
    aten.native_dropout_backward.default,  # `hoist`'s dropout: what a drawn mask leaves
    aten.native_layer_norm.default, aten.gelu.default, aten.silu.default, aten.relu.default, aten._to_copy.default, aten.where.self,
    aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.neg.default,
}  # fmt: skip

# With exponentials for each element, which in half precision take as long as in float32 where products and convolutions take half: a step of the
# suite's U-Net in bfloat16 took 1.02 of the time with its SiLUs computed again (medians of three runs; AMD EPYC of family 25, model 17).
_NOT_IN_HALF = {aten.gelu.default, aten.silu.default}

# In ONNX Runtime these lie in the memory of their argument.
_RESHAPES = {
    aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
    aten.clone.default,
}  # fmt: skip

# Below this a copy costs more than its few nodes for the order (`passes.recompute`) save. On a CUDA device each is one more kernel, which takes
# long enough to matter (3 % of a step of GPT-2), and the nodes for the order let the host wait: 13 ms a step there (H200).
_SMALLEST = 1 << 16  # elements

# What a graph gives up at least, in bytes: less is not worth the time. Without, a step of three layers took of its time, 64 and 128 wide with 4 x 64
# tokens, 0.95 and 0.93, 128 wide with 4 x 128 tokens 0.97, and of gpt-tiny 0.96, with 2 MB more at a peak of 64; 256 wide with 8 x 128 tokens (18 MB
# given up) 0.97, 512 wide 0.99 (AMD EPYC of family 25, where PyTorch's GELU of 262,144 elements takes 0.4 ms).
_LEAST = 4 << 20


def cheap_again(graph: fx.Graph, forward: set[fx.Node], outputs: list[fx.Node]) -> set[str]:
    """Names of the nodes among `forward` that the backward of a joint graph should compute again.

    A node is one of them if the backward reads, or computes again, all that it is computed from: then less is kept, whatever else is.
    """
    backward = [node for node in graph.nodes if node.op == "call_function" and node not in forward]
    kept = {memory_of(source) for node in backward for source in node.all_input_nodes}
    handed_out = {memory_of(node) for node in outputs}
    chosen: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in forward or node in handed_out:
            continue
        if node.target in _RESHAPES:
            again = node.args[0] in chosen
        elif node.target is operator.getitem:
            again = node.args[0] in chosen and node.args[1] == 0  # of a LayerNorm; its mean and deviation are small
        else:
            again = _is_cheap(node) and _is_large(node) and all(_is_there(source, kept, chosen) for source in _read(node))
        if again:
            chosen.add(node)
    return {node.name for node in chosen} if sum(map(_bytes, chosen)) >= _LEAST else set()


def _is_cheap(node: fx.Node) -> bool:
    return node.target in _CHEAP and not (node.target in _NOT_IN_HALF and node.meta["val"].dtype in (torch.bfloat16, torch.float16))


def memory_of(node: fx.Node) -> fx.Node:
    """The node in whose memory ONNX Runtime has this one."""
    while node.target in _RESHAPES:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that a node needs; eager PyTorch holds a LayerNorm's bias for the backward."""
    bias = node.args[3] if node.target is aten.native_layer_norm.default else None
    return (source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor) and source is not bias)


def _is_there(source: fx.Node, kept: set[fx.Node], chosen: set[fx.Node]) -> bool:
    return source in chosen or memory_of(source) in kept


def _is_large(node: fx.Node) -> bool:
    first = _first(node)
    return isinstance(first, torch.Tensor) and first.device.type == "cpu" and math.prod(map(hint, first.shape)) >= _SMALLEST


def _bytes(node: fx.Node) -> int:
    """Of what a node computes: 0 for what lies in the memory of another's."""
    if node.target in _RESHAPES or node.target is operator.getitem:
        return 0
    first = _first(node)
    return math.prod(map(hint, first.shape)) * first.element_size()


def _first(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value[0] if isinstance(value, tuple | list) else value
