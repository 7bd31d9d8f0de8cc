"""What waits between a forward and its backward in one session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ort_backend.runtime import fsdp
from ort_backend.runtime.python_op import RunState


class PendingRun:
    """One forward that waits for its backward: the session's state at the `YieldOp`, and how to get there again."""

    __slots__ = (
        *("addresses", "agent", "args", "arguments", "guard", "key", "memory", "python"),
        *("random", "redraw", "state", "undefined", "versions", "will_be_released"),
    )

    def __init__(self, agent: Any, state: Any, python: RunState | None, args: list[Any], versions: list[int], read: Sequence[int]) -> None:
        self.agent: Any = agent
        self.state = state
        self.python = python  # what users' Functions keep
        self.random: list[torch.Tensor] | None = None  # the generators before it, where the session draws from them
        self.args: list[Any] | None = args
        self.versions = versions
        # What the backward reads where it lies: kept for as long, also when the user gives a tensor other memory (`tensor.data = other`).
        self.memory = [args[i].untyped_storage() for i in read]
        self.addresses = [memory.data_ptr() for memory in self.memory]
        # A user's Function may wait for other processes: whether it runs again must not depend on which address FSDP gets in each of them.
        self.will_be_released = python is not None and fsdp.gives_back(self.memory)
        self.undefined: frozenset[int] = frozenset()  # tangents that autograd has no gradient for, and fills with zeros
        self.guard: Any = None
        self.key = 0
        # Under `torch.autograd.graph.saved_tensors_hooks`: how many of `args` are the forward's, and the generators before the draws behind them.
        self.arguments: int | None = None
        self.redraw: list[torch.Tensor] | None = None

    def rest(self) -> None:
        """Gives up all but what the forward takes to run again: its arguments, without the draws behind them."""
        self.state, self.memory, self.addresses = None, [], []
        if self.args is not None:
            del self.args[self.arguments :]

    def is_released(self) -> bool:
        """Whether some of that memory has been given back or replaced, which only `resize_` on the storage itself does."""
        return self.will_be_released or [memory.data_ptr() for memory in self.memory] != self.addresses


def versions_of(tensors: Sequence[Any], places: Sequence[int]) -> list[int]:
    """How often tensors were written to; nobody counts that of those made in `inference_mode`."""
    try:
        return [tensors[i]._version for i in places]
    except RuntimeError:
        return [0 if tensors[i].is_inference() else tensors[i]._version for i in places]
