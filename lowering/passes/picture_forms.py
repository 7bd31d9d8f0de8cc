"""How operators on pictures and sequences are written with the channels as the last dimension."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import VIEWS, Convolution, arguments_of, convolution_of, nodes_in
from ort_backend.lowering.kernels.channels_last import CONVOLUTION, CONVOLUTION_BACKWARD, to_first, to_last
from ort_backend.lowering.kernels.channels_last_pooling import WITH_CHANNELS_LAST
from ort_backend.lowering.kernels.kernel_choice import faster_in_pytorch, pytorch_may_run
from ort_backend.lowering.passes import patches
from ort_backend.lowering.passes.picture_writer import Write, Writer, dims_of, permutation
from ort_backend.lowering.symbolic import have_same_sizes, hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)
# Operators for whose sake pictures may lie so.
REASONS = (*CONVOLUTIONS, *WITH_CHANNELS_LAST)
# Elementwise operators without the tag of these (torch 2.13).
_UNTAGGED = {
    aten.clone.default, aten.alias.default, aten.detach.default, aten._to_copy.default, aten.hardswish.default, aten.hardswish_backward.default,
    aten.hardtanh_backward.default, aten.hardsigmoid_backward.default, aten.softplus_backward.default, aten.elu_backward.default,
    aten.leaky_relu_backward.default, aten.log_sigmoid_backward.default, aten.mish_backward.default,
}  # fmt: skip
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_OF_SIZE_1 = {aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims}
_REDUCTIONS = {aten.sum.dim_IntList, aten.mean.dim}

# What a depthwise convolution gains, in elements copied for each of its result.
_SIDE_BY_SIDE = 1
# From so many channels, and elements, on PyTorch's kernels, which take channels at once, pool and resize pictures: fewer are not worth a call.
_AT_ONCE, _WORTH_A_CALL = 8, 1 << 17


@dataclasses.dataclass(frozen=True)
class Form:
    """How a node is written with the channels last.

    Attributes:
        write: Makes the node anew; returns its value in that order.
        pictures: Arguments that are wanted in that order. The others are the same, or small.
        is_picture: Whether the value is in that order; else it is the same as before.
        gain: Elements whose copy takes as long as what this form saves.
        is_reason: Whether pictures may lie so for the sake of this node.
    """

    write: Write
    pictures: tuple[fx.Node, ...] = ()
    is_picture: bool = True
    gain: int = 0
    is_reason: bool = False


def form_of(node: fx.Node, forms: dict[fx.Node, Form], target: OrtTarget) -> Form | None:
    """How a node is written with the channels last; None if it is not."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        of: Any = node.args[0]
        gives_pictures = of in forms and (of.target in _SPLITS or of.target in WITH_CHANNELS_LAST or node.args[1] == 0)
        return Form(_item, (of,)) if gives_pictures else None
    if node.target in CONVOLUTIONS:
        return _of_convolution(node, forms, target)
    if node.target in WITH_CHANNELS_LAST:
        return _of_pooling(node, target)
    value, source = node.meta.get("val"), next(iter(node.all_input_nodes), None)
    if source is not None and node.target in _SPLITS and dims_of(source) > 2:
        return Form(_split, (source,))
    if not isinstance(value, torch.Tensor) or source is None:
        return None
    if node.target in _REDUCTIONS:
        return _of_reduction(node, source)
    if value.dim() < 3:
        return None
    if node.target in _OF_SIZE_1:
        return Form(_of_size_1, (source,)) if dims_of(source) > 2 and min(_dims_of_size_1(node)) > 1 else None
    if node.target in VIEWS:
        keeps = dims_of(source) > 2 and have_same_sizes(source.meta["val"].shape[:2], value.shape[:2])
        return Form(_view, (source,)) if keeps else None
    if node.target is aten.expand.default:
        return Form(_expand) if dims_of(source) == value.dim() else None
    if node.target is aten.cat.default:
        return Form(_cat, tuple(one for one in nodes_in(node.args[0]) if dims_of(one) == value.dim()))
    if node.target is aten.slice.Tensor:
        return Form(_slice, (source,))
    if node.target is aten.slice_backward.default:
        return Form(_slice_backward, (source,))
    return _of_pointwise(node, value)


