"""A few training steps on one device against eager PyTorch: the first thing to run on a GPU.

    python tools/gpu_smoke.py [--device cpu] [--first N]

Prints lines `CASE name` and `RESULT {json}` for each case, from the Nth on. The exit status is 1 if one is wrong, and 70 where a case has left an
error on the device that every later one in this process would meet. A case that takes longer than `LIMIT` ends the process, which says where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from device_health import device_works
from torch import Tensor, nn
from torch.nn import functional as F

import ort_backend
from ort_backend.graph_report import GraphReport
from ort_backend.runtime import capabilities

STEPS = 5  # where runs are captured as CUDA graphs, the last of them are replayed
LIMIT = 90.0  # seconds of a case
VARIANTS = ("", "side stream", "CUDA graphs")
Made = tuple[nn.Module, Tensor]


class Attention(nn.Module):
    """Causal attention of four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(-2))


def _linear() -> Made:
    return nn.Linear(64, 32), torch.randn(16, 64)


def _perceptron() -> Made:
    return nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 32)), torch.randn(16, 64)


def _dropout() -> Made:
    return nn.Sequential(nn.Linear(64, 128), nn.Dropout(0.2), nn.Linear(128, 32)), torch.randn(16, 64)


def _convolution() -> Made:
    network = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 64, 10))
    return network, torch.randn(4, 3, 16, 16)


def _embedding() -> Made:
    return nn.Sequential(nn.Embedding(100, 64), nn.LayerNorm(64), nn.Linear(64, 100)), torch.randint(0, 100, (4, 16))


def _attention() -> Made:
    return Attention(64), torch.randn(2, 32, 64)


# Name, model and input, autocast; the tolerance is relative to the largest gradient of each parameter.
Case = tuple[str, Callable[[], Made], torch.dtype | None, float]
CASES: tuple[Case, ...] = (
    ("linear", _linear, None, 1e-5),
    ("layer norm and gelu", _perceptron, None, 1e-4),
    ("dropout: same random numbers", _dropout, None, 1e-4),
    ("convolution, batch norm, pooling", _convolution, None, 1e-3),
    ("embedding", _embedding, None, 1e-4),
    ("attention", _attention, None, 1e-4),
    ("attention, bfloat16 autocast", _attention, torch.bfloat16, 5e-2),
    ("layer norm and gelu, float16 autocast", _perceptron, torch.float16, 2e-2),
)


def run(make: Callable[[], Made], autocast: torch.dtype | None, tolerance: float, device: str, variant: str) -> dict[str, Any]:
    """Some steps under both: the largest differences, and what ran."""
    torch._dynamo.reset()  # it compiles the forward of `nn.Sequential`, which many cases share, no more than eight times
    torch.manual_seed(0)
    model, x = make()
    eager, x = model.to(device), x.to(device)
    own = copy.deepcopy(eager)
    settings: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False} if variant == "CUDA graphs" else {}
    compiled = torch.compile(own, backend="ort_training", **settings)
    before = len(ort_backend.report().graphs)
    worst = 0.0
    with _side_stream() if variant == "side stream" else contextlib.nullcontext():
        for step in range(STEPS):
            for module in (compiled, eager):
                torch.manual_seed(step)
                with torch.autocast(device, autocast) if autocast else contextlib.nullcontext():
                    loss = module(x).float().square().mean()
                loss.backward()
            # The gradient of a bias in front of a batch norm is zero but for rounding.
            floor = 1e-2 * max(parameter.grad.abs().max().item() for parameter in eager.parameters())
            for parameter, expected in zip(own.parameters(), eager.parameters(), strict=True):
                scale = max(expected.grad.abs().max().item(), floor)
                worst = max(worst, (parameter.grad - expected.grad).abs().max().item() / scale)
                parameter.grad = expected.grad = None
    buffers = max((_difference(*both) for both in zip(own.buffers(), eager.buffers(), strict=True)), default=0.0)
    graphs = ort_backend.report().graphs[before:]
    found = {"worst": worst, "buffers": buffers, **what_ran(graphs)}
    return {**found, "right": max(worst, buffers) <= tolerance and found["ran"] and found["sessions"] > 0 and not found["unexpected"]}


def _side_stream() -> contextlib.AbstractContextManager[Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # which made model and input
    return torch.cuda.stream(stream)


def _difference(actual: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest number."""
    return (actual - expected).abs().max().item() / max(expected.abs().max().item(), 1e-30)


def what_ran(graphs: Sequence[GraphReport]) -> dict[str, Any]:
    """Of compiled graphs: whether each ran at every step, how many sessions they have, how many were captured, and what PyTorch ran.

    `unexpected`: operators that ONNX Runtime should have run. It has no gradients in its plain package.
    """
    outside = [one for graph in graphs for one in graph.outside]
    expected = ("_backward",) if not capabilities.has_training() else ()
    return {
        "ran": all(graph.counts.forward == STEPS and graph.counts.backward == STEPS for graph in graphs) and bool(graphs),
        "sessions": sum(graph.sessions for graph in graphs),
        "captured_sessions": sum(graph.captured_sessions for graph in graphs),
        "pytorch_operators": sorted({one.operator for one in outside}),
        "unexpected": sorted({one.operator for one in outside if not one.is_choice and not one.operator.endswith(expected)}),
    }


def main() -> int:
    """All cases. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--first", type=int, default=0, help="number of cases to leave out")
    arguments = parser.parse_args()
    device, failed = arguments.device, 0
    torch.backends.cudnn.allow_tf32 = False  # eager is the measure: by default its convolutions round float32 to TF32
    variants = VARIANTS if device == "cuda" else VARIANTS[:1]
    for variant, case in list(itertools.product(variants, CASES))[arguments.first :]:
        title = case[0] + (f" ({variant})" if variant else "")
        _write(f"CASE {title}")
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        found = _judged(case, device, variant)
        _write(f"RESULT {json.dumps({'name': title, **found})}")
        failed += not found["right"]
        works = device_works()
        faulthandler.cancel_dump_traceback_later()
        if not works:
            return 70
    return int(failed > 0)


def _judged(case: Case, device: str, variant: str) -> dict[str, Any]:
    _, make, autocast, tolerance = case
    started = time.perf_counter()
    try:
        found = run(make, autocast, tolerance, device, variant)
    except Exception:  # noqa: BLE001  whatever it is, it is this case's result
        found = {"right": False, "error": traceback.format_exc()[-1500:]}
    verdict = "ok" if found["right"] else "WRONG" if "worst" in found else "ERROR"
    if "worst" in found:
        verdict += f", gradients differ by {found['worst']:.1e} of the largest, allowed {tolerance:.0e}"
        verdict += f", buffers by {found['buffers']:.1e}" if found["buffers"] else ""
        verdict += "" if found["ran"] and found["sessions"] else f", {found['sessions']} sessions, not all of which ran at every step"
        verdict += f", PyTorch ran {', '.join(found['pytorch_operators'])}" if found["pytorch_operators"] else ""
    return {"verdict": verdict, "seconds": round(time.perf_counter() - started, 2), **found}


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
