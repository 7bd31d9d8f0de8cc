"""Whose parameters a compiled graph runs with: when that model dies, the graph's session goes too.

Dynamo keeps compiled code for as long as the user's function lives, since another instance of the module may use it. What the code holds
need not be kept: a session is made again at the next call, should there be one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

_UNKNOWN, _NONE = -2, -1


class Owner:
    """Watches one parameter of the model that ran last."""

    def __init__(self, release: Callable[[], None]) -> None:
        # The callback of a weak reference lives in the reference, which lives in the graph: it must not hold the graph in turn.
        self._release = weakref.WeakMethod(release)
        self._position = _UNKNOWN
        self._parameter: weakref.ref[torch.Tensor] | None = None

    def watch(self, args: Sequence[Any]) -> None:
        """To be called with the graph's arguments before each run; costs a comparison."""
        if self._parameter is None:
            if self._position == _UNKNOWN:
                self._position = next((i for i, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter)), _NONE)
            if self._position >= 0:
                self._hold(args[self._position])
        elif self._parameter() is not args[self._position]:
            self._hold(args[self._position])

    def _hold(self, parameter: torch.Tensor) -> None:
        if torch.__future__.get_swap_module_params_on_conversion():  # by `torch.utils.swap_tensors`, which refuses what has weak references
            return
        owner = weakref.ref(self)

        def died(reference: weakref.ref[torch.Tensor], is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
            if is_finalizing():  # the modules are empty by then
                return
            watcher = owner()
            if watcher is not None and watcher._parameter is reference:
                watcher._parameter = None
                release = watcher._release()
                if release is not None:
                    release()

        self._parameter = weakref.ref(parameter, died)
