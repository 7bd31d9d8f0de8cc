"""The memory that ONNX Runtime's CPU provider works in: one pool, an arena, for all sessions of this process.

ONNX Runtime's own arena is one for each session, and hands out a free block whole for anything above half its size: in a step of ResNet-50
it took 484 MB where 290 are enough. The size from which a rest is split off can be set for an arena that sessions share only. Without an arena
the step takes a sixth longer, since the system clears each page again (onnxruntime-training 1.19.2; `enable_cpu_mem_arena` of a session is that of
the first session in the process there).
"""

from __future__ import annotations

import functools
import logging
import sys

import onnx_ir as ir
import onnxruntime as ort
import torch
from onnxruntime.capi import _pybind_state as C

from ort_backend.runtime import denormals

log = logging.getLogger(__name__)

# Pieces of 256 bytes are what the arena counts in. Regions double in size; what is never written to takes no memory, but the 8 bytes that the
# arena keeps for each piece. Free memory of two regions never becomes one block: with a first region of 1 MB, the default, BERT-base, a Llama of
# 110 M and GPT-2 small took 14 to 18 MB more, ResNet-50 12, small models up to 5 less. One of 64 MB saves more for GPT-2 (50), but 130 MB
# are then not given back when the models of `tests/behaviours/test_arena.py` are gone, for the sake of something small.
_FIRST_REGION = 32 << 20
_CONFIG = {
    "max_mem": 0,
    "arena_extend_strategy": 0,
    "max_dead_bytes_per_chunk": 256,
    "initial_chunk_size_bytes": _FIRST_REGION,
    "initial_growth_chunk_size_bytes": _FIRST_REGION,  # the first behind `shrink`
}


# Its release moves the thresholds of glibc's `malloc`, which heed blocks up to 32 MB (`DEFAULT_MMAP_THRESHOLD_MAX` of malloc/malloc.c).
_FREED_ONCE = 16 << 20


def use_shared(options: ort.SessionOptions) -> None:
    """Lets the sessions that are made with `options` take their memory from the shared arena."""
    _keep_freed_memory()
    if not _registered():
        return
    options.add_session_config_entry("session.use_env_allocators", "1")
    # Constants live as long as their session, and would keep the piece of the arena around them.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")


def shrink() -> None:
    """Gives the parts of the arena that nothing uses back to the system. Sessions may run meanwhile; a process that ends has nothing to give."""
    if sys.is_finalizing() or not _registered():
        return
    run_options = ort.RunOptions()
    run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    _smallest_session().run(None, {}, run_options)


@functools.cache
def _keep_freed_memory() -> None:
    """Lets the C library keep up to 32 MB that were freed, once.

    Kernels of PyTorch's inside a session make their results there. glibc returns freed memory from 128 KB on, or from twice the largest block
    below 32 MB that was ever freed (mallopt(3), `M_TRIM_THRESHOLD`); every page that comes back is cleared. A step of GPT took 1 to 3 % longer
    for it, of a ViT 4 %. Nothing is written to the block that is freed here. `MALLOC_TRIM_THRESHOLD_` overrules it.
    """
    torch.empty(_FREED_ONCE, dtype=torch.uint8, device="cpu")


@functools.cache
def _registered() -> bool:
    """Registers the arena, once. False if the program has registered an allocator of its own before, which is left alone."""
    info = C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, C.OrtMemType.DEFAULT)
    try:
        C.create_and_register_allocator(info, C.OrtArenaCfg(_CONFIG))
    except RuntimeError as error:
        log.info("sessions keep an arena each, since this process has a shared allocator already: %s", error)
        return False
    return True


@functools.cache
def _smallest_session() -> ort.InferenceSession:
    """A session that uses the arena and computes next to nothing: ONNX Runtime shrinks an arena at the end of a run only."""
    value = ir.tensor([0.0], dtype=ir.DataType.FLOAT)
    node = ir.node("Constant", [], {"value": value}, name="zero")
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = "zero", ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    graph = ir.Graph([], node.outputs, nodes=[node], opset_imports={"": 18}, name="smallest")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    denormals.follow_thread(options)
    use_shared(options)
    return ort.InferenceSession(ir.to_proto(ir.Model(graph, ir_version=9)).SerializeToString(), options, providers=["CPUExecutionProvider"])
