"""Where the time of a training step goes: ONNX Runtime's kernels, from its own profile, beside eager PyTorch's, by family.

    python -m benchmarks.kernels --model gpt                      # by operator, then by family
    python -m benchmarks.kernels --model gpt --nodes 20           # and the twenty slowest nodes of the ONNX graph
    python -m benchmarks.kernels --model gpt --beside inductor    # against inductor's generated kernels
    python -m benchmarks.kernels --model gpt --dtype bfloat16     # under autocast

One thread, forward and backward, milliseconds a step. Profilers cost time as well, most where there are many small kernels: compare shares,
and take totals from `python -m benchmarks run`.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints to stderr otherwise; read when torch is loaded

import onnxruntime
import torch
from rich.console import Console
from rich.table import Table
from torch._inductor import config as inductor_config

import ort_backend
from benchmarks.families import FAMILIES, family
from benchmarks.models import DEFAULT, WORKLOADS, Workload
from benchmarks.training import Trainer

console = Console(width=150)

WARM = 2  # steps before those that count


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A node of the ONNX graph, or an operator of PyTorch's at one set of shapes.

    Attributes:
        operator: Its type, such as `Gemm` or `aten::addmm`.
        name: The node's name; the operator's, where there is none.
        shapes: Of its inputs.
        count: How often it runs in a step.
        milliseconds: A step, all runs together.
    """

    operator: str
    name: str
    shapes: str
    count: float
    milliseconds: float


def ort_kernels(workload: Workload, steps: int, dtype: torch.dtype) -> tuple[list[Kernel], float]:
    """What ONNX Runtime's profile says of every node, medians over the steps; and the milliseconds of a whole step."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"session_options": {"enable_profiling": True, "profile_file_prefix": f"{folder}/profile"}}
        trainer = Trainer(workload, "ort_training", dtype=dtype, options=options)
        trainer.median(WARM)
        whole = trainer.median(steps) * 1e3
        sessions = [found for found in gc.get_objects() if type(found) is onnxruntime.InferenceSession]
        files = {session.end_profiling() for session in sessions} - {""}
        kernels = [kernel for file in files for kernel in _nodes(json.loads(Path(file).read_text()))]
    return kernels, whole


def _nodes(events: Iterable[dict[str, Any]]) -> Iterator[Kernel]:
    """Those of one session."""
    runs = collections.defaultdict(list)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs[event["name"].removesuffix("_kernel_time"), event["args"]["node_index"]].append(event)
    for (name, _), seen in runs.items():
        args = seen[-1]["args"]
        yield Kernel(args["op_name"], name, _onnx_shapes(args["input_type_shape"]), 1, statistics.median(one["dur"] for one in seen[WARM:]) / 1e3)


def _onnx_shapes(inputs: list[dict[str, list[int]]]) -> str:
    """`8x128x256 256x768`; a scalar is `-`, and what is not float32 says its type."""
    pairs = [pair for one in inputs for pair in one.items()]
    return " ".join(("x".join(map(str, shape)) or "-") + ("" if dtype == "float" else f":{dtype}") for dtype, shape in pairs)


def torch_kernels(workload: Workload, backend: str, steps: int, dtype: torch.dtype) -> tuple[list[Kernel], float]:
    """What torch's profiler says of every operator: its own time, without that of operators it calls; and the milliseconds of a whole step."""
    inductor_config.cpp.enable_kernel_profile = True  # names for inductor's generated kernels
    trainer = Trainer(workload, backend, dtype=dtype)
    trainer.median(WARM)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        whole = trainer.median(steps) * 1e3
    seen = [one for one in profiler.key_averages(group_by_input_shape=True) if _is_kernel(one.key)]
    return [
        Kernel(one.key, one.key, _torch_shapes(one.input_shapes), one.count / steps, one.self_cpu_time_total / steps / 1e3) for one in seen
    ], whole


def _torch_shapes(inputs: list[list[int]]) -> str:
    return " ".join("x".join(map(str, shape)) for shape in inputs if shape)


def _is_kernel(name: str) -> bool:
    return name.startswith(("aten::", "mkl::", "mkldnn::", "inductor::")) or "cpp_fused" in name


def totals(kernels: Iterable[Kernel], key: Callable[[Kernel], str]) -> list[tuple[str, float, float, Kernel]]:
    """(key, count, milliseconds, the slowest), slowest first."""
    groups = collections.defaultdict(list)
    for kernel in kernels:
        groups[key(kernel)].append(kernel)
    summed = [
        (k, sum(g.count for g in group), sum(g.milliseconds for g in group), max(group, key=lambda g: g.milliseconds)) for k, group in groups.items()
    ]
    return sorted(summed, key=lambda one: -one[2])


