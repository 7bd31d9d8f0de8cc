from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from ort_backend.guards import records

CONFIG = ("recompile_limit", "allow_unspec_int_on_nn_module", "force_parameter_static_shapes", "capture_scalar_outputs")


@dataclasses.dataclass(frozen=True)
class Options:
    guard_log: str | None = None


@dataclasses.dataclass(frozen=True)
class GraphReport:
    nodes: int


def recording_backend(options: Options | None = None) -> Callable[..., Any]:
    """A backend that does nothing but keep records, in the way the real one does."""
    settings = options or Options()

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compilation = records.start(gm, settings)
        with compilation.phase("aot"), compilation.phase("lowering"):
            report = GraphReport(len(gm.graph.nodes))
        compilation.finish(report)
        return gm.forward

    return backend


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test starts with no graphs and no records, and leaves torch's settings as they were."""
    threads, config = torch.get_num_threads(), torch._dynamo.config
    torch._dynamo.reset()
    records.clear()
    with config.patch({name: getattr(config, name) for name in CONFIG}):
        yield
    torch._dynamo.reset()
    records.clear()
    torch.set_num_threads(threads)


@pytest.fixture
def backend() -> Callable[..., Any]:
    return recording_backend()


@pytest.fixture
def make_backend() -> Callable[..., Callable[..., Any]]:
    return lambda **settings: recording_backend(Options(**settings))


@pytest.fixture
def compiled(backend: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` with a backend that only keeps records."""
    return lambda function, **settings: torch.compile(function, backend=backend, **settings)
