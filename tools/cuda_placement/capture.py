"""The graphs of a workload as they would be traced on CUDA tensors, lowered for the CUDA provider; the model itself runs in eager PyTorch.

Dynamo traces the model on the CPU. Behind it, everything that AOTAutograd sees is moved: inputs become fake tensors on `cuda`, devices in the graph
become `cuda`. So autograd picks the operators of CUDA (its attention, its dropout), and the lowering sees what it would see on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ort_backend import compiler, direct_call
from ort_backend.lowering.functions.function_site import SITES, TensorResult

_run = fake_tensor.run_fallback_kernel
_CUDA, _CPU = torch.device("cuda:0"), torch.device("cpu")
# Functions that make a tensor where no device is given.
_FACTORIES = {
    torch.arange, torch.zeros, torch.ones, torch.empty, torch.full, torch.tensor, torch.as_tensor, torch.scalar_tensor, torch.eye, torch.linspace,
    torch.logspace, torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.tril_indices, torch.triu_indices,
    torch.hann_window, torch.hamming_window,
}  # fmt: skip


@contextlib.contextmanager
def as_on_cuda(attention: Callable[..., Any] | None = None) -> Iterator[None]:
    """Within, `backend="ort_training"` with the CUDA provider compiles graphs of CUDA tensors, and runs them in eager PyTorch on the CPU.

    Args:
        attention: What stands for `F.scaled_dot_product_attention` in the graphs: which kernels PyTorch would choose, it asks the device. None: the
            operators that PyTorch falls back to.
    """
    ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0]).pretend_cuda()
    trace = compiler.aot_module_simplified

    def traced(gm: fx.GraphModule, example_inputs: Sequence[Any], **callbacks: Any) -> Callable[..., Any]:
        mode = torch._guards.TracingContext.get().fake_mode
        assert mode is not None
        numbers = [_is_number(node) for node in gm.graph.find_nodes(op="placeholder")]
        inputs = [one if number else _on_cuda(one, mode) for one, number in zip(example_inputs, numbers, strict=True)]
        kept = {site: site.inputs for site in SITES.values()}  # autograd.Functions, as Dynamo saw them on the CPU
        for site in kept:
            site.inputs = tuple((rank, dtype, _CUDA) for rank, dtype, _ in site.inputs)
        with mock.patch.object(TensorResult, "empty", lambda self, shape: torch.empty(shape, dtype=self.dtype, device=_CUDA)):
            trace(_moved(gm, mode, attention), inputs, **callbacks)
        for site, inputs in kept.items():
            site.inputs = inputs
        return gm

    nothing = mock.patch.object(torch.cuda, "_lazy_init", lambda: None)  # some operators ask for it even of fake tensors
    never_direct = mock.patch.object(direct_call, "direct", lambda training, plan, compiled, *_: compiled)
    fallback = mock.patch.object(fake_tensor, "run_fallback_kernel", _fallback)
    with nothing, never_direct, fallback, mock.patch.object(compiler, "aot_module_simplified", traced):
        yield


def _is_number(placeholder: fx.Node) -> bool:
    """Whether Dynamo hands a Python number over as a tensor, which stays where it is."""
    return bool(placeholder.users) and all(user.target == "item" or _takes_number(user, placeholder) for user in placeholder.users)


def _takes_number(user: fx.Node, placeholder: fx.Node) -> bool:
    """Whether this is a call of a graph (under a checkpoint, say) to which the number is handed on, in Dynamo's dtype for one."""
    value = placeholder.meta.get("example_value")
    is_float = isinstance(value, torch.Tensor) and value.dtype == torch.float64 and value.dim() == 0
    return is_float and isinstance(user.target, torch._ops.HigherOrderOperator)


def _on_cuda(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return value
    moved = _at(value if isinstance(value, FakeTensor) else mode.from_tensor(value), mode, _CUDA)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(moved, value.requires_grad)
    return moved.requires_grad_(value.requires_grad)


def _at(fake: FakeTensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode, torch.no_grad():
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=device)


def _fallback(mode: FakeTensorMode, func: Any, flat_args: Sequence[Any], args_spec: Any, error: RuntimeError) -> Any:
    """An operator without a rule for fake tensors: it runs on zeros, for which there is only the CPU."""
    device = next((one.fake_device for one in flat_args if isinstance(one, FakeTensor) and one.fake_device == _CUDA), _CPU)
    args = [_at(one, mode, _CPU) if isinstance(one, FakeTensor) else one for one in flat_args]
    return torch.utils._pytree.tree_map(
        lambda one: _at(one, mode, device) if isinstance(one, FakeTensor) else one, _run(mode, func, args, args_spec, error)
    )


def _moved(gm: fx.GraphModule, mode: FakeTensorMode, attention: Callable[..., Any] | None) -> fx.GraphModule:
    """A copy of the graph, with those inside it, on the other device."""
    made = copy.deepcopy(gm)
    graphs = [module for module in made.modules() if isinstance(module, fx.GraphModule)]
    for module in graphs:
        for node in module.graph.nodes:
            node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _device)
            if attention is not None and node.target is torch.nn.functional.scaled_dot_product_attention:
                node.target = attention
            if node.op == "call_function" and node.target in _FACTORIES and node.kwargs.get("device") is None:
                node.kwargs = {**node.kwargs, "device": _CUDA}
            if node.op == "call_function" and node.target is operator.getitem:
                _indexed(node)
            if node.op == "call_function" and node.target in (torch.tensor, torch.as_tensor):
                _filled(node)
            if isinstance(node.meta.get("example_value"), torch.Tensor) and not (node.op == "placeholder" and _is_number(node)):
                node.meta["example_value"] = _on_cuda(node.meta["example_value"], mode)
        module.recompile()
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _on_cuda(buffer, mode))
    return made


def _filled(node: fx.Node) -> None:
    """Makes a tensor of data one of ones: the tracer would make the tensor itself on the device. Placement does not depend on values."""
    like = node.meta["example_value"]
    node.target, node.args, node.kwargs = torch.ones, (tuple(like.shape),), {"dtype": like.dtype, "device": _CUDA}


def _indexed(node: fx.Node) -> None:
    """Makes tensors of the lists of numbers in an index, for the same reason."""
    index = node.args[1]

    def made(one: Any) -> Any:
        if not isinstance(one, list) or not all(isinstance(number, int) for number in one):
            return one
        with node.graph.inserting_before(node):
            return node.graph.call_function(torch.ones, ((len(one),),), {"dtype": torch.int64, "device": _CUDA})

    node.args = (node.args[0], tuple(map(made, index)) if isinstance(index, tuple) else made(index))


def _device(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return _CUDA if argument == _CPU else argument
    return "cuda" if isinstance(argument, str) and argument == "cpu" else argument
