"""Python's collection of garbage waits for a compile to be over, and for no other backend's."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo import convert_frame

from ort_backend import garbage
from ort_backend.compiler import ort_training

X = torch.ones(3)


@pytest.fixture(autouse=True)
def _on() -> Iterator[None]:
    assert gc.isenabled()
    yield
    enabled = gc.isenabled()
    gc.enable()
    assert enabled


@pytest.fixture
def collects() -> Iterator[list[bool]]:
    """At each of Dynamo's operators: whether garbage is collected while it is traced."""
    seen: list[bool] = []
    original = torch._dynamo.output_graph.OutputGraph.create_proxy

    def create_proxy(*args: Any, **kwargs: Any) -> Any:
        seen.append(gc.isenabled())
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.output_graph.OutputGraph, "create_proxy", create_proxy)
        yield seen


def compiled(backend: Any) -> Callable[..., torch.Tensor]:
    return torch.compile(lambda x: (x * 2).sin(), backend=backend)


def test_it_waits_while_dynamo_traces(collects: list[bool]) -> None:
    torch.testing.assert_close(compiled("ort_training")(X), (X * 2).sin())
    assert collects and not any(collects)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_not_for_another_backend(collects: list[bool], backend: str) -> None:
    compiled(backend)(X)
    assert collects and all(collects)


def test_it_goes_on_after_an_error() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(function, backend="ort_training", fullgraph=True)(X)


def test_a_program_that_has_turned_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        compiled("ort_training")(X)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_dynamos_function_is_wrapped_once() -> None:
    before = convert_frame._compile
    garbage.waits_while_compiling(lambda backend: backend is ort_training)
    assert convert_frame._compile is before and before.ort_training_original is not before  # type: ignore[attr-defined]
