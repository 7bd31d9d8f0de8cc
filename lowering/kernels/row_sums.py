"""Rows added to a table by their indices, by PyTorch, in the memory where the table lies: a gradient that a session has made.

ONNX Runtime's ScatterND copies the table first, as no output of a graph may lie in the memory of what it is computed from: of GPT-2's gradient of the
embedding that is 154 MB twice, and 40 ms; 512 rows take PyTorch's `index_add_` 40 microseconds.
"""

from __future__ import annotations

import torch

IN_PLACE = "it writes where a gradient lies that a session has made"

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("add_rows(Tensor table, Tensor indices, Tensor rows) -> Tensor")
_library.define("zero_table(Tensor rows, SymInt count) -> Tensor")


def _add_rows(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """As PyTorch's tracer sees it, which compiled autograd shows the graph once more."""
    return table.index_add(0, indices.reshape(-1), rows.reshape(-1, table.shape[1]))


def write_rows(table: torch.Tensor, indices: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What runs for `ADD_ROWS`."""
    return table.index_add_(0, indices.reshape(-1), rows.reshape(-1, table.shape[1]))


_library.impl("add_rows", _add_rows, "CompositeImplicitAutograd")
_library.impl("zero_table", lambda rows, count: rows.new_zeros(count, rows.shape[-1]), "CompositeImplicitAutograd")

# The table, (count, width), with `table[indices[i]] += rows[i]` for every index: indices of any shape, rows of that shape and the width. Nothing else
# may read the table.
ADD_ROWS = torch.ops.ort_training.add_rows.default
# (count, width) zeros to add rows of that width to.
ZERO_TABLE = torch.ops.ort_training.zero_table.default
