"""Over a stand-in CUDA runtime: sessions take the options and memory that they are given, and Python nodes get device tensors without a copy.

Values are garbage by construction, and are not looked at.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]

MODEL = """
import ctypes, sys
import numpy as np, onnx_ir as ir, onnxruntime as ort, torch
from onnxruntime.capi import _pybind_state as C
from ort_backend.runtime import cuda
from ort_backend.runtime.cuda import Numerics

def model(*nodes, inputs, outputs):
    return ir.to_proto(ir.Model(ir.Graph(inputs, outputs, nodes=nodes, opset_imports={"": 18, "com.microsoft": 1}), ir_version=9)).SerializeToString()

def tensor(name, *shape):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))

def session(data, options):
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return ort.InferenceSession(data, settings, providers=[("CUDAExecutionProvider", options)])

x, h, y = tensor("x", 64, 32), tensor("h", 64, 32), tensor("y", 64, 32)
two = model(ir.Node("", "Relu", [x], outputs=[h]), ir.Node("", "Exp", [h], outputs=[y]), inputs=[x], outputs=[y])
"""


def test_the_options_arrive(over_stand_in: Run) -> None:
    code = """
options = cuda.provider_options(0, Numerics(tf32=False, algorithms="DEFAULT"), None, {"cudnn_conv_use_max_workspace": "0"})
got = session(two, options).get_provider_options()["CUDAExecutionProvider"]
assert {name: got[name] for name in options} == options, got
assert got["has_user_compute_stream"] == "1", got
made, kept = cuda.callbacks(lambda size: 0, lambda pointer: None, lambda: None)
options = cuda.provider_options(0, Numerics(tf32=True, algorithms="HEURISTIC"), made, {})
got = session(two, options).get_provider_options()["CUDAExecutionProvider"]
assert {name: got[name] for name in options} == options, got
assert got["has_user_compute_stream"] == "0", got
"""
    over_stand_in(MODEL + code)


def test_memory_comes_from_the_callbacks_and_goes_back(over_stand_in: Run) -> None:
    code = """
libc = ctypes.CDLL(None)
libc.aligned_alloc.restype, libc.aligned_alloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2, [ctypes.c_void_p]
alive, taken, refuse = {}, [], False
def allocate(size):
    if refuse:
        raise torch.OutOfMemoryError("no more")
    taken.append(size)
    pointer = libc.aligned_alloc(256, -(-size // 256) * 256)
    alive[pointer] = size
    return pointer
def delete(pointer):
    del alive[pointer]
    libc.free(pointer)
made, kept = cuda.callbacks(allocate, delete, lambda: None)
one = session(two, cuda.provider_options(0, Numerics(tf32=False, algorithms="DEFAULT"), made, {}))
device = C.OrtDevice(C.OrtDevice.cuda(), C.OrtDevice.default_memory(), 0)
feed = C.OrtValue.ortvalue_from_numpy(np.zeros((64, 32), np.float32), device)
before = len(taken)
options = ort.RunOptions()
options.add_run_config_entry("disable_synchronize_execution_providers", "1")
def run():
    feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
    feeds.push_back(feed)
    one._sess.run_with_ortvaluevector(options, ["x"], feeds, ["y"], fetches, [device])
    return fetches
fetches = run()
assert len(taken) > before and all(size >= 64 * 32 * 4 for size in taken[before:]), taken
held = len(alive)
del fetches
assert len(alive) < held
refuse = True
try:
    run()
except Exception as error:
    assert isinstance(cuda.take_failure(), torch.OutOfMemoryError)
else:
    raise AssertionError("a refused allocation is an error of the run")
"""
    over_stand_in(MODEL + code)


def test_a_python_node_gets_tensors_of_the_device_without_a_copy(over_stand_in: Run) -> None:
    code = """
import os
ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0]).pretend_cuda()
torch.cuda._lazy_init = lambda: None  # a tensor that arrives by DLPack
from ort_backend.lowering.python_op import PythonCall
from ort_backend.runtime.callbacks import take_error
from ort_backend.runtime.python_op import Registration, running
seen = []
def function(tensor):
    seen.append((tensor.device.type, tuple(tensor.shape), tensor.data_ptr()))
    return (tensor,)
