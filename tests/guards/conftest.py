from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from ort_backend import guards
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


class Code(str):
    """The code of a remedy."""

    def gives(self, name: str, **variables: Any) -> Any:
        """Runs it where the user would write it; the value that the variable `name` has then."""
        scope = {"torch": torch, **variables}
        exec(self, scope)
        return scope[name]

    def replace(self, *args: Any) -> Code:
        return Code(super().replace(*args))


@pytest.fixture
def check(compiled: Callable[..., Any]) -> Callable[..., None]:
    """Runs `bad`, which must recompile at its last call for the given cause; then `good`, with the remedy's code, which must not recompile.

    `good_compiles` is for the causes where the right number of graphs is not one per function.
    """

    def run(
        bad: Callable[..., None],
        good: Callable[..., None],
        kind: str,
        source: str,
        before: str | None,
        now: str | None,
        passed_as: str | None = None,
        code: str = "",
        good_compiles: int | None = None,
    ) -> None:
        bad(compiled)
        record = records.all()[-1]
        assert record.recompile and record.cause is not None
        cause = record.cause
        assert (cause.kind, cause.source, cause.before, cause.now) == (kind, source, before, now)
        assert cause.guard and cause.graph is not None
        assert bad.__code__.co_filename in record.called_from and bad.__name__ in record.called_from
        assert passed_as is None or cause.passed_as == passed_as
        diagnosed = guards.report().causes[0]
        assert diagnosed.remedy.text and "No remedy is known" not in diagnosed.remedy.text
        assert not code or diagnosed.remedy.code == code
        assert diagnosed.remedy.text[:40] in str(guards.report())
        torch._dynamo.reset()
        records.clear()
        good(compiled, Code(diagnosed.remedy.code))
        after = records.all()
        if good_compiles is not None:
            assert len(after) == good_compiles
        else:
            assert after and not [record for record in after if record.recompile], "\n".join(map(str, after))

    return run
