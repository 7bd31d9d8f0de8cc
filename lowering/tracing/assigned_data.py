"""`tensor.data = other` for a tensor that enters the graph, which Dynamo traces as `set_`: AOTAutograd's runtime does it behind the graph."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from unittest import mock

from torch._functorch._aot_autograd import schemas

_CHECK = "_check_if_mutation_can_be_in_graph"


@contextlib.contextmanager
def assigned_behind_the_graph() -> Iterator[None]:
    """While AOTAutograd traces: such an assignment is no error.

    AOTAutograd asks whether it can stand in the graph, and gives up where it cannot, although `_apply_input_mutations` knows how to do it behind a
    functional graph (read in torch 2.13). There the backward has what the forward read; inside the graph, as under `aot_eager`, it may
    have the new memory.
    """
    original = getattr(schemas, _CHECK, None)
    if original is None:
        yield
        return
    with mock.patch.object(schemas, _CHECK, functools.partial(_may_be_in_graph, original)):
        yield


def _may_be_in_graph(original: Callable[..., bool], *args: bool, **kwargs: bool) -> bool:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if given["mutates_storage_metadata"] and not given["keep_input_mutations"] and not given["mutation_inductor_storage_resize"]:
        return False
    return original(*args, **kwargs)
