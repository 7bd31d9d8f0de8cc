"""Pickles a compiled graph: its functions are this package's own, closures among them, which `pickle` alone does not take."""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import cloudpickle
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_OF_THIS_PROCESS = (torch.SymInt, torch.SymFloat, torch.SymBool, FakeTensor, fx.Node, fx.Graph, torch.nn.Module, torch._ops.HigherOrderOperator)


def dumps(graph: Any) -> bytes:
    """What `pickle.loads` makes the graph of, in this process or another.

    Raises:
        pickle.PicklingError: it holds something that means nothing in another process.
        Exception: whatever the pickling of what it holds raises.
    """
    made = io.BytesIO()
    _Pickler(made).dump(graph)
    return made.getvalue()


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, pytree.TreeSpec):
            return _spec_of, (pytree.tree_unflatten([0] * obj.num_leaves, obj),)
        if isinstance(obj, _OF_THIS_PROCESS):
            raise pickle.PicklingError(f"a {type(obj).__name__} is part of the compiled graph")
        if isinstance(obj, types.FunctionType) and obj.__module__ is None:
            # Source written for this graph. Without a module every module there is would be asked for it; transformers imports its models for that.
            obj.__module__ = __name__
        return super().reducer_override(obj)


def _spec_of(tree: Any) -> pytree.TreeSpec:
    return pytree.tree_flatten(tree)[1]


def _operator(namespace: str, name: str, overload: str) -> torch._ops.OpOverload:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
