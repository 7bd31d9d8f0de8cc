"""A call of a user's autograd.Function as a pair of opaque operators, which AOTAutograd leaves whole.

`call` stands in Dynamo's graph. AOTAutograd traces through it and through `_Inner`, so that the joint graph has one `function_forward` and
one `function_backward`, linked by a handle. In the ONNX graph they become `PythonOp` and `PythonOpGrad` (`function_op`); what is here
also runs them where the graph runs in eager PyTorch.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ort_backend.lowering.functions import function_run
from ort_backend.lowering.functions.function_behaviour import behaviour_of, fake_mode_of
from ort_backend.lowering.functions.function_site import SITES, Site, Slot
from ort_backend.lowering.fx_nodes import graph_modules
from ort_backend.lowering.tracing import second_derivatives

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("function_forward(Tensor[] tensors, SymInt[] ints, int site) -> Tensor[]")
_library.define("function_backward(Tensor?[] gradients, Tensor handle, Tensor[] kept, SymInt[] sizes, int site) -> Tensor[]")

FORWARD = torch.ops.ort_training.function_forward.default
BACKWARD = torch.ops.ort_training.function_backward.default

# Python has effects that no graph shows: neither call may be dropped because nobody uses its results.
torch.fx.node.has_side_effect(FORWARD)
torch.fx.node.has_side_effect(BACKWARD)


def call(site: Site) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The function that stands in Dynamo's graph: takes the site's tensors, then its integers; returns the tensors among its results."""

    def apply(*values: Any) -> tuple[torch.Tensor, ...]:
        count = site.tensor_count
        # A tensor inside a container gets no gradient, as in eager PyTorch.
        tensors = [value if place is not None else value.detach() for value, place in zip(values[:count], site.differentiable)]
        # Autograd lets a Function change a view if that is all it returns, and this one returns its handle.
        alone = len(site.behaviour.results) == 1
        views = {i: tensors[i] for i in site.behaviour.dirty if alone and tensors[i]._is_view()}
        for i, view in views.items():
            tensors[i] = view.clone()
        results = _Inner.apply(site, values[count:], *tensors)[:-1]
        results = tuple(results[i] for i in site.behaviour.last) or results
        written = {id(tensors[i]): view.copy_(tensors[i]) for i, view in views.items()}
        return tuple(written.get(id(result), result) for result in results) if written else results

    apply.__name__ = apply.__qualname__ = site.cls.__name__
    apply.site = site  # type: ignore[attr-defined]
    return apply


def write_to_arguments(gm: torch.fx.GraphModule) -> bool:
    """Whether Functions in Dynamo's graph write to tensors that they get, which autograd is to know of although it happens in their forward."""
    nodes = [node for module in graph_modules(gm) for node in module.graph.nodes]
    sites = [site for node in nodes if isinstance(site := getattr(node.target, "site", None), Site)]
    return any(site.behaviour.mutated for site in sites) or any(node.kwargs.get("dirty_idx") for node in nodes)


def sources(graph: torch.fx.Graph) -> str:
    """Source that defines the opaque calls of Dynamo's graph under the names that its printed code has for them."""
    found = [(name, value.site) for name, value in graph.python_code("self").globals.items() if isinstance(getattr(value, "site", None), Site)]
    return "\n".join(_source(name, site) for name, site in found)


def _source(name: str, site: Site) -> str:
    arguments = ", ".join(map(_written, site.template))
    if "<" in site.name or site.cls.__module__ == "__main__" or "..." in arguments:
        return f"def {name}(*values):\n    raise NotImplementedError('write: the tensors that {site.name}.apply({arguments}) returns')\n"
    outer = site.cls.__qualname__.split(".")[0]
    call = f"    made = {site.cls.__qualname__}.apply({arguments})\n"
    tensors = "    return [one for one in (made if isinstance(made, tuple) else (made,)) if isinstance(one, torch.Tensor)]\n"
    return f"from {site.cls.__module__} import {outer}\ndef {name}(*values):\n{call}{tensors}"


def _written(argument: Any) -> str:
    if isinstance(argument, Slot):
        return f"values[{argument.index}]" if argument.kind == "tensor" else "..."
    plain = (bool, int, float, str, type(None))
    simple = isinstance(argument, plain) or (isinstance(argument, tuple) and all(isinstance(part, plain) for part in argument))
    return repr(argument) if simple else "..."


