"""Complex numbers that are only moved, between Fourier transforms for example, as pairs of real and imaginary part: as they lie in PyTorch's memory.

A graph computes with the two parts as tensors of their own (`complex_numbers`), and has to take them apart behind a transform of PyTorch's and put
them together before the next. Where all that stands between is a slice, a shift, zeros around them or a sum, the same on the pairs is one operator
for two, and neither copy is needed. A step of `neuralop.FNO` (4 layers, 4 images of 64 x 64) spends 18 of its 118 ms with those (AMD EPYC of family
25, model 17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of, call_beside
from ort_backend.lowering.kernels.kernel_choice import slow_kernels_may_go
from ort_backend.lowering.kernels.pair_choice import reads_pairs
from ort_backend.lowering.splitting.partition import view_chain
from ort_backend.target import OrtTarget

aten = torch.ops.aten

Arguments = dict[str, Any]


class _Move(NamedTuple):
    """An operator that does the same with real and imaginary parts.

    Attributes:
        complex: The names of its complex arguments.
        arguments: From its arguments, with the complex ones as pairs already, and the rank of its (first) complex argument or result: the arguments
            for pairs; None where it cannot be taken for pairs.
        shrinks: Whether it has less elements than what it reads: better done with pairs also where the parts are read behind it.
        grows: Whether it has more: better done with pairs also where the parts stand before it.
    """

    complex: tuple[str, ...]
    arguments: Callable[[Arguments, int], Arguments | None]
    shrinks: bool = False
    grows: bool = False


def _same(given: Arguments, rank: int) -> Arguments | None:
    return given


def _along(given: Arguments, rank: int) -> Arguments | None:
    """Of the same dimension, counted from the front."""
    return {**given, "dim": given["dim"] % rank}


def _along_new(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "dim": given["dim"] % (rank + 1)}


def _along_many(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "dims": [one % rank for one in given["dims"]]} if given["dims"] else None


def _permuted(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "dims": [*(one % rank for one in given["dims"]), rank]}


def _transposed(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "dim0": given["dim0"] % rank, "dim1": given["dim1"] % rank}


def _sliced_back(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "dim": given["dim"] % rank, "input_sizes": [*given["input_sizes"], 2]}


def _padded(given: Arguments, rank: int) -> Arguments | None:
    return {**given, "pad": [0, 0, *given["pad"]]} if given["value"] == 0 else None


def _cloned(given: Arguments, rank: int) -> Arguments | None:
    return given if given["memory_format"] in (None, torch.contiguous_format, torch.preserve_format) else None


def _added(given: Arguments, rank: int) -> Arguments | None:
    return None if isinstance(given["alpha"], complex) else given


def _scaled(given: Arguments, rank: int) -> Arguments | None:
    return None if isinstance(given["other"], complex) else given


_MOVES = {
    aten.slice.Tensor: _Move(("self",), _along, shrinks=True),
    aten.roll.default: _Move(("self",), _along_many),
    aten.flip.default: _Move(("self",), _along_many),
    aten.permute.default: _Move(("self",), _permuted),
    aten.transpose.int: _Move(("self",), _transposed),
    aten.unsqueeze.default: _Move(("self",), _along_new),
    aten.squeeze.dim: _Move(("self",), _along),
    aten.select.int: _Move(("self",), _along, shrinks=True),
    aten.clone.default: _Move(("self",), _cloned),
    aten.alias.default: _Move(("self",), _same),
    aten.neg.default: _Move(("self",), _same),
    aten.add.Tensor: _Move(("self", "other"), _added),
    aten.sub.Tensor: _Move(("self", "other"), _added),
    aten.mul.Scalar: _Move(("self",), _scaled),
    aten.div.Scalar: _Move(("self",), _scaled),
    aten.copy.default: _Move(("src",), _same),
    aten.slice_scatter.default: _Move(("self", "src"), _along, grows=True),
    aten.slice_backward.default: _Move(("grad_output",), _sliced_back, grows=True),
    aten.constant_pad_nd.default: _Move(("self",), _padded, grows=True),
}
# Products with real numbers: the complex factor may be either.
_PRODUCTS = {aten.mul.Tensor, aten.div.Tensor}
# What reads no element.
_READ_SIZES = {
    *(aten.new_empty_strided.default, aten.new_zeros.default, aten.zeros_like.default, aten.empty_like.default),
    *(aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default, aten.sym_storage_offset.default),
}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default, aten.full.default}


def move_pairs(graph: fx.Graph, target: OrtTarget) -> int:
    """Rewrites, in place, on the CPU, what moves complex numbers between pairs; returns how many operators."""
    if not slow_kernels_may_go(target):
        return 0
    # Views of arguments stay: they are taken of what the user gave.
    moves = {node: move for node in graph.nodes if (move := _move(node)) is not None and not _is_view_of_argument(node)}
    zeros = {node for node in graph.nodes if _is_zeros(node)}
    if not moves:
        return 0
    pairs = {node for node in graph.nodes if _is_complex(node) and (node.op == "placeholder" or reads_pairs(node))} | zeros
    ends = {node for node in graph.nodes if node.op == "output" or node.target in _READ_SIZES or reads_pairs(node)}
    while lost := [node for node, move in moves.items() if not _pays(node, move, moves.keys() | pairs, moves.keys() | ends)]:
        for node in lost:
            del moves[node]
    written: dict[fx.Node, fx.Node] = {}
    for node, move in moves.items():
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            written[node] = _rewrite(graph, node, move, written, zeros)
    for node in moves:
        if others := [user for user in node.users if user not in moves]:
            with graph.inserting_before(node), node.meta["val"].fake_mode:
                whole = call_beside(graph, node, aten.view_as_complex.default, written[node])
            whole.meta["val"] = node.meta["val"]  # in the same order in memory
            for user in others:
                user.replace_input_with(node, whole)
    for node in reversed(moves):
        graph.erase_node(node)
    return len(moves)


def _is_view_of_argument(node: fx.Node) -> bool:
    return view_chain(node, through_copies=False)[-1].op == "placeholder"


def _is_complex(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.is_complex() and value.device.type == "cpu"


def _is_zeros(node: fx.Node) -> bool:
    """Whether a node is nothing but zeros, like a complex tensor if like any."""
    if node.target not in _ZEROS or not _is_complex(node):
        return False
    given = arguments_of(node)
    is_like_other = node.target is aten.zeros_like.default and getattr(given["self"].meta["val"], "dtype", None) != node.meta["val"].dtype
    return given.get("fill_value", 0) == 0 and not is_like_other


def _move(node: fx.Node) -> _Move | None:
    """How a node moves complex numbers, if it does and can do so with pairs."""
    if not _is_complex(node):
        return None
    value, given = node.meta["val"], arguments_of(node) if isinstance(node.target, torch._ops.OpOverload) else {}
    target: Any = node.target
    move = _product(target, given) if target in _PRODUCTS else _MOVES.get(target)
    if move is None or any(not _is_complex(given[name]) or given[name].meta["val"].dtype != value.dtype for name in move.complex):
        return None
    if node.target is aten.copy.default and given["src"].meta["val"].shape != value.shape:
        return None
    rank = _rank(move, given)
    return move if rank > 0 and move.arguments(given, rank) is not None else None


def _product(target: Any, given: Arguments) -> _Move | None:
    """A product of a complex tensor with a real number, or a real tensor of the same precision, or such a quotient."""
    names = ("self", "other") if target is aten.mul.Tensor else ("self",)
    for name in names:
        other = given["other" if name == "self" else "self"]
        real = other.meta.get("val") if isinstance(other, fx.Node) else other
        if _is_complex(given[name]) and (isinstance(real, (int, float)) or _has_dtype(real, given[name].meta["val"].dtype.to_real())):
            return _Move((name,), _same)
    return None


def _has_dtype(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == dtype


def _rank(move: _Move, given: Arguments) -> int:
    return given[move.complex[0]].meta["val"].dim()


def _pays(node: fx.Node, move: _Move, before: Any, behind: Any) -> bool:
    """Whether the numbers are pairs where the operator has most of them."""
    come = all(source in before for source in _sources(node, move))
    go = all(user in behind for user in node.users)
    return (come or move.grows) and (go or move.shrinks)


def _sources(node: fx.Node, move: _Move) -> Iterator[fx.Node]:
    given = arguments_of(node)
    return (given[name] for name in move.complex)


def _rewrite(graph: fx.Graph, node: fx.Node, move: _Move, written: dict[fx.Node, fx.Node], zeros: set[fx.Node]) -> fx.Node:
    """The operator on pairs."""
    given = arguments_of(node)
    rank = _rank(move, given)
    for name in move.complex:
        given[name] = _pairs(graph, node, given[name], written, zeros)
    if node.target is aten.copy.default:
        return given["src"]
    if node.target in _PRODUCTS:
        for name in {"self", "other"} - {*move.complex}:
            if isinstance(given[name], fx.Node) and given[name].meta["val"].dim() > 0:
                given[name] = call_beside(graph, node, aten.unsqueeze.default, given[name], -1)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    made = move.arguments(given, rank)
    assert made is not None
    args = [made[one.name] for one in schema if not one.kwarg_only]
    return call_beside(graph, node, node.target, *args, **{one.name: made[one.name] for one in schema if one.kwarg_only})


def _pairs(graph: fx.Graph, beside: fx.Node, source: fx.Node, written: dict[fx.Node, fx.Node], zeros: set[fx.Node]) -> fx.Node:
    """The pairs of what an operator reads."""
    if source in written:
        return written[source]
    if source not in zeros:
        return call_beside(graph, beside, aten.view_as_real.default, source)
    if source.target is aten.zeros_like.default:
        return call_beside(graph, beside, aten.zeros_like.default, _pairs(graph, beside, source.args[0], written, zeros))  # type: ignore[arg-type]
    value = source.meta["val"]
    sizes = [*arguments_of(source)["size"], 2]
    return call_beside(graph, beside, aten.zeros.default, sizes, dtype=value.dtype.to_real(), device=value.device)
