"""Operators that treat real and imaginary parts alike: their lowerings of real numbers serve complex ones, once for each part."""

from __future__ import annotations

import torch

from ort_backend.lowering.kernels.batched_rows import ADD_TO_ROWS, ROWS_OF
from ort_backend.lowering.registry import register_linear

aten = torch.ops.aten

# -- the same elements elsewhere

register_linear(
    *(aten.view.default, aten.view_copy.default, aten._unsafe_view.default, aten.reshape.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze_copy.default, aten.squeeze_copy.dim, aten.squeeze_copy.dims),
    *(aten.unsqueeze.default, aten.unsqueeze_copy.default, aten.permute.default, aten.permute_copy.default),
    *(aten.transpose.int, aten.transpose_copy.int, aten.t.default, aten.t_copy.default),
    *(aten.expand.default, aten.expand_copy.default, aten.repeat.default, aten.flip.default, aten.roll.default),
    *(aten.slice.Tensor, aten.narrow_copy.default, aten.select.int, aten.split_with_sizes.default, aten.unfold.default),
    *(aten.unbind.int, aten.unbind_copy.int),
    *(aten.diagonal.default, aten.diag_embed.default, aten.tril.default, aten.triu.default, aten.pixel_shuffle.default, aten.pixel_unshuffle.default),
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_select.default, aten.gather.default, aten.take.default, aten.masked_select.default),
    *(ROWS_OF, aten.embedding.default, aten.as_strided.default, aten.im2col.default),
    linear=("self", "weight"),
)
register_linear(aten.cat.default, aten.stack.default, linear=("tensors",))
register_linear(aten.constant_pad_nd.default, linear=("self", "value"))
register_linear(
    *(aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default),
    *(aten.replication_pad1d.default, aten.replication_pad2d.default, aten.replication_pad3d.default),
    linear=("self",),
)

# -- and their gradients

register_linear(
    *(aten.slice_backward.default, aten.select_backward.default, aten.diagonal_backward.default, aten.unfold_backward.default),
    *(aten.embedding_dense_backward.default, aten.masked_scatter_backward.default, aten.col2im.default),
    linear=("grad_output", "grad_in", "self"),
)

register_linear(
    *(aten.reflection_pad1d_backward.default, aten.reflection_pad2d_backward.default, aten.reflection_pad3d_backward.default),
    *(aten.replication_pad1d_backward.default, aten.replication_pad2d_backward.default, aten.replication_pad3d_backward.default),
    linear=("grad_output",),
)

# -- elements put into another tensor

register_linear(
    *(aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default, aten.as_strided_scatter.default),
    *(aten.scatter.src, aten.scatter_add.default, aten.copy.default),
    linear=("self", "src"),
)
register_linear(
    *(aten.index_put.default, aten._unsafe_index_put.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    *(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, aten.scatter.value),
    linear=("self", "values", "value"),
)
register_linear(ADD_TO_ROWS, linear=("self", "rows"))
register_linear(aten.index_copy.default, aten.masked_scatter.default, aten.put.default, linear=("self", "source"))
register_linear(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, linear=("self", "other"))

# -- new tensors

register_linear(aten.full.default, aten.full_like.default, aten.new_full.default, linear=("fill_value",))
register_linear(aten.fill.Scalar, aten.fill.Tensor, linear=("value",))
register_linear(aten.scalar_tensor.default, linear=("s",))
register_linear(
    *(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default),
    aten._new_zeros_with_same_feature_meta.default,
    *(aten.ones.default, aten.ones_like.default, aten.new_ones.default, aten.eye.default, aten.eye.m),
    *(aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.empty_permuted.default),
    *(aten.new_empty.default, aten.new_empty_strided.default, aten.arange.start_step),
    linear=(),
)

# -- sums

register_linear(
    *(aten.neg.default, aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default),
    linear=("self",),
)