class _Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, site: Site, ints: Sequence[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *outputs, handle = FORWARD(list(tensors), list(ints), site.id)
        known = site.behaviour
        count = len(known.tensors)
        for i, value in zip(known.mutated, outputs[count:]):
            tensors[i].copy_(value)
        outputs = [tensors[i] if i is not None else out for i, out in zip(known.returned or [None] * count, outputs)]
        ctx.mark_dirty(*[tensors[i] for i in known.dirty])
        ctx.site = site
        ctx.sizes = [size for i, tensor in enumerate(tensors) if _announced(site, i) for size in tensor.shape]
        kept = [outputs[i] for i in known.kept_outputs if known.returned[i : i + 1] in ((), (None,))]
        ctx.save_for_backward(handle, *[tensors[i] for i in known.kept_inputs], *kept)
        ctx.mark_non_differentiable(handle, *[outputs[i] for i in known.non_differentiable])
        ctx.set_materialize_grads(False)
        return (*outputs, handle)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        site, (handle, *kept) = ctx.site, ctx.saved_tensors
        made = iter(BACKWARD(list(gradients[:-1]), handle, kept, ctx.sizes, site.id))
        return (None, None, *[next(made) if _announced(site, i) else None for i in range(site.tensor_count)])


def _announced(site: Site, index: int) -> bool:
    return site.needs_gradient(index) and site.behaviour.gradients[index]


# -- on fake tensors


@torch.library.register_fake("ort_training::function_forward", lib=_library)
def _(tensors: Sequence[torch.Tensor], ints: Sequence[Any], site: int) -> list[torch.Tensor]:
    sizes: list[Any] = [size for tensor in tensors for size in tensor.shape]
    known = {size.node.expr: size for size in sizes if isinstance(size, torch.SymInt)}
    outputs = _behaviour(SITES[site], tensors, ints).outputs
    results = [result.empty([_in_this_trace(size, known) for size in result.shape]) for result in outputs]
    return [*results, torch.empty((), dtype=torch.int64, device="cpu")]


def _in_this_trace(size: Any, known: Mapping[Any, torch.SymInt]) -> Any:
    """A size that another trace may have found out, as one of this trace, whose tensors have the sizes `known`.

    AOTAutograd traces twice. Its tangents have the sizes of the first trace's results: where a result of the second has them as well, the
    forward reads them from a tangent.
    """
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return known[expression] if expression in known else size.node.shape_env.create_symintnode(expression, hint=None)


def _behaviour(site: Site, tensors: Sequence[torch.Tensor], ints: Sequence[Any]) -> Any:
    """What the site does; found out again where a graph is traced anew with other symbols."""
    signature = tuple(str(size) for tensor in tensors for size in tensor.shape)
    if signature != site.signature and (mode := fake_mode_of(tensors)) is not None:
        site.behaviour, site.signature = behaviour_of(site, tensors, ints, mode), signature
    return site.behaviour


@torch.library.register_fake("ort_training::function_backward", lib=_library)
def _(gradients: Any, handle: torch.Tensor, kept: Sequence[torch.Tensor], sizes: Sequence[Any], site: int) -> list[torch.Tensor]:
    known, made, remaining = SITES[site], [], iter(sizes)
    for i, (rank, dtype, device) in enumerate(known.inputs):
        if _announced(known, i):
            made.append(torch.empty(tuple(itertools.islice(remaining, rank)), dtype=dtype, device=device))
    return made


second_derivatives.refuse("function_backward", "an opaque autograd.Function", _library)


# -- in eager PyTorch

_numbers = itertools.count()
_pending: dict[int, function_run.Pending] = {}


@torch.library.impl(_library, "function_forward", "CompositeExplicitAutograd")
def run_forward(tensors: Sequence[torch.Tensor], ints: Sequence[int], site: int) -> list[torch.Tensor]:
    """What `FORWARD` does, for a caller that is not to go through PyTorch's dispatcher, in which autograd is off."""
    known = SITES[site]
    inputs = [tensor.detach() for tensor in tensors]
    given = dict(enumerate(tensors)) if known.behaviour.goes_by_tensors else None
    outputs, pending = function_run.forward(known, inputs, ints, keep=any(known.needs), given=given)
    key, memory = next(_numbers), np.array(0)
    if pending is not None:
        memory[()] = key
        _pending[key] = pending
        weakref.finalize(memory, _pending.pop, key, None)
    # Autograd will hang its graph on what is returned, and the graph holds the handle: what the ctx holds must be other tensors.
    return [*(output.detach() for output in outputs), torch.from_numpy(memory)]


@torch.library.impl(_library, "function_backward", "CompositeExplicitAutograd")
def run_backward(gradients: Any, handle: torch.Tensor, kept: Sequence[torch.Tensor], sizes: Sequence[int], site: int) -> list[torch.Tensor]:
    """What `BACKWARD` does."""
    return function_run.backward(SITES[site], _pending[int(handle)], gradients)


def leave_backward(handle: torch.Tensor, kept: Sequence[torch.Tensor], sizes: Sequence[int], site: int) -> list[torch.Tensor]:
    """What stands for the results of `BACKWARD` where no gradient arrives."""
    return function_run.unreached(SITES[site], _pending[int(handle)])