def operator_table(title: str, kernels: list[Kernel], step: float, rows: int) -> Table:
    """By operator: runs a step, milliseconds, share, and the slowest instance."""
    whole = sum(kernel.milliseconds for kernel in kernels)
    table = Table(title=f"{title}: {whole:.1f} ms in kernels of {step:.1f} ms a step")
    for heading in ("operator", "runs", "ms", "share", "slowest ms", "its inputs"):
        table.add_column(heading, justify="left" if heading in ("operator", "its inputs") else "right", overflow="fold")
    everything = totals(kernels, lambda kernel: kernel.operator)
    for name, count, spent, slowest in everything[:rows]:
        numbers = (f"{count:.0f}", f"{spent:.2f}", f"{spent / whole:.1%}", f"{slowest.milliseconds / slowest.count:.3f}")
        table.add_row(name, *numbers, slowest.shapes)
    rest = everything[rows:]
    if rest:
        spent = sum(one[2] for one in rest)
        table.add_row(f"{len(rest)} others", f"{sum(one[1] for one in rest):.0f}", f"{spent:.2f}", f"{spent / whole:.1%}")
    return table


def node_table(kernels: list[Kernel], rows: int) -> Table:
    """The slowest nodes of the ONNX graph."""
    table = Table(title="slowest nodes")
    for heading in ("node", "operator", "ms", "inputs"):
        table.add_column(heading, justify="right" if heading == "ms" else "left", overflow="fold")
    for kernel in sorted(kernels, key=lambda one: -one.milliseconds)[:rows]:
        table.add_row(kernel.name, kernel.operator, f"{kernel.milliseconds:.3f}", kernel.shapes)
    return table


def family_table(ours: list[Kernel], theirs: list[Kernel], beside: str) -> Table:
    """By family: both sides, and the difference."""
    sides = [{name: (count, spent) for name, count, spent, _ in totals(side, lambda one: family(one.operator))} for side in (ours, theirs)]
    table = Table(title=f"by family, ms a step: ort_training beside {beside}")
    for heading in ("family", "ort runs", "ort ms", f"{beside} runs", f"{beside} ms", "ort - other"):
        table.add_column(heading, justify="left" if heading == "family" else "right")
    for name in FAMILIES:
        (n, a), (m, b) = (side.get(name, (0, 0.0)) for side in sides)
        if n or m:
            table.add_row(name, f"{n:.0f}", f"{a:.2f}", f"{m:.0f}", f"{b:.2f}", f"{a - b:+.2f}")
    sums = [sum(kernel.milliseconds for kernel in side) for side in (ours, theirs)]
    table.add_row("all", "", f"{sums[0]:.2f}", "", f"{sums[1]:.2f}", f"{sums[0] - sums[1]:+.2f}", style="bold")
    return table


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt", choices=WORKLOADS, metavar="MODEL", help=", ".join(DEFAULT))
    parser.add_argument("--steps", type=int, default=10, help="profiled steps")
    parser.add_argument("--rows", type=int, default=20, help="operators that are listed one by one")
    parser.add_argument("--nodes", type=int, default=0, help="list so many of the slowest nodes")
    parser.add_argument("--beside", default="eager", choices=("eager", "aot_eager", "inductor"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"), help="another than float32: autocast")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    workload, dtype = WORKLOADS[arguments.model], getattr(torch, arguments.dtype)
    console.print(
        f"{workload.name}: {workload.sizes}; {arguments.dtype}; torch {torch.__version__}, onnxruntime {onnxruntime.__version__}, "
        f"{arguments.threads} thread(s)"
    )

    ours, our_step = ort_kernels(workload, arguments.steps, dtype)
    theirs, their_step = torch_kernels(workload, arguments.beside, arguments.steps, dtype)
    console.print(operator_table("ort_training", ours, our_step, arguments.rows))
    for graph in ort_backend.report().graphs:
        if graph.outside:
            console.print("in PyTorch: " + ", ".join(f"{one.operator} x{one.count}" for one in graph.outside))
    if arguments.nodes:
        console.print(node_table(ours, arguments.nodes))
    console.print(operator_table(arguments.beside, theirs, their_step, arguments.rows))
    console.print(family_table(ours, theirs, arguments.beside))


if __name__ == "__main__":
    main()