def _of_pointwise(node: fx.Node, value: torch.Tensor) -> Form | None:
    operator_: Any = node.target
    if not isinstance(operator_, torch._ops.OpOverload):
        return None
    is_pointwise = torch.Tag.pointwise in operator_.tags and torch.Tag.nondeterministic_seeded not in operator_.tags
    if not (is_pointwise or operator_ in _UNTAGGED) or operator_._schema.is_mutable:
        return None
    tensors = [one for one in node.all_input_nodes if isinstance(one.meta.get("val"), torch.Tensor)]
    full = tuple(one for one in tensors if have_same_sizes(one.meta["val"].shape, value.shape))
    return Form(_pointwise, full) if full else None


def _of_reduction(node: fx.Node, source: fx.Node) -> Form | None:
    given = arguments_of(node)
    dims = dims_of(source)
    if dims < 3 or not given["dim"]:
        return None
    reduced = {d % dims for d in given["dim"]}
    if given["keepdim"]:
        return Form(_reduction, (source,))
    kept = [to_last(dims).index(d) for d in range(dims) if d not in reduced]
    return Form(_reduction, (source,), is_picture=False) if kept == sorted(kept) else None


def _of_convolution(node: fx.Node, forms: dict[fx.Node, Form], target: OrtTarget) -> Form | None:
    one = convolution_of(node)
    if one is None or one.transposed or one.image.dtype is not torch.float32 or one.image.dim() not in (3, 4):
        return None
    given = arguments_of(node)
    image, backward = given["input"], node.target is aten.convolution_backward.default
    gradient = (given["grad_output"],) if backward else ()
    if _takes_patches(one):
        write = patches.write_backward if backward else patches.write
        as_it_lies = math.prod(one.weight.shape[2:]) > 1 and not _is_picture(image, forms) and not (backward and given["output_mask"][0])
        pictures = gradient if as_it_lies else (*gradient, image)
        return Form(functools.partial(write, image_last=not as_it_lies), pictures, is_reason=True)
    if not pytorch_may_run(target) or faster_in_pytorch(node, target) is None:
        return None
    gain = _SIDE_BY_SIDE * math.prod(map(hint, one.result.shape)) * (one.groups != 1)
    return Form(_convolution_backward if backward else _convolution, (*gradient, image), gain=gain, is_reason=True)


def _of_pooling(node: fx.Node, target: OrtTarget) -> Form | None:
    """Of what pools or resizes pictures."""
    pictures = tuple(one for one in node.all_input_nodes if isinstance(one.meta["val"], torch.Tensor))
    images = [one.meta["val"] for one in pictures]
    if not pytorch_may_run(target) or images[0].dtype not in (torch.float32, torch.float64):
        return None
    is_worth_it = max(math.prod(map(hint, one.shape)) for one in (*images, *_results(node))) >= _WORTH_A_CALL
    takes = all(one.dim() == 4 and hint(one.shape[1]) >= _AT_ONCE for one in images)
    return Form(_pooling, pictures, is_reason=True) if takes and is_worth_it else None


def _results(node: fx.Node) -> tuple[torch.Tensor, ...]:
    value = node.meta["val"]
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def _is_picture(node: fx.Node, forms: dict[fx.Node, Form]) -> bool:
    return (node in forms and forms[node].is_picture) or permutation(node) == to_first(dims_of(node))


def _takes_patches(one: Convolution) -> bool:
    """Whether no two filters see the same pixel, and all see one: a product of matrices, each row a patch."""
    sizes, filters = one.image.shape[2:], one.weight.shape[2:]
    if one.groups != 1 or {*one.padding} != {0} or {*one.dilation} != {1} or not all(isinstance(n, int) for n in one.weight.shape):
        return False
    strides = [*one.stride] * (len(filters) if len(one.stride) == 1 else 1)
    if math.prod(filters) == 1:
        return {*strides} == {1}
    return list(filters) == strides and all(isinstance(n, int) and n % k == 0 for n, k in zip(sizes, filters))


def _item(writer: Writer, node: fx.Node) -> fx.Node:
    of, index = node.args
    result: fx.Node = writer.last[of][index]  # type: ignore[index]
    return result


def _view(writer: Writer, node: fx.Node) -> fx.Node:
    source, sizes = node.args[:2]
    return writer.view(writer.picture(source, node), _with_channels_last(sizes), node)  # type: ignore[arg-type]


def _dims_of_size_1(node: fx.Node) -> list[int]:
    """The dimensions that come, of the result, or go, of the source."""
    source, given = (*arguments_of(node).values(),)
    dims = dims_of(node if node.target is aten.unsqueeze.default else source)
    return [d % dims for d in (given if isinstance(given, (list, tuple)) else [given])]


