from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch_version import LIMIT, TORCH

from ort_backend import guards
from ort_backend.guards import records

CONFIG = (
    "allow_unspec_int_on_nn_module",
    "force_parameter_static_shapes",
    "capture_scalar_outputs",
    # `dynamic=False` changes these two for the time of a call; before 2.13 two threads that do so at once may leave them changed.
    "automatic_dynamic_shapes",
    "assume_static_by_default",
)


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
    with config.patch({name: getattr(config, name) for name in (LIMIT, *CONFIG) if hasattr(config, name)}):
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

    `good_compiles` is for the causes where the right number of graphs is not one per function. `needs` is what torch must have, and why;
    `older` what the record says instead (`source`, `before`, ..., `code`) before a version.
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
        needs: tuple[bool, str] = (True, ""),
        older: tuple[tuple[int, int], dict[str, Any]] = ((0, 0), {}),
    ) -> None:
        if not needs[0]:
            pytest.skip(f"torch {torch.__version__} {needs[1]}")
        said = {"kind": kind, "source": source, "before": before, "now": now, "passed_as": passed_as, "code": code}
        until, changes = older
        said |= changes if until > TORCH else {}
        bad(compiled)
        record = records.all()[-1]
        assert record.recompile and record.cause is not None
        cause = record.cause
        assert [cause.kind, cause.source, cause.before, cause.now] == [said[name] for name in ("kind", "source", "before", "now")]
        assert cause.guard and (cause.graph is not None or TORCH < (2, 6))  # older texts do not say which graph
        assert bad.__code__.co_filename in record.called_from and bad.__name__ in record.called_from
        assert said["passed_as"] is None or cause.passed_as == said["passed_as"]
        diagnosed = guards.report().causes[0]
        assert diagnosed.remedy.text and "No remedy is known" not in diagnosed.remedy.text
        assert not said["code"] or diagnosed.remedy.code == said["code"]
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
