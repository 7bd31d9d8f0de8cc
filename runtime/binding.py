"""torch tensors <-> OrtValues over the same memory.

A tensor is either handed over by DLPack, so that the OrtValue keeps its memory alive, or lent: ONNX Runtime gets the address for one run, which takes
a third of the time. No copy is made of a contiguous tensor of a dtype that ONNX has, nor of one that enters with its dimensions permuted so that it
is. These cost one copy each, on the way in: any other that is not contiguous, and one with a pending negation or conjugation. Complex tensors travel
as pairs of reals, 8-bit floats as bytes. So do bools, where ONNX Runtime does not know DLPack's (before 1.32): it is told beside them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from onnxruntime.capi import _pybind_state as C
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]  # as inductor: a third of the time of `torch.empty`

from ort_backend.errors import OrtBackendError

_from_dlpack = torch._C._from_dlpack
_to_dlpack = torch._C._to_dlpack
# The dtypes whose memory ONNX Runtime reads as it is.
NATIVE = {
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip


def _is_told_of_bools() -> bool:
    try:
        C.OrtValueVector().push_back(np.zeros(1, np.uint8).__dlpack__(), True)
    except TypeError:  # it takes no such argument
        return False
    return True


_TOLD_OF_BOOLS = _is_told_of_bools()


def told(dtype: torch.dtype | None) -> tuple[bool, ...]:
    """What `push_back` takes behind the memory of a tensor of this dtype: that its bytes are bools, where they travel so."""
    return (True,) if dtype is torch.bool and _TOLD_OF_BOOLS else ()


def carried(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the memory in which a tensor of this one travels."""
    if dtype.is_complex:
        return dtype.to_real()
    return dtype if dtype in NATIVE and not told(dtype) else torch.uint8


@dataclasses.dataclass(frozen=True)
class Input:
    """One input of an ONNX graph.

    Attributes:
        position: Where it stands among the callable's arguments.
        dtype: The tensor's dtype; None for a Python number (a symbolic size, or what was computed of one).
        may_be_empty: Whether the tensor may have no elements.
        as_shape: Whether a Python int n travels as the shape of a tensor without elements: (n, 0, 0), or (0, -n, 0) if it is negative.
        may_be_negated: Whether a negation of the tensor may be pending (`Tensor.is_neg`), which is no part of its memory.
        device: The tensor's device; a number travels in memory of the CPU.
        permutation: How the tensor's dimensions are permuted on the way in, to be contiguous as it lies (a view, no copy).
    """

    position: int
    dtype: torch.dtype | None
    may_be_empty: bool = False
    as_shape: bool = False
    may_be_negated: bool = False
    device: torch.device = torch.device("cpu")
    permutation: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Output:
    """One result of a callable.

    Attributes:
        source: `"fetch"`: an output of the ONNX graph; `"argument"`: the callable's own argument, passed through; `"constant"`: `value`;
            `"argument view"`, `"result view"`: a view of an argument, or of another result, which `value` makes of it and the arguments;
            `"made"`: what `value` makes of `parts`.
        index: Which fetch, argument or result.
        dtype: The fetched tensor's dtype; None for a number.
        value: The constant, or the function that makes the view.
        permutation: How the fetched tensor's dimensions are to be permuted to give the strides that PyTorch expects (a view, no copy).
        shape: The shape that the fetched tensor is to have (a view, no copy).
        parts: What it is made of.
    """

    source: Literal["fetch", "argument", "constant", "argument view", "result view", "made"]
    index: int = 0
    dtype: torch.dtype | None = None
    value: Any = None
    permutation: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    parts: tuple[Output, ...] = ()


def ort_device(device: torch.device) -> Any:
    """torch's device as ONNX Runtime names it."""
    index, memory = device.index or 0, C.OrtDevice.default_memory()
    if device.type != "cuda":
        return C.OrtDevice(C.OrtDevice.cpu(), memory, index)
    return C.OrtDevice(C.OrtDevice.cuda(), memory, *_NVIDIA, index)


def _nvidia() -> tuple[int, ...]:
    """The argument that says whose GPU it is: a build without CUDA, to which a provider is added, does not know. 1.19.2 takes no such argument."""
    vendor = 0x10DE  # PCI's number, as ONNX Runtime has it
    try:
        C.OrtDevice(C.OrtDevice.cuda(), C.OrtDevice.default_memory(), vendor, 0)
    except TypeError:
        return ()
    return (vendor,)


_NVIDIA = _nvidia()