def _of_size_1(writer: Writer, node: fx.Node) -> fx.Node:
    operator_: Any = node.target
    dims = [d - 1 for d in _dims_of_size_1(node)]  # the channels were in front of them
    return writer.again(node, operator_, writer.picture(node.args[0], node), dims if operator_ is aten.squeeze.dims else dims[0])  # type: ignore[arg-type]


def _expand(writer: Writer, node: fx.Node) -> fx.Node:
    source, sizes = node.args[:2]
    return writer.again(node, aten.expand.default, writer.picture(source, node), _with_channels_last(sizes))  # type: ignore[arg-type]


def _with_channels_last(sizes: Any) -> list[Any]:
    images, channels, *others = sizes
    return [images, *others, channels]


def _cat(writer: Writer, node: fx.Node) -> fx.Node:
    given, dims = arguments_of(node), dims_of(node)
    # `torch.empty(0)` is put beside tensors of any number of dimensions.
    parts = [writer.picture(one, node) if dims_of(one) == dims else one for one in given["tensors"]]
    return writer.again(node, aten.cat.default, parts, _place(given["dim"], node))


def _slice(writer: Writer, node: fx.Node) -> fx.Node:
    source, dim, *others = (*arguments_of(node).values(),)
    return writer.again(node, aten.slice.Tensor, writer.picture(source, node), _place(dim, node), *others)


def _slice_backward(writer: Writer, node: fx.Node) -> fx.Node:
    gradient, sizes, dim, *others = node.args
    sizes = _with_channels_last(sizes)
    return writer.again(node, aten.slice_backward.default, writer.picture(gradient, node), sizes, _place(dim, node), *others)  # type: ignore[arg-type]


def _split(writer: Writer, node: fx.Node) -> tuple[fx.Node | None, ...]:
    source, sizes, dim = arguments_of(node).values()
    call = writer.call(node, node.target, writer.picture(source, node), sizes, _place(dim, source), shape=[])
    return writer.items(node, call, [[one.shape[d] for d in to_last(one.dim())] for one in node.meta["val"]])


def _place(dim: int, node: fx.Node) -> int:
    """Where a dimension of a picture is with the channels last."""
    return to_last(dims_of(node)).index(dim % dims_of(node))


def _pointwise(writer: Writer, node: fx.Node) -> fx.Node:
    dims = dims_of(node)

    def operand(one: fx.Node) -> fx.Node:
        return writer.spread(one, dims, node) if isinstance(one.meta.get("val"), torch.Tensor) else one

    args, kwargs = fx.map_arg((node.args, node.kwargs), operand)
    return writer.again(node, node.target, *args, **{name: one for name, one in kwargs.items() if name != "memory_format"})


def _reduction(writer: Writer, node: fx.Node) -> fx.Node:
    given = arguments_of(node)
    source: Any = node.args[0]
    order = to_last(dims_of(source))
    dims = sorted(order.index(d % len(order)) for d in given["dim"])
    return writer.again(node, node.target, writer.picture(source, node), dims, given["keepdim"], dtype=given["dtype"])


def _convolution(writer: Writer, node: fx.Node) -> fx.Node:
    given = arguments_of(node)
    settings = (given[name] for name in ("weight", "bias", "stride", "padding", "dilation", "groups"))
    return writer.again(node, CONVOLUTION, writer.picture(given["input"], node), *settings)


def _convolution_backward(writer: Writer, node: fx.Node) -> tuple[fx.Node | None, ...]:
    given = arguments_of(node)
    pictures = [writer.picture(given[name], node) for name in ("grad_output", "input")]
    settings = (given[name] for name in ("weight", "bias_sizes", "stride", "padding", "dilation", "groups", "output_mask"))
    shapes = [one.meta["val"].shape for one in (pictures[1], given["weight"])]
    call = writer.call(node, CONVOLUTION_BACKWARD, *pictures, *settings, shape=[])
    return writer.items(node, call, [shape if wanted else None for shape, wanted in zip((*shapes, shapes[1][:1]), given["output_mask"])])


def _pooling(writer: Writer, node: fx.Node) -> Any:
    operator_: Any = node.target
    given = fx.map_arg((*arguments_of(node).values(),), lambda one: writer.picture(one, node) if isinstance(one.meta["val"], torch.Tensor) else one)
    results = _results(node)
    if len(results) == 1:
        return writer.again(node, WITH_CHANNELS_LAST[operator_], *given)
    call = writer.call(node, WITH_CHANNELS_LAST[operator_], *given, shape=[])
    return writer.items(node, call, [[one.shape[d] for d in to_last(one.dim())] for one in results], [one.dtype for one in results])
