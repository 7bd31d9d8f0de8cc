from __future__ import annotations

import dataclasses
import gc
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch_version import LIMIT, THREADS_CRASH

from ort_backend import guards
from ort_backend.guards import records
from ort_backend.guards.failures import parse
from ort_backend.guards.sources import Scope

Compile = Callable[..., Callable[..., Any]]


def add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_record_of_a_first_compile(compiled: Compile) -> None:
    compiled(add_one)(torch.ones(2))
    (record,) = records.all()
    assert not record.recompile and record.cause is None and record.failures == ()
    assert record.function == "add_one" and record.where == f"{__file__}:{add_one.__code__.co_firstlineno}"
    assert record.called_from.startswith(__file__) and record.called_from.endswith("compiled(add_one)(torch.ones(2))")
    assert (record.compile_id, record.attempt) == ("0/0", 0)
    assert set(record.seconds) == {"dynamo", "aot", "lowering", "other"} and 0 < record.total_seconds < 60
    assert record.graph_report is not None and record.graph_report.nodes == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.function = "other"  # type: ignore[misc]


def test_nested_phases_subtract() -> None:
    compilation = records.start(torch.fx.GraphModule({}, torch.fx.Graph()), None)
    with compilation.phase("aot"):
        time.sleep(0.02)
        with compilation.phase("lowering"):
            time.sleep(0.05)
        with compilation.phase("session"):
            time.sleep(0.03)
    record = compilation.finish(None)
    assert 0.015 < record.seconds["aot"] < 0.045 < record.seconds["lowering"]
    assert record.seconds["session"] > 0.025
    assert record.total_seconds < 0.3


def test_phase_on_another_thread_after_finish() -> None:
    """The backward of a static graph is compiled at the first `.backward()`, on autograd's thread."""
    compilation = records.start(torch.fx.GraphModule({}, torch.fx.Graph()), None)
    with compilation.phase("lowering"):
        pass
    first = compilation.finish(None)

    def later() -> None:
        with compilation.phase("aot"), compilation.phase("lowering"):
            time.sleep(0.02)

    thread = threading.Thread(target=later)
    thread.start()
    thread.join()
    assert compilation.record.seconds["lowering"] > first.seconds["lowering"] + 0.015
    assert records.all() == (compilation.record,)


def test_record_before_finish_is_an_error() -> None:
    compilation = records.start(torch.fx.GraphModule({}, torch.fx.Graph()), None)
    with pytest.raises(RuntimeError, match="finish"):
        _ = compilation.record