call = PythonCall("test#1", "test", function)
registration = Registration(call)
x, h, p, y = (tensor(name, 64, 32) for name in "xhpy")
context = ir.Value(name="context", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
ints = lambda name, *values: ir.AttrInt64s(name, list(values))
node = ir.Node("com.microsoft", "PythonOp", [h], [
    ir.AttrString("func_name", "test#1"), ir.AttrString("input_convention", "d"), ints("input_tensor_types", 1), ints("input_tensor_ranks", 2),
    ints("input_requires_grads", 0), ints("output_tensor_types", 1), ints("output_tensor_ranks", 2), ir.AttrInt64("training_mode", 0),
    ir.AttrString("comment", "")], outputs=[context, p])
data = model(ir.Node("", "Relu", [x], outputs=[h]), node, ir.Node("", "Exp", [p], outputs=[y]), inputs=[x], outputs=[y])
one = session(data, {})  # without fallback: every node has a kernel for the device
device = C.OrtDevice(C.OrtDevice.cuda(), C.OrtDevice.default_memory(), 0)
feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
feeds.push_back(C.OrtValue.ortvalue_from_numpy(np.zeros((64, 32), np.float32), device))
print("RUN", file=sys.stderr, flush=True)
with running(None):
    try:
        one._sess.run_with_ortvaluevector(ort.RunOptions(), ["x"], feeds, ["y"], fetches, [device])
    except Exception as error:
        raise take_error() or error
print("DONE", file=sys.stderr, flush=True)
assert take_error() is None and [entry[:2] for entry in seen] == [("cuda", (64, 32))], seen
"""
    log = over_stand_in(MODEL + code, FAKECUDA_TRACE="1").stderr
    during = log[log.index("RUN") : log.index("DONE")]
    assert "cudaMemcpy" not in during, during


def test_a_call_of_pytorch_gets_tensors_of_the_device_without_a_copy_or_a_wait(over_stand_in: Run) -> None:
    """By `TritonOp`: behind a `PythonOp`, whose context is on the host, ONNX Runtime waits for the device."""
    code = """
import os
ctypes.CDLL(os.environ["LD_PRELOAD"].split(":")[0]).pretend_cuda()
torch.cuda._lazy_init = lambda: None  # a tensor that arrives by DLPack
from ort_backend.lowering.python_op import PythonCall
from ort_backend.runtime.callbacks import take_error
from ort_backend.runtime.python_op import ordering
from ort_backend.runtime.triton_op import TritonRegistration
seen = []
def function(tensor):
    seen.append((tensor.device.type, tuple(tensor.shape)))
    if len(seen) > 1:
        raise ValueError("of the user")
    return (tensor, tensor)
registration = TritonRegistration(PythonCall("test#1", "test", function, op_type="TritonOp"))
x, h, p, q, y = (tensor(name, 64, 32) for name in "xhpqy")
node = ir.Node("com.microsoft", "TritonOp", [h], [ir.AttrString("func_name", "test#1")], outputs=[p, q])
data = model(ir.Node("", "Relu", [x], outputs=[h]), node, ir.Node("", "Add", [p, q], outputs=[y]), inputs=[x], outputs=[y])
one = session(data, {})  # without fallback: every node has a kernel for the device
device = C.OrtDevice(C.OrtDevice.cuda(), C.OrtDevice.default_memory(), 0)
def run():
    feeds, fetches = C.OrtValueVector(), C.OrtValueVector()
    feeds.push_back(C.OrtValue.ortvalue_from_numpy(np.zeros((64, 32), np.float32), device))
    options = ort.RunOptions()
    options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    print("RUN", file=sys.stderr, flush=True)
    with ordering(None):
        one._sess.run_with_ortvaluevector(options, ["x"], feeds, ["y"], fetches, [device])
run()
print("DONE", file=sys.stderr, flush=True)
assert take_error() is None and seen == [("cuda", (64, 32))], seen
try:
    run()
except Exception:
    assert repr(take_error()) == "ValueError('of the user')"
else:
    raise AssertionError("nothing was raised")
"""
    log = over_stand_in(MODEL + code, FAKECUDA_TRACE="1").stderr
    during = log[log.index("RUN") : log.index("DONE")]
    assert "cudaMemcpy" not in during and "Synchronize" not in during, during


def test_sessions_can_be_captured(over_stand_in: Run) -> None:
    """ONNX Runtime takes the sessions of a training graph as such whose runs can be captured (no node on the CPU, no Memcpy, no control flow), and
    begins to capture. The stand-in gives it no graph in the end: the runs are plain ones from then on, and a warning says so."""
    code = """
import torch, ort_backend
from torch import nn
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 4))
options = {"provider": "CUDAExecutionProvider", "cuda_graphs": True}
compiled = torch.compile(model, backend="ort_training", options=options, dynamic=False)
for _ in range(2):
    compiled(torch.randint(0, 20, (3, 5))).sum().backward()
assert all(p.grad.shape == p.shape for p in model.parameters())
(graph,) = ort_backend.report().graphs
assert (graph.captured_sessions, graph.sessions, graph.counts.backward) == (2, 2, 2), graph
"""
    log = over_stand_in(code, FAKECUDA_TRACE="1").stderr
    assert log.count("cudaStreamBeginCapture") == log.count("cudaStreamEndCapture") == 2, log[-3000:]
    assert log.count("runs without a CUDA graph") == log.count("graph_ is NULL") == 2, log[-3000:]


def test_a_training_step_goes_through(over_stand_in: Run) -> None:
    """The whole way, forward and backward, with a Python node in it: everything but the numbers. The tensors are the CPU's, so that ONNX Runtime
    copies them."""
    code = """
import torch, ort_backend
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
compiled = torch.compile(model, backend="ort_training", options={"provider": "CUDAExecutionProvider"})
for _ in range(2):
    compiled(torch.randn(3, 8)).sum().backward()
assert all(p.grad.shape == p.shape for p in model.parameters())
(graph,) = ort_backend.report().graphs
assert (graph.counts.forward, graph.counts.backward, graph.python_ops) == (2, 2, 0), graph
"""
    over_stand_in(code)
