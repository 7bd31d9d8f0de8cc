"""Steps of any rule that is made of pointwise functions, operator by operator where the parameters lie, a part of them after the other.

A part is what stays in a processor's cache from the first operator to the last: a parameter, its states and its gradient come from memory once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("pointwise_step(Tensor[] written, Tensor[] read, Tensor[] scalars, str program) -> Tensor")
# For each parameter as many tensors of each list as the program names; what is written to lies alike. The result is the first that is.
POINTWISE_STEP = torch.ops.ort_training.pointwise_step.default

# Bytes of a tensor that are taken at once, for each thread: 5 % to 50 % faster than whole tensors of 4 and 16 MB, with half as many no gain (an Intel
# Xeon with 2 MB of L2 cache for a core, one thread, RMSprop).
_PART = 1 << 18
# Elements up to which tensors are put together.
_SMALL = 2048

# What a program may call, all with `out`.
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name)
    for name in (
        "abs", "add", "addcdiv", "addcmul", "clamp", "clone", "div", "exp", "lerp", "log", "maximum", "minimum", "mul", "neg", "pow", "reciprocal",
        "rsqrt", "sigmoid", "sign", "sqrt", "square", "sub", "tanh", "where",
    )
}  # fmt: skip


class Program(NamedTuple):
    """Calls in order: of a name in `FUNCTIONS`, its arguments, keywords, and where the result goes.

    Arguments are numbers and names: "w0" of the first tensor of a parameter that is written to, "r0" of one that is read, "t0" of one in between,
    "s0" of a tensor without dimensions, "n0" of the number in it.
    """

    calls: tuple[tuple[str, tuple[Any, ...], dict[str, Any], str], ...]
    written: int
    read: int
    scalars: int
    between: int

    def text(self) -> str:
        """The program as one argument of the operator."""
        return json.dumps(self)


class _Kernel(NamedTuple):
    run: Callable[..., Any]  # of the tensors of one parameter, in the order w, r, t, s, n
    widths: tuple[int, int, int, int]
    numbers: tuple[int, ...]  # the scalars of which the program takes the number
    part: int  # bytes that are taken at once, for each thread


@functools.cache
def _kernel(text: str) -> _Kernel:
    calls, *widths = json.loads(text)
    graph = fx.Graph()
    used = {one for _, args, kwargs, _ in calls for one in (*args, *kwargs.values()) if isinstance(one, str) and one[0] == "n"}
    numbers = tuple(sorted(int(name[1:]) for name in used))
    written, read, scalars, between = widths
    names = [f"{kind}{i}" for kind, count in (("w", written), ("r", read), ("t", between), ("s", scalars)) for i in range(count)]
    values: dict[Any, Any] = {name: graph.placeholder(name) for name in (*names, *(f"n{i}" for i in numbers))}
    for name, args, kwargs, out in calls:
        given = [values[one] if isinstance(one, str) else one for one in args]
        keywords = {key: values[one] if isinstance(one, str) else one for key, one in kwargs.items()}
        if name == "clone":
            graph.call_method("copy_", (values[out], given[0]))
        else:
            graph.call_function(FUNCTIONS[name], tuple(given), {**keywords, "out": values[out]})
    graph.output(None)
    return _Kernel(fx.GraphModule({}, graph).forward, (written, read, scalars, between), numbers, _PART if len(calls) > 1 else 1 << 62)


def pointwise_step(written: Sequence[Tensor], read: Sequence[Tensor], scalars: Sequence[Tensor], program: str) -> Tensor:
    """What runs for `POINTWISE_STEP`."""
    kernel = _kernel(program)
    per_written, per_read, per_scalars, _ = kernel.widths
    columns: list[Sequence[Any]] = [
        tensors[k::width] for tensors, width in ((written, per_written), (read, per_read), (scalars, per_scalars)) for k in range(width)
    ]
    first = per_written + per_read  # of the scalars
    columns += [[one.item() for one in columns[first + k]] for k in kernel.numbers]
    rows = list(zip(*columns, strict=True))
    step = _Step(kernel, written)
    small = [row for row in rows if row[0].numel() <= _SMALL]
    with torch.no_grad():
        if len(small) > 3 and all(len({float(row[k]) for row in small}) == 1 for k in range(first, len(columns))):
            rows = [row for row in rows if row[0].numel() > _SMALL]
            joined = [_flatten([row[k] for row in small]) for k in range(first)]
            step.take(*joined, *small[0][first:])
            for k in range(per_written):
                own = [row[k] for row in small]
                torch._foreach_copy_(own, _unflatten(joined[k], own))
        for row in rows:
            step.take(*row)
    return written[0]


# Both in torch 2.13: `torch._utils._flatten_dense_tensors` and `_unflatten_dense_tensors`.
_flatten: Any = torch._C._nn.flatten_dense_tensors
_unflatten: Any = torch._C._nn.unflatten_dense_tensors


class _Step:
    """What the tensors of one call have in common: those in between."""

    def __init__(self, kernel: _Kernel, written: Sequence[Tensor]) -> None:
        self._kernel = kernel
        self._own, self._others = kernel.widths[:2]
        self._part = kernel.part // written[0].element_size() * torch.get_num_threads()
        largest = min(self._part, max(max(one.numel() for one in written), len(written) // self._own * _SMALL))
        self._between = [written[0].new_empty(largest) for _ in range(kernel.widths[3])]
        self._shaped: dict[Any, list[Tensor]] = {}

    def take(self, *row: Any) -> None:
        """Runs the program for one parameter; scalars and numbers stand last."""
        first, count, stride = row[0], row[0].numel(), row[0].stride()
        tensors, rest = row[: self._own + self._others], row[self._own + self._others :]
        tensors = (*tensors[: self._own], *(lying_like(one, first) for one in tensors[self._own :]))
        if count <= self._part:
            key = (first.shape, stride)
            if key not in self._shaped:
                self._shaped[key] = [one.as_strided(*key) for one in self._between]
            self._kernel.run(*tensors, *self._shaped[key], *rest)
            return
        places = [one.storage_offset() for one in tensors]
        size = -(-count // -(-count // self._part))  # parts alike, as many as needed
        for start in range(0, count, size):
            length = min(size, count - start)
            parts = [one.as_strided((length,), (1,), place + start) for one, place in zip(tensors, places, strict=True)]
            self._kernel.run(*parts, *(one[:length] for one in self._between), *rest)


def lying_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, or a copy of it that lies in memory as another of its sizes does, for what walks through memory whatever the strides say."""
    return tensor if tensor.stride() == other.stride() else torch.empty_like(other).copy_(tensor)
