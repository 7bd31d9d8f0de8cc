"""Nothing stays of a run that only tries a user's code out: what it writes to, casts, draws and adds to gradients is taken back.

The attributes of objects are `object_state`'s.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Watch(TorchDispatchMode):
    """Sees whether anything is drawn from a random generator, and remembers what is written to, but for `own` tensors of the run."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.is_random = False
        self._known = {id(tensor) for tensor in own}
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        if func._schema.is_mutable or "batch_norm" in func._opname:  # the schema of `native_batch_norm` does not tell of its running averages
            with unset_fake_temporarily():
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor) and id(leaf) not in self._known:
                        self._known.add(id(leaf))
                        self._before.append((leaf, leaf.detach().clone()))
        return func(*args, **(kwargs or {}))

    def put_back(self) -> None:
        """Undoes the writes, such as a BatchNorm's into its counter of batches: a fake mode computes with numbers that are there for real."""
        with unset_fake_temporarily(), torch.no_grad():
            for tensor, before in self._before:
                if tensor.shape == before.shape:  # not an `out=` that was empty
                    with torch.autograd._unsafe_preserve_version_counter(tensor):
                        tensor.copy_(before)


@contextlib.contextmanager
def casts_not_kept() -> Iterator[None]:
    """Autocast keeps its casts of parameters until it ends: those of this run are not for the calls that follow."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextlib.contextmanager
def own_random_state() -> Iterator[None]:
    """Of Python and numpy; PyTorch draws nothing on fake tensors."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def gradients_put_back() -> Iterator[Mapping[int, Any]]:
    """What a backward adds to the `.grad` of parameters itself, as that of a reversible block does, is taken back, and hooks on these
    do not run: nothing of this run may stay.

    Every call of autograd on this thread comes by `torch.autograd._engine_run_backward` (read in torch 2.13). Yields what fills with the leaves
    that such calls reach: empty for a backward that makes none.
    """
    thread, original = threading.get_ident(), torch.autograd._engine_run_backward
    before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
    hooks: list[tuple[Any, Any]] = []

    def run(outputs: Sequence[Any], gradients: Any, retain: Any, create: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return original(outputs, gradients, retain, create, inputs, *args, **kwargs)
        retain = True  # the graph may be one that the program has made before, and goes back over in the call itself
        leaves = list(_leaves(outputs))
        for leaf in leaves:
            if id(leaf) not in before:
                before[id(leaf)] = (leaf, leaf.grad)
                leaf.grad = None
                found = [one for one in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if one]
                hooks.extend((one, one.copy()) for one in found)
                for one in found:
                    one.clear()
        if not kwargs.get("accumulate_grad") or not all(isinstance(one, torch.Tensor) for one in inputs):
            return original(outputs, gradients, retain, create, inputs, *args, **kwargs)
        # Past the nodes that add to `.grad`: DDP has hooks on these.
        inputs = inputs or leaves
        made = original(outputs, gradients, retain, create, tuple(inputs), *args, **{**kwargs, "accumulate_grad": False}) if inputs else ()
        for one, gradient in zip(inputs, made):
            if gradient is not None:
                one.grad = gradient if one.grad is None else one.grad + gradient
        return made

    with mock.patch.object(torch.autograd, "_engine_run_backward", run):
        try:
            yield before
        finally:
            for leaf, gradient in before.values():
                leaf.grad = gradient
            for one, kept in hooks:
                one.update(kept)


def _leaves(outputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The tensors into whose `.grad` a backward from tensors, or gradient edges, may write."""
    waiting = [
        one.node if isinstance(one, torch.autograd.graph.GradientEdge) else torch.autograd.graph.get_gradient_edge(one).node for one in outputs
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            yield leaf
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        waiting.extend(following)