def feeder(inputs: Sequence[Input]) -> Callable[[Sequence[Any]], Any]:
    """A function from a callable's arguments to the `OrtValueVector` of a graph's inputs."""
    plan = [(one.position, told(one.dtype), _inward(one)) for one in inputs]
    count = len(plan)

    def feed(args: Sequence[Any]) -> Any:
        values = C.OrtValueVector()
        values.reserve(count)
        for position, beside, convert in plan:
            tensor = args[position]
            if convert is not None:
                tensor = convert(tensor)
            elif not tensor.is_contiguous():
                tensor = tensor.contiguous()
            values.push_back(_to_dlpack(tensor), *beside)
        return values

    return feed


def lender(inputs: Sequence[Input]) -> Callable[[Sequence[Any]], tuple[Any, Any]]:
    """As `feeder`, of tensors that are lent for one run: what the function returns beside the vector is to live until that is over.

    No output of a plain session lies in an input's memory: ONNX Runtime allocates graph outputs, or is given them.
    """
    plan = [(one.position, _inward(one)) for one in inputs]
    types = [_element_type(torch.uint8 if one.as_shape else one.dtype) for one in inputs]
    devices = [ort_device(one.device) for one in inputs]
    if None in types:
        feed = feeder(inputs)
        return lambda args: (feed(args), None)
    is_checked = False

    def lend(args: Sequence[Any]) -> tuple[Any, Any]:
        nonlocal is_checked
        if not is_checked:
            _check_dtypes(inputs, args)
            is_checked = True
        tensors = []
        for position, convert in plan:
            tensor = args[position]
            if convert is not None:
                tensor = convert(tensor)
            elif not tensor.is_contiguous():
                tensor = tensor.contiguous()
            tensors.append(tensor)
        values = C.OrtValueVector()
        values.push_back_batch(tensors, [one.data_ptr() or _ANYWHERE for one in tensors], types, [one.shape for one in tensors], devices)
        return values, tensors

    return lend


def _check_dtypes(inputs: Sequence[Input], args: Sequence[Any]) -> None:
    """Addresses tell ONNX Runtime nothing of what lies there: it would read what is not. Once, as no call changes the dtypes of another.

    Raises:
        OrtBackendError: a tensor has another dtype than the graph.
    """
    for one in inputs:
        if one.dtype is not None and args[one.position].dtype != one.dtype:
            raise OrtBackendError(f"a tensor of {args[one.position].dtype} came where the graph has one of {one.dtype}: a fake tensor's was wrong")


_NOTHING = np.zeros(1)
_ANYWHERE = _NOTHING.ctypes.data  # where tensors without elements lie: `push_back_batch` refuses their null pointers


def _element_type(dtype: torch.dtype | None) -> np.dtype[Any] | None:
    """What `push_back_batch` calls the elements of a tensor of this dtype, as it travels; None where it has no word for them."""
    if dtype is None or dtype is torch.bfloat16:
        return None
    return np.dtype(str(dtype if told(dtype) else carried(dtype)).removeprefix("torch."))


def _inward(one: Input) -> Callable[[Any], torch.Tensor] | None:
    dtype, order = one.dtype, one.permutation
    if order is not None:
        convert = _inward(dataclasses.replace(one, permutation=None)) or _resolved
        return lambda tensor: convert(tensor.permute(order))
    if one.as_shape:
        return lambda number: torch.empty((max(number, 0), max(-number, 0), 0), dtype=torch.uint8, device="cpu")
    if dtype is None:
        return _number
    if one.may_be_empty:
        convert = _inward(Input(one.position, dtype)) or _resolved
        return lambda tensor: convert(_with_strides(tensor))
    if dtype.is_complex:
        return lambda tensor: torch.view_as_real(tensor.resolve_conj().resolve_neg()).contiguous()
    if carried(dtype) is not dtype:
        return lambda tensor: tensor.resolve_neg().contiguous().view(torch.uint8)
    return _resolved if one.may_be_negated else None


def _number(number: float) -> torch.Tensor:
    """As the graph has it, whatever the user's default device and dtype are."""
    return torch.tensor(number, dtype=torch.float64 if isinstance(number, float) else None, device="cpu")


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_neg()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def _with_strides(tensor: torch.Tensor | None) -> torch.Tensor:
    """The tensor; a new one if it is empty: torch calls each of those contiguous, ONNX Runtime reads the strides."""
    if tensor is None:  # AOTAutograd hands it to a backward for the tokens of effects, which stand in the graph as empty tensors
        return torch.empty(0, device="cpu")
    return tensor if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def fetcher(outputs: Sequence[Output]) -> Callable[[Any, Sequence[Any]], list[Any]]:
    """A function from an `OrtValueVector` of fetches and the callable's arguments to its results."""
    collect = _collector(outputs)
    return lambda values, args: collect(values.to_dlpacks(_from_dlpack), args)


