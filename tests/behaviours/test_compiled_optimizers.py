"""Compiled steps of PyTorch's optimizers: parameters and states are eager's, and one call takes all parameters where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ops.trained import BETWEEN_SESSIONS
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_version import FACTORS_ARE_SYMBOLIC, TORCH

from ort_backend import graph_report
from ort_backend.lowering.kernels import pointwise_steps
from ort_backend.lowering.passes import optimizer_rules, optimizer_steps
from ort_backend.lowering.passes.pointwise_programs import program_of

FUSED = {
    "Adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "Adam-L2": lambda ps: torch.optim.Adam(ps, lr=0.01, weight_decay=0.1, maximize=True),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.013, betas=(0.8, 0.95), eps=1e-5),
    "AdamW-foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "AdamW-tensor": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01)),
    "AdamW-groups": lambda ps: torch.optim.AdamW([{"params": ps[:1]}, {"params": ps[1:], "weight_decay": 0.0, "lr": 0.02}]),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, weight_decay=0.2),
    "SGD-momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, dampening=0.2, maximize=True),
    "SGD-nesterov": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "SGD-tensor": lambda ps: torch.optim.SGD(ps, lr=torch.tensor(0.1), momentum=0.9),
}
PROGRAMS = {
    "AdamW-amsgrad": lambda ps: torch.optim.AdamW(ps, lr=0.01, amsgrad=True),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps, lr=0.5, weight_decay=0.1),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, lr_decay=0.1),
    "Adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "ASGD": lambda ps: torch.optim.ASGD(ps, lr=0.01),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=0.01, foreach=False),
    "RAdam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.9, centered=True),
    "RMSprop-groups": lambda ps: torch.optim.RMSprop([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.02}], maximize=True),
    "RMSprop-tensor": lambda ps: torch.optim.RMSprop(ps, lr=torch.tensor(0.01), capturable=False, foreach=False),
}


def _steps(make: Callable[[list[nn.Parameter]], Any], *, compiled: bool, dtype: torch.dtype = torch.float32, layout: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    sizes: list[tuple[int, ...]] = [(64, 65), (8, 4, 3, 3), (17,), (3, 2), (5,)]
    if dtype is torch.float32:  # PyTorch 2.13 takes a float64 scalar for a number that stays: `aot_eager` does not move it either
        sizes.append(())
    parameters = [nn.Parameter(torch.randn(size, dtype=dtype)) for size in sizes]
    if layout:
        parameters[1] = nn.Parameter(parameters[1].detach().contiguous(memory_format=torch.channels_last))
    optimizer = make(parameters)

    def step() -> None:
        optimizer.step()

    run = torch.compile(step, backend="ort_training") if compiled else step
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, dtype=dtype)
        run()
    return [*(one.detach() for one in parameters), *(one for p in parameters for one in optimizer.state[p].values() if isinstance(one, Tensor))]


def _compare(make: Callable[[list[nn.Parameter]], Any], **given: Any) -> set[str]:
    torch._dynamo.reset()
    graph_report.clear()
    for mine, theirs in zip(_steps(make, compiled=True, **given), _steps(make, compiled=False, **given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)
        assert mine.stride() == theirs.stride()
    assert graph_report.report().graphs
    outside = (one for one in graph_report.report().graphs[-1].outside if one.reason not in BETWEEN_SESSIONS)
    return {one.operator.split("::")[-1] for one in outside}


@pytest.mark.parametrize("name", FUSED)
def test_one_kernel_takes_all_parameters(name: str) -> None:
    assert _compare(FUSED[name]) == {"sgd_step" if name.startswith("SGD") else "adam_step"}


@pytest.mark.parametrize("name", ["AdamW", "SGD-momentum"])
def test_in_double_precision_and_with_parameters_in_another_order_of_memory(name: str) -> None:
    _compare(FUSED[name], dtype=torch.float64, layout=True)


@pytest.mark.parametrize(
    "make, operator", [(torch.optim.AdamW, "adam_step"), (torch.optim.Adam, "adam_step"), (torch.optim.RMSprop, "pointwise_step")]
)
def test_a_learning_rate_that_a_scheduler_changes(make: Callable[..., torch.optim.Optimizer], operator: str, small_programs: None) -> None:
    """The second compile takes it as a scalar: there are no more than two."""

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(80, 80)) for _ in range(2)]
        optimizer = make(parameters, lr=0.01, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step() -> None:
            optimizer.step()

        run_step = torch.compile(step, backend="ort_training") if compiled else step
        for _ in range(6):
            for parameter in parameters:
                parameter.grad = torch.randn(80, 80)
            run_step()
            scheduler.step()
        return [one.detach() for one in parameters]

    torch._dynamo.reset()
    graph_report.clear()
    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=5e-6)
    graphs = graph_report.report().graphs
    count = 2 if operator == "adam_step" or TORCH >= FACTORS_ARE_SYMBOLIC else len(graphs)
    found = [{one.operator for one in graph.outside if one.reason not in BETWEEN_SESSIONS} for graph in graphs]
    assert found == [{f"ort_training::{operator}"}] * count


@pytest.fixture
def small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few elements are enough, and a part is a quarter of the largest parameter."""
    monkeypatch.setattr(optimizer_steps, "_LEAST_FOR_PROGRAMS", 1024)
    monkeypatch.setattr(pointwise_steps, "_PART", 4400)
    pointwise_steps._kernel.cache_clear()


