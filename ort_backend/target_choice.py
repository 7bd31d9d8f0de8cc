"""The ONNX Runtime that a graph is for: the provider that was asked for, or the one of the tensors."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ort_backend import compiled_autograd
from ort_backend.errors import LoweringError, OptionError
from ort_backend.lowering.kernels import dense_products, onednn
from ort_backend.options import CompileOptions
from ort_backend.runtime import capabilities
from ort_backend.target import OrtTarget

log = logging.getLogger(__name__)

_warned: set[tuple[str, str]] = set()  # options, and what has been said of them


def target_of(settings: CompileOptions, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> OrtTarget:
    """The target of Dynamo's graph.

    Raises:
        LoweringError: its tensors are on a device that no provider here works on, or on several.
        OptionError: the provider that was asked for cannot read them.
    """
    for name, value in zip((node.name for node in gm.graph.nodes if node.op == "placeholder"), example_inputs):
        if isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "cuda"):
            raise LoweringError(f"input {name} is on device '{value.device}', but ONNX Runtime runs here on the CPU and on CUDA")
    tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
    tensors += [node.meta["example_value"] for node in gm.graph.nodes if isinstance(node.meta.get("example_value"), torch.Tensor)]
    devices = {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    if len(devices) > 1:
        raise LoweringError(f"tensors on CUDA devices {sorted(devices)} meet in one graph, which runs on one device")
    provider = settings.provider
    if provider is None:
        provider = "CUDAExecutionProvider" if devices else "CPUExecutionProvider"
    if devices and provider == "CPUExecutionProvider":
        raise OptionError("provider='CPUExecutionProvider' cannot read tensors on a CUDA device: leave the option out, or move model and inputs")
    if provider == "CPUExecutionProvider" and settings.provider_options:
        _warn_once(
            "provider_options", f"the {provider} takes none: {', '.join(settings.provider_options)} changes nothing; the CPU has session_options"
        )
    kernels = "onnxruntime" if settings.strict else settings.kernels
    made = capabilities.target(provider, settings.opset, settings.custom_op_libraries, next(iter(devices), 0))
    captures = settings.cuda_graphs and _can_capture(provider)
    python_op = made.python_op and not captures and not compiled_autograd.is_on()
    target = dataclasses.replace(
        made, kernels=kernels, python_op=python_op, cuda_graphs=captures, threads=settings.threads or torch.get_num_threads()
    )
    has_onednn = onednn.is_on()
    multiplies_bfloat16 = has_onednn and dense_products.processor_multiplies_bfloat16()
    mkl, slow_mkl = dense_products.mkl_is_at_home(), dense_products.mkl_is_slow()
    return dataclasses.replace(target, onednn=has_onednn, mkl=mkl, slow_mkl=slow_mkl, bfloat16_products=multiplies_bfloat16)


def _can_capture(provider: str) -> bool:
    if provider == "CUDAExecutionProvider":
        return True
    _warn_once("cuda_graphs", f"the {provider} has none to capture; the option changes nothing")
    return False


def _warn_once(option: str, text: str) -> None:
    if (option, text) not in _warned:
        _warned.add((option, text))
        log.warning("%s: %s", option, text)
