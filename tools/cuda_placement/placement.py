"""Where the nodes of one workload's graphs are placed: by ONNX Runtime itself, which says so in its log."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ort_backend
from benchmarks.zoo_models import WORKLOADS
from benchmarks.zoo_step import missing
from ort_backend.lowering.passes.host_values import ARITHMETIC
from tools.cuda_placement.capture import as_on_cuda

# Of a workload's inputs: as they are; all symbolic; symbolic where they change from batch to batch.
SIZES = ("fixed", "symbolic", "changing")

_LINE = re.compile(r"VerifyEachNodeIsAssignedToAnEp\]\s+(.*)")
_PROVIDER = re.compile(r"(?:All nodes|Node\(s\)) placed on \[(\w+)\]\. Number of nodes: (\d+)")
_NODE = re.compile(r"(\w+) \((.*)\)$")


@dataclasses.dataclass(frozen=True)
class Placed:
    """Where the nodes of a workload's graphs are.

    Attributes:
        name: The workload's.
        graphs: How many sessions there are.
        cuda: Number of nodes on the CUDA provider.
        cpu: Nodes on the CPU provider, by operator.
        copies: Number of Memcpy nodes.
        python: Operators that run in PyTorch by name, but for those whose kernel there is the faster one.
        names: Names of the nodes on the CPU and of the copies.
        problem: Why there is nothing to say; empty if there is.
    """

    name: str
    graphs: int = 0
    cuda: int = 0
    cpu: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: int = 0
    python: dict[str, int] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()
    problem: str = ""

    @property
    def strays(self) -> dict[str, int]:
        """Nodes on the CPU provider that cannot be there to work out sizes."""
        return {operator: count for operator, count in self.cpu.items() if operator not in ARITHMETIC}


def place(name: str, *, sizes: str = "fixed") -> Placed:
    """Compiles a workload's training step for CUDA and reads where its nodes are.

    To be called in a process of its own with `libraries.environment()`.

    Args:
        name: The workload's.
        sizes: One of `SIZES`.
    """
    workload = WORKLOADS[name]
    if package := missing(workload):
        return Placed(name, problem=f"{package} is not installed")
    torch.manual_seed(0)
    model, batch = workload.build()
    model.train()
    options = {"provider": "CUDAExecutionProvider", "session_options": {"log_severity_level": 0}}
    settings = torch._dynamo.config.patch(**workload.dynamo) if workload.dynamo else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, settings, as_on_cuda():
        log = Path(folder) / "log"
        compiled = torch.compile(model, backend="ort_training", options=options, dynamic=True if sizes == "symbolic" else None)
        inputs = batch(*workload.sizes[0 if sizes == "fixed" else 1])
        if sizes == "changing":
            _mark_changing(inputs, batch(*workload.sizes[0]))
        with _stderr_to(log), torch.autocast("cpu", workload.autocast) if workload.autocast else contextlib.nullcontext():
            compiled(**inputs)
        text = log.read_text(errors="replace")
    return _read(name, text)


def _mark_changing(inputs: dict[str, Any], others: dict[str, Any]) -> None:
    """Makes the sizes symbolic in which two batches differ: what Dynamo does when it compiles again."""
    for key, tensor in inputs.items():
        for d, size in enumerate(tensor.shape if isinstance(tensor, torch.Tensor) else ()):
            if size != others[key].shape[d]:
                torch._dynamo.maybe_mark_dynamic(tensor, d)


def _read(name: str, log: str) -> Placed:
    placed: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    counts: collections.Counter[str] = collections.Counter()
    provider = ""
    for line in _LINE.findall(log):
        if found := _PROVIDER.search(line):
            provider = found[1]
            counts[provider] += int(found[2])
        elif found := _NODE.search(line.strip()):
            placed[provider].append((found[1], found[2]))
    everything = [(provider, *node) for provider, nodes in placed.items() for node in nodes]
    copies = [one for one in everything if one[1].startswith("Memcpy")]
    on_cpu = [one for one in everything if one[0] == "CPUExecutionProvider" and not one[1].startswith("Memcpy")]
    python: collections.Counter[str] = collections.Counter()
    for graph in ort_backend.report().graphs:
        for one in graph.outside:
            if not one.is_choice:
                python[one.operator] += one.count
    return Placed(
        name,
        graphs=log.count("] Node placements"),
        cuda=counts["CUDAExecutionProvider"],
        cpu=dict(collections.Counter(one[1] for one in on_cpu).most_common()),
        copies=len(copies),
        python=dict(python.most_common()),
        names=tuple(f"{one[1]} {one[2]}" for one in (*copies, *on_cpu)),
    )


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """Sends what C++ writes to the error stream to a file."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
