"""A forward without a backward: one plain session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.runtime.binding import Input, Output, fetcher, lender, ort_device
from ort_backend.runtime.counts import RunCounts
from ort_backend.runtime.owner import Owner
from ort_backend.runtime.python_op import RunState
from ort_backend.runtime.session import ORT_ERRORS, Session


@dataclasses.dataclass(frozen=True)
class InferencePlan:
    """What a forward-only graph takes and gives.

    Attributes:
        inputs: The ONNX graph's inputs; positions count the callable's arguments first, then the draws.
        outputs: The callable's results.
        draws: Random tensors, drawn from PyTorch's generator in this order before the session runs, from the callable's arguments.
        fetch_devices: The device of each output of the ONNX graph that is fetched; others may stand behind those.
    """

    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    draws: tuple[Callable[[Sequence[Any]], torch.Tensor], ...] = ()
    fetch_devices: tuple[torch.device, ...] = ()


class InferenceGraph:
    """A boxed callable: takes a list of arguments, which it empties, and returns the list of results."""

    _boxed_call = True

    def __init__(self, session: Session | None, plan: InferencePlan, counts: RunCounts) -> None:
        self._session = session
        self._draws = plan.draws
        self._lend, self._fetch = lender(plan.inputs), fetcher(plan.outputs)
        self._devices = [ort_device(device) for device in plan.fetch_devices]
        self._names = session.outputs[: len(self._devices)] if session is not None else []
        self._run_options = session.run_options(plan.fetch_devices) if session is not None else None
        self._counts = counts
        self._owner = Owner(self.release)

    def __call__(self, args: list[Any]) -> list[Any]:
        self._counts.forward += 1
        self._owner.watch(args)
        everything = [*args, *(draw(args) for draw in self._draws)] if self._draws else args
        fetches = C.OrtValueVector()
        session = self._session
        if session is not None:
            feeds, _lent = self._lend(everything)
            run = session.open().run_with_ortvaluevector
            try:
                state = RunState(args, follows=False) if session.has_python_ops else None
                session.call(run, self._run_options, session.inputs, feeds, self._names, fetches, self._devices, state=state)
            except ORT_ERRORS as error:
                raise session.failure(error) from None
        results = self._fetch(fetches, everything)
        args.clear()
        return results

    def release(self) -> None:
        """Closes the session until the next call."""
        if self._session is not None:
            self._session.close()
