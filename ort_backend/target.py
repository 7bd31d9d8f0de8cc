"""What the lowering lowers for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

# The name under which the runtime registers what a node calls that gives up the context of a `PythonOp` without a backward.
RELEASE = "ort_training.release"

# ONNX Runtime's operator for PyTorch's own operators, and its domain.
ATEN, ATEN_DOMAIN = "ATen", "org.pytorch.aten"
# Its operator for kernels written in Triton, which on a CUDA device calls whatever Python has registered.
TRITON = "TritonOp"

# Bytes from which on results of PyTorch's kernels inside a session lie in memory that is kept for them (`runtime.result_memory`). What is smaller has
# its place on the C library's heap, and an operator takes that by itself faster than it is given any.
LARGE_RESULT = 1 << 17


def _every_kernel(node: Any) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class OrtTarget:
    """The ONNX Runtime that will run a graph, as far as a lowering needs to know it.

    Attributes:
        opset: Default-domain ONNX operator set to emit.
        provider: Execution provider, such as `"CPUExecutionProvider"`.
        device_index: Which of its devices.
        training: Whether the installed ONNX Runtime has `TrainingAgent`, `YieldOp` and the `*Grad` kernels.
        python_op: Whether `PythonOp` nodes can run. Not where runs are captured.
        aten_op: Whether `ATen` nodes can run, which call PyTorch's kernels at half the cost. Asked where `PythonOp` nodes can.
        triton_op: Whether `TritonOp` nodes can run: on CUDA, where for each `PythonOp` the host waits until the device is done. Likewise.
        has_kernel: `has_kernel(node)` for an `onnx_ir.Node` whose inputs have types: whether the provider can run it.
        contrib_ops: Names (`"com.microsoft::FusedMatMul"`) of operators outside ONNX whose schema exists in this build.
        kernels: Which kernel runs an operator that PyTorch has one for as well: `"measured"`, the faster one; `"onnxruntime"`, always
            ONNX Runtime's; `"pytorch"`, always PyTorch's (for the measurement).
        onednn: Whether PyTorch has oneDNN's kernels, and they are not turned off (`torch.backends.mkldnn`).
        mkl: Whether PyTorch's matrix products are MKL's, on a processor that it was made for.
        slow_mkl: Whether they are MKL's, and far slower than ONNX Runtime's.
        bfloat16_products: Whether PyTorch's products and convolutions in bfloat16 are oneDNN's, on a processor with instructions for them.
        threads: How many threads of the host a kernel runs on.
        cuda_graphs: Whether runs of sessions are captured as CUDA graphs: plain runs, as a session that runs forward and backward in halves is
            captured but never replayed (read in 1.19: `InferenceSession::PartialRun`, which `TrainingAgent` calls).
    """

    opset: int = 18
    provider: str = "CPUExecutionProvider"
    device_index: int = 0
    training: bool = True
    python_op: bool = True
    aten_op: bool = False
    triton_op: bool = False
    has_kernel: Callable[[Any], bool] = _every_kernel
    contrib_ops: frozenset[str] = frozenset()
    kernels: str = "measured"
    onednn: bool = False
    mkl: bool = False
    slow_mkl: bool = False
    bfloat16_products: bool = False
    threads: int = 1
    cuda_graphs: bool = False

    @property
    def call_type(self) -> str:
        """The type of the nodes that call PyTorch's kernels."""
        return ATEN if self.aten_op else TRITON if self.triton_op else "PythonOp"

    @property
    def merges_calls(self) -> bool:
        """Whether calls of PyTorch that follow one another become one node (`merged_calls`)."""
        return self.call_type == TRITON

    @property
    def whole_graphs(self) -> bool:
        """Whether one session runs a whole graph, training included: what has no kernel runs inside it."""
        return self.training and self.python_op

    @property
    def device_type(self) -> str:
        """`"cpu"` or `"cuda"`, as torch names it."""
        return "cuda" if self.provider in ("CUDAExecutionProvider", "TensorrtExecutionProvider") else "cpu"

    @property
    def sizes_on_host(self) -> bool:
        """Whether values are on a device and sizes on the host, so that a number goes from the one to the other by ways of its own."""
        return self.device_type == "cuda"

    @property
    def has_half_kernels(self) -> bool:
        """Whether float16 and bfloat16 have kernels of their own, or are computed in float32 between casts."""
        return self.device_type == "cuda"