def test_dynamo_time_counts_guard_building(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import guards as dynamo_guards

    original = dynamo_guards.CheckFunctionManager.__init__

    def slow(self: Any, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.1)
        original(self, *args, **kwargs)

    monkeypatch.setattr(dynamo_guards.CheckFunctionManager, "__init__", slow)
    compiled(add_one)(torch.ones(2))
    assert records.all()[-1].seconds["dynamo"] > 0.1


def test_nothing_runs_while_guards_hold(compiled: Compile) -> None:
    f, x = compiled(add_one), torch.ones(2)
    f(x)
    calls: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        if "guards" in frame.f_code.co_filename and "ort_backend" in frame.f_globals.get("__name__", ""):
            calls.append(frame.f_code.co_name)

    import sys

    sys.setprofile(profile)
    try:
        for _ in range(10):
            f(x)
    finally:
        sys.setprofile(None)
    assert calls == [] and len(records.all()) == 1


def test_memory_is_bounded_and_holds_no_user_data(compiled: Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    alive = weakref.ref(x)
    compiled(add_one)(x)
    torch._dynamo.reset()
    del x
    gc.collect()
    assert alive() is None
    settings = locals()
    del settings["alive"]
    compiled(add_one)(torch.ones(4))
    assert "compiled" in settings  # the user's own view of the variables is left alone
    for _ in range(records.MAX_RECORDS + 5):
        records.start(torch.fx.GraphModule({}, torch.fx.Graph()), None).finish(None)
    assert len(records.all()) == records.MAX_RECORDS


def test_info_per_compile_and_warning_from_the_third_of_a_cause(compiled: Compile, caplog: pytest.LogCaptureFixture) -> None:
    f = compiled(add_one, dynamic=False)
    with caplog.at_level(logging.INFO, logger="ort_backend"):
        for size in range(2, 7):
            f(torch.ones(size))
    ours = [entry for entry in caplog.records if entry.name == "ort_backend.guards.records"]
    assert sum(entry.levelno == logging.INFO for entry in ours) == 5
    warnings = [entry.getMessage() for entry in ours if entry.levelno == logging.WARNING]
    assert len(warnings) == 2  # third and fourth recompile
    assert "recompiled 3 times for one cause, shape of x.size(0)" in warnings[0] and "4 -> 5" in warnings[0]


def test_guards_that_name_nothing_are_told_in_dynamos_words(compiled: Compile) -> None:
    """Their warning read "for one cause, unknown of ,", and all of them were one cause."""
    compiled(add_one)(torch.ones(4))
    words = ("'NoneType' object has no attribute 'stride'", "'NoneType' object has no attribute 'size'")
    failures = [parse(f"0/0: {one}", Scope({}, {})) for one in words]
    assert [one.title for one in failures] == [f"unknown: {one}" for one in words]
    first, second = (dataclasses.replace(records.all()[0], recompile=True, failures=(one,)) for one in failures)
    assert first.cause_key != second.cause_key


def test_recompile_limit_is_said_loudly(compiled: Compile, caplog: pytest.LogCaptureFixture) -> None:
    setattr(torch._dynamo.config, LIMIT, 3)
    f = compiled(add_one, dynamic=False)
    for size in range(2, 8):
        f(torch.ones(size))
    assert len(records.all()) == 3
    (hit,) = records.limits()
    assert (hit.function, hit.limit, hit.value) == ("add_one", LIMIT, 3)
    assert hit.cause is not None and (hit.cause.source, hit.cause.now) == ("x.size(0)", "5")
    loud = [entry.getMessage() for entry in caplog.records if entry.name.startswith("ort_backend") and "EAGER" in entry.getMessage()]
    assert len(loud) == 1 and f"{LIMIT} (3)" in loud[0]
    text = str(guards.report())
    assert "!!! add_one" in text and "RUNS IN EAGER PYTORCH" in text and f"torch._dynamo.config.{LIMIT} = 16" in text


def test_the_limit_s_remedy_is_enough(compiled: Compile) -> None:
    setattr(torch._dynamo.config, LIMIT, 2)
    f = compiled(add_one, dynamic=False)
    for size in range(2, 8):
        f(torch.ones(size))
    (limit,) = guards.report().to_json()["limits"]
    torch._dynamo.reset()
    records.clear()
    exec(limit["remedy"]["code"])
    for size in range(2, 8):
        f(torch.ones(size))
    assert len(records.all()) == 6 and records.limits() == ()


def broken(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    print("in the middle")
    return y * 2


def test_graph_breaks(compiled: Compile) -> None:
    compiled(broken)(torch.ones(2))
    head, tail = records.all()
    assert head.function == tail.function == "broken"
    assert not head.resumed and tail.resumed and not tail.recompile
    (cut,) = head.graph_breaks
    assert "print" in cut.reason and cut.where.startswith(__file__) and "in broken" in cut.where
    report = guards.report()
    assert 'print("in the middle")' in str(report)
    (found,) = report.breaks
    records.clear()
    torch._dynamo.reset()
    exec(found.remedy.code)
    try:
        compiled(broken)(torch.ones(2))
        assert len(records.all()) == 1 and records.all()[0].graph_breaks == ()
    finally:
        torch._dynamo.config.reorderable_logging_functions.discard(print)


def test_graph_break_of_item(compiled: Compile) -> None:
    def with_item(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    compiled(with_item)(torch.ones(2))
    (found,) = guards.report().breaks
    assert found.remedy.code == "torch._dynamo.config.capture_scalar_outputs = True"
    records.clear()
    torch._dynamo.reset()
    exec(found.remedy.code)
    compiled(with_item)(torch.ones(2))
    assert guards.report().breaks == ()


def test_parts_after_a_graph_break_recompile_on_their_own(compiled: Compile) -> None:
    f = compiled(broken, dynamic=False)
    for size in (2, 3):
        f(torch.ones(size))
    causes = {(cause.function, cause.source) for cause in guards.report().causes}
    assert causes == {("broken", "x.size(0)"), ("broken", "y.size(0)")}


def test_other_backends_beside_us(compiled: Compile) -> None:
    def shared(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    other = torch.compile(shared, backend="eager", dynamic=False)
    for size in (2, 3, 4):
        other(torch.ones(size))
    assert records.all() == ()
    f = compiled(shared, dynamic=False)
    f(torch.ones(2))
    (record,) = records.all()
    assert record.attempt == 3 and not record.recompile  # our first graph of this function, though Dynamo's fourth
    f(torch.ones(5))
    assert records.all()[-1].recompile and records.all()[-1].cause is not None and records.all()[-1].cause.before == "2"
    assert records.limits() == ()


def test_limit_of_another_backend_is_not_ours() -> None:
    setattr(torch._dynamo.config, LIMIT, 2)
    other = torch.compile(add_one, backend="eager", dynamic=False)
    for size in range(2, 6):
        other(torch.ones(size))
    assert records.limits() == ()


@THREADS_CRASH
def test_several_threads(compiled: Compile) -> None:
    def work(number: int) -> None:
        scope: dict[str, Any] = {}
        exec(compile(f"def task(x):\n    return x + {number}", __file__, "exec"), scope)  # each has code of its own
        f = compiled(scope["task"])
        for dtype in (torch.float32, torch.float64, torch.int64):
            f(torch.ones(2, dtype=dtype))

    threads = [threading.Thread(target=work, args=(number,), name=f"worker-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = records.all()
    assert len(everything) == 12 and sorted(record.index for record in everything) == [record.index for record in everything]
    for number in range(4):
        mine = [record for record in everything if record.thread == f"worker-{number}"]
        assert [record.recompile for record in mine] == [False, True, True]
        assert all(0 < record.seconds["dynamo"] < 30 for record in mine)


def test_reset_starts_anew_and_keeps_the_records(compiled: Compile) -> None:
    f = compiled(add_one)
    f(torch.ones(2))
    torch._dynamo.reset()
    f(torch.ones(3))
    f(torch.ones(4))
    first, second, third = records.all()
    assert (first.compile_id, second.compile_id, third.compile_id) == ("0/0", "0/0", "0/1")
    assert [record.recompile for record in records.all()] == [False, False, True]
    assert third.seconds["dynamo"] > 0  # the callback was put back


def test_no_warning_of_what_was_compiled_before_a_reset(compiled: Compile, caplog: pytest.LogCaptureFixture) -> None:
    """As where one process trains models of one class, one after the other."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with caplog.at_level(logging.WARNING, logger="ort_backend"):
        for _ in range(4):
            torch._dynamo.reset()
            step = compiled(function, dynamic=False)
            step(torch.ones(2))
            step(torch.ones(3))
    assert sum(record.cause is not None for record in records.all()) == 4
    assert not [entry for entry in caplog.records if entry.levelno == logging.WARNING]


@pytest.mark.skipif(not hasattr(torch.compiler, "set_stance"), reason="torch.compiler.set_stance came with 2.6")
def test_stances(compiled: Compile) -> None:
    f = compiled(add_one)
    with torch.compiler.set_stance("force_eager"):
        f(torch.ones(2))
    assert records.all() == ()
    f(torch.ones(2))
    with torch.compiler.set_stance("eager_on_recompile"):
        f(torch.ones(3))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        f(torch.ones(3))
    assert len(records.all()) == 1
    f(torch.ones(3))
    assert [record.recompile for record in records.all()] == [False, True]


def test_backend_that_fails_leaves_nothing_behind(backend: Callable[..., Any]) -> None:
    def failing(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        compilation = records.start(gm, None)
        with compilation.phase("aot"):
            raise ValueError("no")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        torch.compile(add_one, backend=failing)(torch.ones(2))
    assert records.all() == ()
    torch.compile(add_one, backend=backend)(torch.ones(2))
    assert len(records.all()) == 1 and not records.all()[0].recompile


def test_the_graph_that_was_closest_is_the_cause(compiled: Compile) -> None:
    """In evaluation the size changed: the training graph fails on its mode, the evaluation graph on the size, and that is the cause."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout())
    f = compiled(model, dynamic=False)
    f(torch.ones(2, 3))
    model.eval()
    f(torch.ones(2, 3))
    model.train()
    f(torch.ones(2, 3))
    model.eval()
    f(torch.ones(5, 3))
    record = records.all()[-1]
    assert {failure.kind for failure in record.failures} == {"training flag", "shape"}
    assert record.cause is not None and str(record.cause) == "shape of input.size(0): 2 -> 5"


def test_steps(compiled: Compile) -> None:
    f = compiled(add_one, dynamic=False)
    for step in range(6):
        f(torch.ones(2 + step // 3))
    assert [record.step for record in records.all()] == [0, 3]
    records.clear()
    for i in range(2):  # the step goes before a loop over layers within it
        f(torch.ones(20 + i))
    assert [record.step for record in records.all()] == [5, 5]
    records.clear()
    del step, i
    for batch in guards.steps([torch.ones(7), torch.ones(7), torch.ones(8)]):
        f(batch)
    assert [record.step for record in records.all()] == [0, 2]


def test_expect_no_recompiles(compiled: Compile) -> None:
    f = compiled(add_one)
    with guards.expect_no_recompiles():
        f(torch.ones(2))
    with pytest.raises(guards.UnexpectedRecompile, match=r"shape of x.size\(0\)") as caught, guards.expect_no_recompiles():
        f(torch.ones(3))
    assert "torch._dynamo.mark_dynamic(" in str(caught.value)
    assert caught.value.diagnosis.causes[0].values == ("2", "3")
    with guards.expect_no_recompiles():
        f(torch.ones(4))
    with pytest.raises(KeyError), guards.expect_no_recompiles():  # the user's own error is not hidden
        f(torch.ones(4, dtype=torch.float64))
        raise KeyError


def test_expect_no_recompiles_sees_the_limit(compiled: Compile) -> None:
    setattr(torch._dynamo.config, LIMIT, 1)
    f = compiled(add_one)
    f(torch.ones(2))
    with pytest.raises(guards.UnexpectedRecompile, match="EAGER"), guards.expect_no_recompiles():
        f(torch.ones(2, dtype=torch.float64))


def test_padding_to_the_buckets_of_the_remedy(compiled: Compile) -> None:
    lengths = [17, 23, 31, 40, 47, 58, 61]
    f = compiled(add_one, dynamic=False)
    for length in lengths:
        x = torch.ones(2, length)
        f(x)
    (cause,) = guards.report().causes
    assert cause.shown_values == "17, 23, 31, ... 7 values"
    found = re.search(r"pad to multiples of (\d+): (\d+) graphs", cause.remedy.text)
    assert found is not None
    records.clear()
    torch._dynamo.reset()
    multiple = int(found.group(1))
    for length in lengths:
        f(torch.ones(2, -(-length // multiple) * multiple))
    assert len(records.all()) == int(found.group(2)) <= 4


def test_a_backend_called_for_every_bucket_of_ddp() -> None:
    """Several graphs of one compile: Dynamo's seconds are counted once."""

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        for _ in range(2):
            compilation = records.start(gm, None)
            with compilation.phase("aot"):
                time.sleep(0.05)
            compilation.finish(None)
        return gm.forward

    began = time.perf_counter()
    torch.compile(add_one, backend=backend)(torch.ones(2))
    assert sum(record.total_seconds for record in records.all()) < time.perf_counter() - began
    assert [record.compile_id for record in records.all()] == ["0/0", "0/0"]
