"""Masks in Dynamo's graph that hide nothing, or all that is behind: attention on a CUDA device does without them.

There, attention takes one of PyTorch's fused kernels if it can, and draws what it drops inside: otherwise not from the same numbers as without a
mask. A mask keeps it from most. Hugging Face's encoders (transformers 5.17) write one that hides nothing, which they leave out while nobody traces
them; it is expanded along its last dimension, for which no kernel is. `known_masks` does the same in ATen's graph, where attention on the CPU is one
operator.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import scaled_dot_product_attention

from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.splitting.partition import ancestors

# Where the arguments stand: (query, key, value, attn_mask, dropout_p, is_causal).
_MASK, _CAUSAL = 3, 5

# What is computed while compiling: nodes of a mask, elements of a tensor.
_MOST_NODES = 64
_MOST_ELEMENTS = 1 << 24

# What `.data` is in Dynamo's graph (torch 2.13).
_DATA = getattr(torch._C._autograd, "_get_data_attr", None)

_FUNCTIONS = {
    torch.arange, torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, torch.where, torch.logical_and, torch.logical_or, torch.logical_not,
    torch.ge, torch.le, torch.gt, torch.lt, torch.eq, torch.ne, torch.unsqueeze, torch.add, torch.sub, torch.mul, torch.diff, torch.cumsum,
    operator.add, operator.sub, operator.mul, operator.ge, operator.le, operator.gt, operator.lt, operator.eq, operator.ne, operator.and_,
    operator.or_, operator.invert, operator.neg, operator.getitem,
}  # fmt: skip
_METHODS = {
    "expand", "unsqueeze", "view", "reshape", "bool", "to", "tril", "triu", "logical_not", "logical_and", "logical_or", "clone", "contiguous",
    "ge", "le", "gt", "lt", "add", "sub", "mul", "float", "transpose", "permute", "squeeze", "masked_fill", "type", "new_ones", "new_zeros", "repeat",
    "diff", "cumsum",
}  # fmt: skip


def drop_traced_masks(gm: fx.GraphModule, device_type: str = "cuda") -> int:
    """Takes, in place, masks from attention on such a device that masks nothing, or that is causal without them.

    A mask is known where it depends on no input of the graph, has no symbolic size, and is written to nowhere. It is computed, once, on the CPU.

    Returns:
        From how many calls a mask was taken.
    """
    dropped = 0
    for module in graph_modules(gm):
        order = {node: i for i, node in enumerate(module.graph.nodes)}
        verdicts: dict[Any, tuple[bool, bool]] = {}
        for node in module.graph.find_nodes(op="call_function", target=scaled_dot_product_attention):
            mask, is_causal = given(node, _MASK, "attn_mask"), given(node, _CAUSAL, "is_causal")
            if not isinstance(mask, fx.Node) or is_causal not in (None, False) or _device_of(node) != device_type:
                continue
            needed = sorted(ancestors([mask]), key=order.__getitem__)
            sizes = tuple(_size(node.args[i]) for i in (0, 1))
            if len(needed) > _MOST_NODES or None in sizes or not all(map(_is_known, needed)):
                continue
            if (mask, sizes) not in verdicts:
                verdicts[mask, sizes] = _judged(needed, sizes)
            hides_nothing, hides_later = verdicts[mask, sizes]
            if hides_nothing or hides_later:
                _leave_out(node, causal=hides_later)
                dropped += 1
        if dropped:
            module.recompile()
    return dropped


def given(node: fx.Node, position: int, name: str) -> Any:
    """The argument of a call at a position, or of a name; None if it is left out."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _device_of(node: fx.Node) -> str | None:
    query = _value(node.args[0]) if node.args else None
    return query.device.type if isinstance(query, torch.Tensor) else None


def _size(node: Any) -> int | None:
    """How many queries, or keys, there are, if that is fixed."""
    value = _value(node)
    size = value.shape[-2] if isinstance(value, torch.Tensor) and value.dim() > 1 else None
    return size if isinstance(size, int) else None


def _is_known(node: fx.Node) -> bool:
    known = node.target in (_FUNCTIONS if node.op == "call_function" else _METHODS if node.op == "call_method" else ())
    value = _value(node)
    if not known or "out" in node.kwargs or not isinstance(value, torch.Tensor):
        return False
    if not all(isinstance(size, int) for size in value.shape) or value.numel() > _MOST_ELEMENTS:
        return False
    return not is_written(node, value)


def is_written(node: fx.Node, value: torch.Tensor) -> bool:
    """Whether anything in the program writes to a tensor, or to a view of it.

    This graph has writes (`mask[0] = True`) as nodes whose result nobody reads. PyTorch counts them on fake tensors, too, but those through `.data`.
    """
    return value.is_inference() or value._version > 0 or any(user.target is _DATA for user in node.users)


def _judged(nodes: list[fx.Node], sizes: tuple[Any, ...]) -> tuple[bool, bool]:
    """Whether a mask hides nothing; whether it lets each query see the keys up to its own number alone."""
    values: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
        for node in nodes:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
            call: Any = node.target if node.op == "call_function" else getattr(torch.Tensor, str(node.target))
            values[node] = call(*args, **kwargs)
        mask = values[nodes[-1]]
        if mask.dtype == torch.bool:
            visible = mask
        elif bool(((mask == 0) | (mask == -torch.inf) | (mask == torch.finfo(mask.dtype).min)).all()):
            visible = mask == 0
        else:
            return False, False
        up_to_own = torch.ones(sizes, dtype=torch.bool).tril()
        return bool(visible.all()), visible.shape[-2:] == up_to_own.shape and bool((visible == up_to_own).all())


def _on_cpu(argument: Any) -> Any:
    if isinstance(argument, torch.device) or (isinstance(argument, str) and argument.partition(":")[0] == "cuda"):
        return torch.device("cpu")
    return argument


def _leave_out(node: fx.Node, *, causal: bool) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    for position, name, value in ((_MASK, "attn_mask", None), (_CAUSAL, "is_causal", causal)):
        if len(args) > position:
            args[position] = value
        else:
            kwargs[name] = value
    node.args, node.kwargs = tuple(args), kwargs
