"""Rows read from a batch of tables, and added to them, by an index of each table's own: what GatherND and ScatterND are for."""

from __future__ import annotations

import torch

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("rows_of(Tensor self, Tensor index, int batch) -> Tensor")
_library.define("add_to_rows(Tensor self, Tensor index, Tensor rows, int batch) -> Tensor")


def _places(table: torch.Tensor, index: torch.Tensor, batch: int) -> tuple[torch.Tensor, ...]:
    """The index of each of the first dimensions of a table."""
    ranges = (torch.arange(size, device=index.device) for size in table.shape[:batch])
    return *(one.view(-1, *[1] * (index.dim() - 1 - i)) for i, one in enumerate(ranges)), index


def _rows_of(table: torch.Tensor, index: torch.Tensor, batch: int) -> torch.Tensor:
    return table[_places(table, index, batch)]


def _add_to_rows(table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor, batch: int) -> torch.Tensor:
    return table.index_put(_places(table, index, batch), rows, accumulate=True)


_library.impl("rows_of", _rows_of, "CompositeImplicitAutograd")
_library.impl("add_to_rows", _add_to_rows, "CompositeImplicitAutograd")

# (*batch, *index, *row) of a table (*batch, count, *row): `table[b, index[b, ...]]`, for an index (*batch, *index) and each `b` of the first `batch`
# dimensions, which both have.
ROWS_OF = torch.ops.ort_training.rows_of.default
# The table with `table[b, index[b, ...]] += rows[b, ...]`.
ADD_TO_ROWS = torch.ops.ort_training.add_to_rows.default