def _collector(outputs: Sequence[Output]) -> Callable[[Sequence[torch.Tensor], Sequence[Any]], list[Any]]:
    plan: list[tuple[Output, Any]] = [(one, _collector(one.parts) if one.source == "made" else outward(one)) for one in outputs]
    views = [(i, one) for i, one in enumerate(outputs) if one.source == "result view"]
    repeated = _repeated(outputs)

    def collect(tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for output, convert in plan:
            if output.source == "fetch":
                result = tensors[output.index]
                results.append(result if convert is None else convert(result))
            elif output.source == "argument view":
                results.append(output.value(args[output.index], args))
            elif output.source == "made":
                results.append(output.value(*convert(tensors, args)))
            else:
                results.append(args[output.index] if output.source == "argument" else output.value)
        for i, first in repeated:
            results[i] = results[first]
        for i, output in views:
            results[i] = output.value(results[output.index], args)
        return results

    return collect


def _repeated(outputs: Sequence[Output]) -> list[tuple[int, int]]:
    """The places of tensors that were results before, and where: a program that writes to one has written to the other, as autograd is to know."""
    places: dict[Output, int] = {}
    found = [(i, places.setdefault(one, i)) for i, one in enumerate(outputs) if one.source == "fetch" and one.dtype is not None]
    return [(i, first) for i, first in found if i != first]


def allocator(outputs: Sequence[Output], devices: Sequence[torch.device]) -> Callable[[Sequence[tuple[int, ...]], Any], list[Any]]:
    """A function that makes a graph's outputs in torch's memory before it runs.

    It takes the shape of each output of the ONNX graph, fills an empty `OrtValueVector` with the memory for them (lent), and returns the results,
    as `fetcher` would: `outputs` are all fetches of tensors, and name every output of the graph.
    """
    plan = [(one.index, outward(one)) for one in outputs]
    repeated, dtypes = _repeated(outputs), dtypes_of(outputs)
    kinds = [(carried(dtype), told(dtype), device) for dtype, device in zip(dtypes, devices, strict=True)]
    types, places = [_element_type(dtype) for dtype in dtypes], [ort_device(device) for device in devices]
    is_lent = None not in types

    def allocate(shapes: Sequence[tuple[int, ...]], fetches: Any) -> list[Any]:
        memory = [
            _empty_strided_cpu(shape, _strides(shape), dtype) if device.type == "cpu" else torch.empty(shape, dtype=dtype, device=device)
            for shape, (dtype, _, device) in zip(shapes, kinds, strict=True)
        ]
        if is_lent:
            fetches.push_back_batch(memory, [one.data_ptr() or _ANYWHERE for one in memory], types, shapes, places)
        else:
            for tensor, (_, beside, _) in zip(memory, kinds):
                fetches.push_back(_to_dlpack(tensor), *beside)
        results = [memory[index] if convert is None else convert(memory[index]) for index, convert in plan]
        for i, first in repeated:
            results[i] = results[first]
        return results

    return allocate


@functools.lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides[: len(shape)]))


def dtypes_of(outputs: Sequence[Output]) -> list[torch.dtype]:
    """The dtype of each output of the ONNX graph, all of which are tensors that `outputs` fetch."""
    by_index = {one.index: one.dtype for one in outputs if one.dtype is not None}
    return [by_index[i] for i in range(len(by_index))]


def outward(output: Output) -> Callable[[torch.Tensor], Any] | None:
    """Makes the result of a fetched tensor. `detach`, as autograd forbids to write to a view that was taken where no gradients are recorded."""
    dtype, order, shape = output.dtype, output.permutation, output.shape
    if dtype is None:
        return torch.Tensor.item
    if shape is not None:
        return lambda tensor: tensor.view(shape).detach()
    if dtype.is_complex:
        return lambda tensor: _permuted(torch.view_as_complex(_with_strides(tensor)), order).detach()
    if carried(dtype) is not dtype:
        return lambda tensor: _permuted(tensor.view(dtype), order).detach()
    return None if order is None else lambda tensor: tensor.permute(order).detach()


def _permuted(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    return tensor if order is None else tensor.permute(order)
