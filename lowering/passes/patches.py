"""Convolutions of patches, no pixel in two of them, and of single pixels as products of matrices: a row for each patch, a column for each channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.kernels.channels_last import to_first, to_last
from ort_backend.lowering.passes.picture_writer import Writer

aten = torch.ops.aten


class _Matrices(NamedTuple):
    """The two factors.

    Attributes:
        patches: A row of numbers for each patch.
        filters: (output channels, numbers of a patch), in the same order.
    """

    patches: fx.Node
    filters: fx.Node


def write(writer: Writer, node: fx.Node, *, image_last: bool) -> fx.Node:
    """The convolution, with the channels last.

    Args:
        writer: What writes the graph.
        node: The convolution.
        image_last: Whether its image has the channels last too, or (N, C, ...) as it lies.
    """
    given = arguments_of(node)
    patches, filters = _matrices(writer, node, image_last)
    columns = writer.permute(filters, [1, 0], node)
    shape = [patches.meta["val"].shape[0], filters.meta["val"].shape[0]]
    if given["bias"] is None:
        product = _product(writer, node, patches, columns)
    else:
        product = writer.call(node, aten.addmm.default, given["bias"], patches, columns, shape=shape)
    return writer.view(product, [*_counts(writer, node), shape[1]], node)


def write_backward(writer: Writer, node: fx.Node, *, image_last: bool) -> tuple[fx.Node | None, ...]:
    """Its gradients: of the image, with the channels last, the filters and the bias; None for those that nobody asked for."""
    given = arguments_of(node)
    weight = given["weight"].meta["val"].shape
    patches, filters = _matrices(writer, node, image_last)
    gradient = writer.view(writer.picture(given["grad_output"], node), [-1, weight[0]], node)
    wanted = given["output_mask"]
    of_image = _of_image(writer, node, _product(writer, node, gradient, filters)) if wanted[0] else None
    of_filters = None
    if wanted[1]:
        of_filters = _product(writer, node, writer.permute(gradient, [1, 0], node), patches)
        if image_last and math.prod(weight[2:]) > 1:
            of_filters = writer.view(of_filters, [weight[0], *weight[2:], weight[1]], node)
            of_filters = writer.permute(of_filters, to_first(len(weight)), node)
        else:
            of_filters = writer.view(of_filters, list(weight), node)
    of_bias = writer.call(node, aten.sum.dim_IntList, gradient, [0], shape=weight[:1]) if wanted[2] else None
    return of_image, of_filters, of_bias


def _product(writer: Writer, node: fx.Node, left: fx.Node, right: fx.Node) -> fx.Node:
    return writer.call(node, aten.mm.default, left, right, shape=[left.meta["val"].shape[0], right.meta["val"].shape[1]])


def _matrices(writer: Writer, node: fx.Node, image_last: bool) -> _Matrices:
    given = arguments_of(node)
    image, weight = given["input"], given["weight"]
    outputs, channels, *size = weight.meta["val"].shape
    if math.prod(size) == 1:
        return _Matrices(writer.view(writer.picture(image, node), [-1, channels], node), writer.view(weight, [outputs, channels], node))
    if image_last:
        weight = writer.permute(weight, to_last(len(size) + 2), node)
        image = writer.picture(image, node)
    patches = writer.view(image, _blocks(writer, node, size, image_last), node)
    patches = writer.permute(patches, _patch_by_patch(len(size), image_last), node)
    numbers = channels * math.prod(size)
    return _Matrices(writer.view(patches, [-1, numbers], node), writer.view(weight, [outputs, numbers], node))


def _blocks(writer: Writer, node: fx.Node, size: Sequence[int], image_last: bool) -> list[Any]:
    """The sizes of the image, each dimension of its planes as the number of patches and their size."""
    images, *counts = _counts(writer, node)
    planes = [n for pair in zip(counts, size) for n in pair]
    channels = arguments_of(node)["weight"].meta["val"].shape[1]
    return [images, *planes, channels] if image_last else [images, channels, *planes]


def _patch_by_patch(dims: int, image_last: bool) -> list[int]:
    """The permutation of `_blocks` that puts the numbers of a patch beside each other."""
    first = 1 if image_last else 2
    counts, sizes = range(first, first + 2 * dims, 2), range(first + 1, first + 2 * dims, 2)
    return [0, *counts, *sizes, 2 * dims + 1] if image_last else [0, *counts, 1, *sizes]


def _counts(writer: Writer, node: fx.Node) -> list[Any]:
    """How many images there are, and patches in each dimension."""
    given = arguments_of(node)
    size = given["weight"].meta["val"].shape[2:]
    source = given["input"]
    images, *planes = writer.sizes(source)
    return [images, *(n if k == 1 else n // k for n, k in zip(planes[1:], size))]


def _of_image(writer: Writer, node: fx.Node, of_patches: fx.Node) -> fx.Node:
    """The gradient of an image with the channels last, from that of the patches."""
    given = arguments_of(node)
    size = given["weight"].meta["val"].shape[2:]
    images, channels, *planes = writer.sizes(given["input"])
    if math.prod(size) > 1:
        order = _patch_by_patch(len(size), image_last=True)
        blocks = _blocks(writer, node, size, image_last=True)
        of_patches = writer.view(of_patches, [blocks[d] for d in order], node)
        of_patches = writer.permute(of_patches, [order.index(d) for d in range(len(order))], node)
    return writer.view(of_patches, [images, *planes, channels], node)