@pytest.mark.parametrize("name", PROGRAMS)
def test_any_other_rule_of_pointwise_functions_is_a_program(name: str, small_programs: None) -> None:
    assert _compare(PROGRAMS[name]) == {"pointwise_step"}


@pytest.mark.parametrize("name", ["Adadelta", "NAdam"])
def test_programs_in_double_precision_and_another_order_of_memory(name: str, small_programs: None) -> None:
    _compare(PROGRAMS[name], dtype=torch.float64, layout=True)


def test_few_elements_stay_in_the_session() -> None:
    assert not _compare(PROGRAMS["RMSprop"])


def test_other_rules_stay_operators(small_programs: None) -> None:
    """`Rprop` chooses by masks, which no program makes."""
    assert not {"pointwise_step", "sgd_step", "adam_step"} & _compare(lambda ps: torch.optim.Rprop(ps, lr=0.01))


def test_a_program_takes_few_passes() -> None:
    """RMSprop: the average of squares in two calls, its root, the sum with epsilon, the step; and all but the root where arguments lie."""

    def step(parameter: Tensor, average: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        average = average * 0.99 + gradient * gradient * 0.01
        return parameter - gradient / (average.sqrt() + 1e-8) * 1e-3, average

    graph = make_fx(step, tracing_mode="fake")(*torch.randn(3, 4)).graph
    parameter, average, gradient = (node for node in graph.nodes if node.op == "placeholder")
    calls = [node for node in graph.nodes if node.op == "call_function"]
    results: Any = graph.output_node().args[0]
    program, scalars = program_of(calls, {parameter: results[0], average: results[1]}, [gradient])
    assert [(name, where) for name, _, _, where in program.calls] == [
        ("mul", "w1"), ("addcmul", "w1"), ("sqrt", "t0"), ("add", "t0"), ("addcdiv", "w0"),
    ]  # fmt: skip
    assert (program.between, scalars) == (1, ())


@pytest.mark.parametrize(
    "write",
    [
        lambda a, b, g, s: (a.add_(b.t()), b.mul_(0.5).add_(g)),  # a view of what another step writes to
        lambda a, b, g, s: (a.mul_(0.9).addcmul_(a.t().clone(), g), b.mul_(2)),  # and a copy of a view of its own
        lambda a, b, g, s: (a.copy_(b + g), b.copy_(a * 2)),
        lambda a, b, g, s: (a.sub_(0.1 * g[:1]), b.mul_(0.9)),  # a gradient of fewer elements
        lambda a, b, g, s: (a.add_((g * b) + (g * b)), b.mul_(s), s.add_(1)),
        lambda a, b, g, s: (a.lerp_(b.clamp(-1, 1) / (g.abs() + 1), 0.3), b.addcdiv_(a, g.square() + 1, value=-0.5)),
        lambda a, b, g, s: (a.sub_(g), a.copy_(a.sign()), b.div_(b.abs() + 1)),
        lambda a, b, g, s: (a.copy_(torch.where(s > 2, a * g, b)), s.add_(1)),
    ],
)
def test_programs_over_several_arguments(write: Callable[..., Any], small_programs: None) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    compiled = torch.compile(lambda *given: None if write(*given) else None, backend="ort_training", fullgraph=True)
    mine = [*torch.randn(3, 80, 80, dtype=torch.float64), torch.tensor(2.0)]
    theirs = [one.clone() for one in mine]
    for _ in range(3):
        compiled(*mine)
        write(*theirs)
    torch.testing.assert_close(mine, theirs)


def test_what_else_a_program_makes_of_new_values() -> None:
    """The norm of an update is read off the session, which computes it of the old values; a clipped gradient is one."""

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(80, 80))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step() -> tuple[Tensor, Tensor]:
            before = parameter.detach().clone()
            assert parameter.grad is not None
            parameter.grad = parameter.grad * (1 / parameter.grad.norm().clamp(min=1))
            optimizer.step()
            return (parameter.detach() - before).norm(), parameter.detach().sum()

        results: list[Tensor] = []
        compiled_step = torch.compile(step, backend="ort_training") if compiled else step
        for _ in range(3):
            parameter.grad = torch.randn(80, 80)
            results += [*compiled_step(), parameter.detach().clone()]
        return results

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False), rtol=1e-4, atol=1e-4)


