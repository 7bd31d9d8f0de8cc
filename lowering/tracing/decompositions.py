"""The decomposition table that AOTAutograd gets: core + added - kept whole.

`core_aten_decompositions()` as it is gives silently wrong gradients for attention on CPU and twice the backward kernels. Rule here:
what has a lowering of ours stays whole, so that writing one is all it takes to keep an operator whole (`older_torch.py` has what is put right first).

Whatever the table, AOTAutograd takes apart what has a Python kernel for CompositeImplicitAutograd: `upsample_*` (into gathers), `lstm`, `gru`,
`matmul`, `one_hot`, `dropout` (into `native_dropout`), `hardshrink`, ... (read in torch 2.13).

Two traps of other tables: `lift_fresh` as a no-op breaks every `torch.tensor(...)` literal in a model, and the references for `diagonal_scatter`
and `uniform` write `prims.copy_to` (a mutation in a functional graph) and `prims.uniform` (another stream of random numbers).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.utils._python_dispatch import _disable_current_modes

from ort_backend.lowering import registry
from ort_backend.lowering.tracing import foreach, older_torch, result_layouts
from ort_backend.lowering.tracing.recurrent_layers import whole_recurrent_layers

aten = torch.ops.aten

# Decompositions that the core table lacks.
_ADDED = (
    aten.rrelu_with_noise_backward.default,  # the noise is an input: nothing random about it; no lowering anywhere
    aten.native_group_norm_backward.default,  # in the core table of some versions only
)

# In the core table, and yet whole whether or not there is a lowering.
_WHOLE = (
    # The decomposition returns the attention matrix where the backward operator expects the log-sum-exp: wrong gradients.
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten.detach.default,  # a reference: its decomposition is another one
)


def _unsafe_split(self: torch.Tensor, split_size: int, dim: int = 0) -> list[torch.Tensor]:
    count = max((self.shape[dim] + split_size - 1) // split_size, 1) if split_size else 1
    sizes = [split_size] * (int(count) - 1)
    return aten.unsafe_split_with_sizes.default(self, [*sizes, self.shape[dim] - sum(sizes)], dim)


def _logit(self: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    return torch.log(self / (1 - self)) if eps is None else decomposition_table[aten.logit.default](self, eps)


def _index_put(self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor, accumulate: bool = False) -> Any:
    """One number where a mask of the whole tensor is set, as `x[x < 0] = 0` writes it, is a selection; the rest stays whole."""
    mask = indices[0]
    if accumulate or values.dim() or len(indices) > 1 or mask is None or mask.dtype is not torch.bool or mask.dim() != self.dim():
        return NotImplemented
    return aten.masked_fill.Tensor(self, mask, values)


_OURS: dict[torch._ops.OpOverload, Callable[..., Any]] = {
    # PyTorch's selects by the sign of each element.
    aten.log_sigmoid_backward.default: lambda grad_output, self, buffer: grad_output * torch.sigmoid(-self),
    aten.index_put.default: _index_put,
    # PyTorch's selects between the numbers and bounds, also where there are none.
    aten.logit.default: _logit,
    # PyTorch's gives views, and autograd forbids to write to several of one operator: that is what "unsafe" leaves out.
    aten.unsafe_split.Tensor: _unsafe_split,
    # PyTorch's kernel refuses memory that is not PyTorch's own, such as that of a session's results. When it is copied no result can tell.
    aten._lazy_clone.default: lambda self: self.clone(),
}


class Table(Mapping[torch._ops.OpOverload, Callable[..., Any]]):
    """`table()`, made when AOTAutograd first looks into it: where it has a compiled graph in its cache, no lowering is imported."""

    @functools.cached_property
    def _table(self) -> dict[torch._ops.OpOverload, Callable[..., Any]]:
        with _disable_current_modes():  # those of the trace, under which a tensor that a module makes for itself would be a fake one
            return table()

    def __getitem__(self, op: torch._ops.OpOverload) -> Callable[..., Any]:
        return self._table[op]

    def __iter__(self) -> Iterator[torch._ops.OpOverload]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def table() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The decompositions by operator.

    Nothing random is decomposed: the draws of a step must stay PyTorch's own, in the order of the program.
    """
    whole = {*registry.registered(), *_WHOLE}
    taken_apart = {op: decomposition for op, decomposition in {**_core(), **_added()}.items() if op not in whole and not _is_random(op)}
    return {
        **taken_apart,
        **_OURS,
        **foreach.decompositions(),
        **older_torch.decompositions(),
        **_by_dynamo(),
        **result_layouts.decompositions(taken_apart),
    }


def _by_dynamo() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """What Dynamo of torch 2.13 writes in place of `x.addcmul_(y, z, value=v)` and `x.addcdiv_`, as in a step of Adam: an operator of inductor's."""
    fma = getattr(torch.ops.prims, "fma", None)  # there from the first one on
    return {} if fma is None else {fma.default: lambda a, b, c: a * b + c}


@contextlib.contextmanager
def lstm_as_steps(*, onednn: bool = False) -> Iterator[None]:
    """While AOTAutograd traces: recurrent layers are whole, and what PyTorch's decomposition still takes apart does not become `mkldnn_rnn_layer`.

    `onednn` says whether LSTMs in float32 on the CPU may run by oneDNN's kernels (`onednn.py`), inside PythonOps.

    PyTorch chooses that operator if the input needs no gradient, even where the weights do; traced, it keeps no workspace for its backward and
    fails in every backend (seen in torch 2.13 with `backend="aot_eager"`).
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        with whole_recurrent_layers(onednn=onednn):
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@functools.cache
def _core() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """What of the core table can appear in a functional graph, without the composites that are taken apart anyway.

    Read from the attribute, which has aten's: read as a dict the table looks for composites in every namespace first, 80 ms each time.
    """
    core = core_aten_decompositions()
    return {
        op: decomposition
        for op, decomposition in getattr(core, "decomp_table", core).items()
        if isinstance(op, torch._ops.OpOverload) and op in decomposition_table and not op._schema.is_mutable
    }


def _added() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    return {op: decomposition_table[op] for op in _ADDED if op in decomposition_table}


def _is_random(op: torch._ops.OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags
