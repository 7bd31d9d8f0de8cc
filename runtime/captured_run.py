"""A session that runs over the same memory at every call, as a CUDA graph needs it.

ONNX Runtime captures the kernels of a run once, under an id of the caller's, and replays them from then on over the addresses that they had. So:

- An input that lies where it lay (a parameter, a value that another captured session keeps for the backward) is read there. One that has been
  elsewhere is copied, before each run, into memory of its own.
- A result lies in memory that every run writes. One that somebody still holds when the next run comes keeps that memory; from then on this result
  is handed out as a copy.

Each input and each result changes its kind once at most, and every change costs one more capture, so that a training loop settles within a few steps.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C
from torch.multiprocessing.reductions import StorageWeakRef

from ort_backend.runtime.binding import NATIVE, Input, Output, carried, dtypes_of, ort_device, outward, told
from ort_backend.runtime.session import ORT_ERRORS, Session

_ids = itertools.count(1)  # 0 is ONNX Runtime's own; one in the whole process, as captures are kept by thread


def can_capture(inputs: Sequence[Input]) -> bool:
    """Whether all inputs are tensors whose memory ONNX Runtime reads as it is."""
    return all(one.dtype in NATIVE for one in inputs)


class CaptureError(Exception):
    """A run could not be captured."""


class CapturedRun:
    """Runs of a session whose inputs and outputs are tensors of sizes that never change, on one device.

    Args:
        session: One that was made for it.
        inputs: Its inputs.
        outputs: All fetches of tensors, which name every output of the ONNX graph.
        devices: The device of each output of the ONNX graph.
        shapes: The shape of each output of the ONNX graph.
        moving: Indices of the inputs that lie elsewhere at every call.
    """

    def __init__(
        self,
        session: Session,
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        devices: Sequence[torch.device],
        shapes: Sequence[Sequence[int]],
        moving: frozenset[int],
    ) -> None:
        self._session = session
        self._positions = [one.position for one in inputs]
        self._beside = [told(one.dtype) for one in inputs]
        self._results = [(one.index, outward(one)) for one in outputs]
        kinds = zip(shapes, dtypes_of(outputs), devices, strict=True)
        self._kinds = [(shape, carried(dtype), told(dtype), device) for shape, dtype, device in kinds]
        self._devices = [ort_device(device) for device in devices]
        self._names = (session.inputs, session.outputs)
        self._moving, self._copied = set(moving), set[int]()
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        """What belongs to one opening of the session."""
        self._opening = 0
        self._feeds, self._fetches = C.OrtValueVector(), C.OrtValueVector()
        self._addresses: list[int] = []
        self._buffers: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}
        self._handed_out: list[StorageWeakRef | None] = []

    def __call__(self, values: Sequence[Any]) -> list[torch.Tensor]:
        """The results of a run with the inputs at their positions in `values`.

        Raises:
            CaptureError: ONNX Runtime failed while it captured.
            SessionError: ONNX Runtime failed in a run that it had captured.
        """
        with self._lock:
            tensors = [values[position] for position in self._positions]
            run = self._session.open().run_with_ortvaluevector
            is_new = self._settle(tensors)
            copies = {i: torch.empty_like(self._memory[i]) for i in self._copied}

            def replay() -> None:
                for i, buffer in self._buffers.items():
                    buffer.copy_(tensors[i])
                run(self._options, self._names[0], self._feeds, self._names[1], self._fetches, self._devices)
                for i, copy in copies.items():
                    copy.copy_(self._memory[i])

            try:
                self._session.call(replay)
            except ORT_ERRORS as error:
                failure = self._session.failure(error)
                raise (CaptureError(str(failure)) if is_new else failure) from None
            return self._hand_out(copies)

    def close(self) -> None:
        """Gives the memory back until the next call."""
        if self._lock.acquire(blocking=False):  # it may be this thread that runs: then the next call sees whether the session was closed
            self._forget()
            self._lock.release()

    def _settle(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Lets the next run be captured anew where the last capture reads or writes the wrong memory; returns whether it does."""
        if self._session.openings != self._opening:
            self._forget()
            self._opening = self._session.openings
        moved = {
            i
            for i, tensor in enumerate(tensors)
            if i not in self._moving and (not _lies_plain(tensor) or (self._addresses and tensor.data_ptr() != self._addresses[i]))
        }
        held = {i for i, reference in enumerate(self._handed_out) if reference is not None and not reference.expired()}
        if self._addresses and not moved and not held:
            return False
        self._moving |= moved
        self._copied |= held
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        for i in self._moving - self._buffers.keys():
            self._buffers[i] = self._fixed(tensors[i].shape, tensors[i].dtype, tensors[i].device)
        for i, (shape, dtype, _, device) in enumerate(self._kinds):
            if i in held or i not in self._memory:
                self._memory[i] = self._fixed(shape, dtype, device)
        self._bind(tensors)
        return True

    def _fixed(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._session.used(torch.empty(shape, dtype=dtype, device=device))

    def _bind(self, tensors: Sequence[torch.Tensor]) -> None:
        self._options = self._session.run_options([device for *_, device in self._kinds], capture=next(_ids))
        self._feeds, self._fetches = C.OrtValueVector(), C.OrtValueVector()
        for i, tensor in enumerate(tensors):
            fixed = self._buffers[i] if i in self._buffers else _unowned(tensor)
            self._feeds.push_back(torch._C._to_dlpack(fixed.view(torch.uint8) if self._beside[i] else fixed), *self._beside[i])
        for i, (_, _, beside, _) in enumerate(self._kinds):
            self._fetches.push_back(torch._C._to_dlpack(self._memory[i]), *beside)

    def _hand_out(self, copies: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        # Tensors with a storage of their own over the memory, so that it can be told when the last of them is gone.
        given = [copies[i] if i in copies else torch._C._from_dlpack(torch._C._to_dlpack(memory)) for i, memory in self._memory.items()]
        self._handed_out = [None if i in copies else StorageWeakRef(tensor.untyped_storage()) for i, tensor in enumerate(given)]
        return [given[index] if convert is None else convert(given[index]) for index, convert in self._results]


def _lies_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg()


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory without a claim to it: a claim would count as somebody who still holds a captured session's result.

    So does PyTorch's own `torch._inductor.cudagraph_trees` with its static inputs (read in torch 2.13).
    """
    size = tensor.numel() * tensor.element_size()
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, size)
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, 0, tensor.shape, tensor.stride())