def test_another_argument_that_gets_the_same_value() -> None:
    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameter, copy = nn.Parameter(torch.randn(80, 80)), torch.zeros(80, 80)
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)

        def step() -> None:
            optimizer.step()
            copy.copy_(parameter.detach())

        compiled_step = torch.compile(step, backend="ort_training") if compiled else step
        for _ in range(3):
            parameter.grad = torch.randn(80, 80)
            compiled_step()
        return [parameter.detach(), copy]

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-5)


def test_a_momentum_of_two_parameters_is_written_to_once() -> None:
    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        first, second, momentum, gradient = (torch.randn(80, 80) for _ in range(4))

        def step() -> None:
            momentum.mul_(0.9).add_(gradient)
            first.sub_(0.1 * momentum)
            second.sub_(0.2 * momentum)

        compiled_step = torch.compile(step, backend="ort_training") if compiled else step
        for _ in range(2):
            compiled_step()
        return [first, second, momentum]

    torch._dynamo.reset()
    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_shared", [False, True])
def test_counts_of_steps_are_counted_once(is_shared: bool) -> None:
    """One count for two parameters, and counts that are a result as well."""

    def run(compiled: bool) -> list[Tensor]:
        torch.manual_seed(0)
        parameters, averages, squares, gradients = (list(torch.randn(2, 80, 80).square()) for _ in range(4))
        counts = [torch.tensor(0.0), torch.tensor(3.0)]

        def step() -> Tensor | None:
            if is_shared:
                counts[0].add_(1)
            for i in range(2):
                count = counts[0] if is_shared else counts[i].add_(1)
                averages[i].lerp_(gradients[i], 0.1)
                squares[i].mul_(0.99).addcmul_(gradients[i], gradients[i], value=0.01)
                root = (squares[i] / (1 - 0.99**count)).sqrt() + 1e-8
                parameters[i].sub_(0.1 * (averages[i] / (1 - 0.9**count)) / root)
            return None if is_shared else counts[1] * 2

        compiled_step = torch.compile(step, backend="ort_training") if compiled else step
        results = [one for one in (compiled_step() for _ in range(3)) if one is not None]
        return [*results, *parameters, *averages, *squares, *counts]

    torch._dynamo.reset()
    graph_report.clear()
    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-5)
    assert {one.operator for one in graph_report.report().graphs[0].outside if one.reason not in BETWEEN_SESSIONS} == {"ort_training::adam_step"}


def test_averages_of_weights_are_averages() -> None:
    average, source = torch.randn(80, 80), torch.randn(80, 80)
    expected = average.clone().lerp_(source, 0.1)
    torch._dynamo.reset()
    graph_report.clear()
    torch.compile(lambda a, s: a.lerp_(s, 0.1), backend="ort_training")(average, source)
    torch.testing.assert_close(average, expected)
    assert not graph_report.report().graphs[0].outside


def test_a_rule_is_told_from_what_it_gives() -> None:
    def adam(p: Tensor, g: Tensor, states: Any, t: Tensor, rate: Tensor, slip: float = 1.0) -> Any:
        v, m = (0.98 * states[0] + 0.02 * g * g, 0.7 * states[1] + 0.3 * g)  # in this order
        corrected = (m / (1 - 0.7 ** (t + 1))) / ((v / (1 - 0.98 ** (t + 1))).sqrt() + 1e-6)
        return p - 0.0123456789 * corrected * slip - 0.0123456789 * 0.3 * p, (v, m)

    rule = optimizer_rules.rule_of(adam, 2, counts=True, has_rate=False)
    assert rule is not None and rule.order == (1, 0)
    assert rule.settings == pytest.approx((0.0123456789, 0.7, 0.98, 0.3, 1e-6, True, False), rel=1e-9)

    def other(p: Tensor, g: Tensor, states: Any, t: Tensor, rate: Tensor) -> Any:
        return adam(p, g, states, t, rate, slip=1 + 1e-5 * float(t))

    assert optimizer_rules.rule_of(other, 2, counts=True, has_rate=False) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda b, x, n: b.add_(n),
        lambda b, x, n: b.mul_(n).add_(x),
        lambda b, x, n: b.copy_(torch.where(x > 0, b, x)),
        lambda b, x, n: b.mul_(x[0, 0]),
    ],
)
def test_other_writes_to_arguments(write: Callable[[Tensor, Tensor, int], Tensor]) -> None:
    """With a number that is symbolic at the second compile."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda b, x, n: None if write(b, x, n) is None else None, backend="ort_training", fullgraph=True)
    mine, theirs = torch.zeros(80, 80), torch.zeros(80, 80)
    for number in (3, 4, 5):
        x = torch.randn(80, 80)
        compiled(mine, x, number)
        write(theirs, x, number)
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
