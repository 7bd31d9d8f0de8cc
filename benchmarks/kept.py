"""How many bytes wait between forward and backward: the memory that decides how large a batch fits.

    python -m benchmarks.kept --models gpt bert resnet50

Measured in a process for each backend: some forwards are made whose backwards do not come, and each adds to the resident memory what it keeps
(and its outputs). Beside it, what is declared: for PyTorch's backends the tensors that autograd saves, without parameters and batch (each
storage once); for ort_training the values that cross the `YieldOp`, as lowered. ONNX Runtime's arena, which takes memory in large pieces, is off.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import memory, process
from benchmarks.models import DEFAULT, WORKLOADS, loss_of
from benchmarks.training import BACKENDS, Trainer

PENDING = 4

# The C heap takes and returns every larger block by itself, so that resident memory is what is in use.
EXACT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def kept(model: str, backend: str) -> dict[str, float]:
    """In a fresh process. Bytes a forward: `measured`, `declared`."""
    options = _without_arena() if backend == "ort_training" else None
    trainer = Trainer(WORKLOADS[model], backend, options=options)
    trainer.median(2)
    batch = trainer.batches[0]
    pending = [loss_of(trainer.forward(batch))]
    memory.settle()
    before = memory.used("cpu")
    pending += [loss_of(trainer.forward(batch)) for _ in range(PENDING)]
    memory.settle()
    measured = (memory.used("cpu") - before) / PENDING
    declared = _lowered() if backend == "ort_training" else _saved(trainer, batch)
    assert len(pending) == PENDING + 1
    return {"measured": measured, "declared": declared}


def _without_arena() -> dict[str, Any]:
    """Options under which every session takes its memory from the C heap. `enable_cpu_mem_arena` counts in a process's first session only."""
    from onnxruntime.capi import _pybind_state as C

    C.create_and_register_allocator(C.OrtMemoryInfo("Cpu", C.OrtAllocatorType.ORT_DEVICE_ALLOCATOR, 0, C.OrtMemType.DEFAULT), None)
    return {"session_options": {"session.use_env_allocators": "1"}}


def _lowered() -> int:
    import ort_backend

    return sum(graph.kept_bytes for graph in ort_backend.report().graphs)


def _saved(trainer: Trainer, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of the storages that a forward saves for its backward, without those of parameters, buffers and batch."""
    others = {tensor.untyped_storage().data_ptr() for tensor in (*trainer.model.parameters(), *trainer.model.buffers(), *batch.values())}
    storages: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)  # so that no later storage gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(trainer.forward(batch))
    del loss
    return sum(size for pointer, size in storages.items() if pointer not in others)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["gpt", "bert", "llama", "vit", "resnet50", "unet"],
        choices=WORKLOADS,
        metavar="MODEL",
        help=", ".join(DEFAULT),
    )
    parser.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    table = Table(title="MB between forward and backward: measured (declared)")
    for heading in ("model", *arguments.backends):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    errors: list[str] = []
    found: dict[str, list[str]] = {model: [] for model in arguments.models}
    for model, backend in track([(model, backend) for model in arguments.models for backend in arguments.backends], description="measuring"):
        try:
            one: dict[str, Any] = process.call(kept, threads=arguments.threads, environment=EXACT, model=model, backend=backend)
            found[model].append(f"{one['measured'] / 1e6:.1f} ({one['declared'] / 1e6:.1f})")
        except process.ProcessError as error:
            found[model].append("ERROR")
            errors.append(f"{model}, {backend}: {error}")
    for model, cells in found.items():
        table.add_row(model, *cells)
    console = Console()
    console.print(table)
    for line in errors:
        console.print(line, style="red")


if __name__ == "__main__":
    main()
