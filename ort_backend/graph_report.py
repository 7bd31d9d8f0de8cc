"""What was compiled, and what runs where: `ort_backend.report()`."""

from __future__ import annotations

import collections
import dataclasses
import io
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from ort_backend.lowering.lowered import Content, Outside
from ort_backend.runtime.counts import RunCounts

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MAX_GRAPHS = 1000

_graphs: collections.deque[GraphReport] = collections.deque(maxlen=MAX_GRAPHS)
_numbers = itertools.count()


# Dynamo passes over the code of `torch.nn`, and `Module.compile` does not wrap what belongs to it as `torch.compile` does (read in torch 2.13).
_NOTHING = """\
No graph has been compiled.
A module of torch.nn's own, compiled in place, runs in eager PyTorch with every backend: nn.Sequential(...).compile(backend="ort_training").
Call what torch.compile(module, backend="ort_training") returns, or give the module a class with a forward of your own.
"""


@dataclasses.dataclass(frozen=True)
class OutsideCount(Outside):
    """Nodes of one operator that PyTorch runs, for one reason: as `PythonOp` in the session, or between sessions. The line is the first one's.

    Attributes:
        count: How many nodes.
    """

    count: int = 1


@dataclasses.dataclass(frozen=True)
class GraphReport:
    """One compiled graph.

    Attributes:
        name: Unique in the process; dumped files carry it.
        kind: `"training"` (forward and backward) or `"inference"`.
        function: The user's function that it comes from, with the file and line where it is defined.
        fx_nodes: Computing nodes of the traced graph.
        sessions: Number of ONNX Runtime sessions. One runs all of the graph, unless ONNX Runtime has no training kernels: then forward and
            backward have their own, and others follow where PyTorch runs something in between.
        onnx_nodes: Nodes of the ONNX graphs before ONNX Runtime's optimiser, and what PyTorch runs between them.
        functions: Calls of users' `torch.autograd.Function`s, each of which runs the user's own Python.
        inlined_functions: Such calls whose forward and backward were traced into operators instead.
        outside: What PyTorch runs, most frequent first, and last what it runs by choice.
        passes: The user's passes that it went through, FX passes first.
        captured_sessions: Sessions whose runs are captured as CUDA graphs (option `cuda_graphs`), as far as is known before they run.
        capture_seconds: Time in AOTAutograd and in this backend, without the next two. Dynamo's own time is in `ort_backend.guards`.
        lowering_seconds: Time to write the ONNX graph.
        session_seconds: Time to make the ONNX Runtime session.
        kept_bytes: Bytes that wait between forward and backward for the example sizes, without inputs and parameters; as lowered,
            before ONNX Runtime's optimiser.
        counts: Runs so far.
        from_cache: Whether it was compiled in an earlier process or compile, and read from PyTorch's cache.
    """

    name: str
    kind: str
    function: str
    fx_nodes: int
    sessions: int
    onnx_nodes: int
    functions: int
    inlined_functions: int
    outside: tuple[OutsideCount, ...]
    capture_seconds: float
    lowering_seconds: float
    session_seconds: float
    kept_bytes: int
    counts: RunCounts
    passes: tuple[str, ...] = ()
    captured_sessions: int = 0
    from_cache: bool = False

    @property
    def python_ops(self) -> int:
        """Number of operators that PyTorch runs."""
        return sum(one.count for one in self.outside)

    def summary(self) -> str:
        """One line for the log."""
        seconds = f"{self.capture_seconds:.2f} s capture, {self.lowering_seconds:.2f} s lowering, {self.session_seconds:.2f} s session"
        outside = ", ".join(f"{one.operator} x{one.count}" for one in self.outside)
        outside = f"{self.python_ops} in PyTorch ({outside})" if outside else "0 in PyTorch"
        functions = f"{self.functions} autograd.Functions, " if self.functions else ""
        functions += f"{self.inlined_functions} autograd.Functions inline, " if self.inlined_functions else ""
        functions += f"behind the passes {', '.join(self.passes)}, " if self.passes else ""
        nodes = f"{self.onnx_nodes} nodes in {_number(self.sessions, 'session')}"
        nodes += f" ({self.captured_sessions} as CUDA graphs)" if self.captured_sessions else ""
        source = ", from PyTorch's cache" if self.from_cache else ""
        return f"{self.name}: {self.kind} graph of {self.function}{source}, {nodes}, {functions}{outside}; {seconds}"


@dataclasses.dataclass(frozen=True)
class Report:
    """Every graph compiled so far in this process (the newest thousand). Prints as tables."""

    graphs: tuple[GraphReport, ...]

    def __rich__(self) -> Group:
        """The tables, for `rich.print`."""
        from rich.console import Group

        if not self.graphs:
            return Group(_NOTHING)
        tables = [_graph_table(self.graphs)]
        if any(graph.outside for graph in self.graphs):
            tables.append(_outside_table(self.graphs))
        return Group(*tables)

    def __str__(self) -> str:
        drawn = random.getstate()  # rich draws from it when it is imported
        from rich.console import Console

        random.setstate(drawn)
        console = Console(file=io.StringIO(), width=160)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]


def report() -> Report:
    """What runs where: for each compiled graph its nodes, what PyTorch runs and why, seconds, memory, runs so far."""
    return Report(tuple(_graphs))


def clear() -> None:
    """Forgets the graphs compiled so far."""
    _graphs.clear()


def next_name() -> str:
    """A name for the next graph."""
    return f"graph_{next(_numbers)}"


def add(
    name: str,
    kind: str,
    function: str,
    content: Content,
    seconds: Mapping[str, float],
    counts: RunCounts,
    inlined: int = 0,
    passes: tuple[str, ...] = (),
    captured_sessions: int = 0,
    from_cache: bool = False,
) -> GraphReport:
    """Puts a graph on the report. `seconds` has `capture`, `lowering` and `session`."""
    made = GraphReport(
        name=name,
        kind=kind,
        function=function,
        fx_nodes=content.fx_nodes,
        sessions=content.sessions,
        onnx_nodes=content.onnx_nodes,
        functions=len(content.functions),
        inlined_functions=inlined,
        outside=_counted(content.outside),
        capture_seconds=seconds["capture"],
        lowering_seconds=seconds["lowering"],
        session_seconds=seconds["session"],
        kept_bytes=content.kept_bytes,
        counts=counts,
        passes=passes,
        captured_sessions=captured_sessions,
        from_cache=from_cache,
    )
    _graphs.append(made)
    return made


def _counted(outside: Sequence[Outside]) -> tuple[OutsideCount, ...]:
    groups: dict[tuple[str, str], list[Outside]] = {}
    for one in outside:
        groups.setdefault((one.operator, one.reason), []).append(one)
    counted = [OutsideCount(**vars(group[0]), count=len(group)) for group in groups.values()]
    return tuple(sorted(counted, key=lambda one: (one.is_choice, -one.count)))


def _graph_table(graphs: Sequence[GraphReport]) -> Table:
    from rich.table import Table

    caption = (
        "ORT: nodes on its kernels. Python: operators of PyTorch + calls of autograd.Functions. Seconds: capture + lowering + session.\n"
        "MB: kept between forward and backward. Runs: forward + backward."
    )
    table = Table(title="ort_training: compiled graphs", caption=caption)
    table.add_column("graph", no_wrap=True)
    table.add_column("function", overflow="fold", min_width=16)
    for heading in ("ORT", "Python", "seconds", "MB", "runs"):
        table.add_column(heading, justify="right")
    for graph in graphs:
        seconds = " + ".join(f"{s:.2f}" for s in (graph.capture_seconds, graph.lowering_seconds, graph.session_seconds))
        nodes = (str(graph.onnx_nodes - graph.python_ops), f"{graph.python_ops} + {_functions(graph)}")
        passes = f"\nbehind {', '.join(graph.passes)}" if graph.passes else ""
        sessions = "" if graph.sessions == 1 else f"\n{graph.sessions} sessions"
        sessions += f"\n{graph.captured_sessions} as CUDA graphs" if graph.captured_sessions else ""
        sessions += "\nfrom cache" if graph.from_cache else ""
        table.add_row(f"{graph.name}\n{graph.kind}{sessions}", _short(graph.function) + passes, *nodes, seconds, _kept(graph), _runs(graph))
    return table


def _kept(graph: GraphReport) -> str:
    return f"{graph.kept_bytes / 1e6:.2f}" if graph.kind == "training" else ""


def _runs(graph: GraphReport) -> str:
    backward = f" + {graph.counts.backward}" if graph.kind == "training" else ""
    return f"{graph.counts.forward}{backward}"


def _number(count: int, name: str) -> str:
    return f"{count} {name}" if count == 1 else f"{count} {name}s"


def _short(function: str) -> str:
    """The function and its line, without the folders that the file lies in."""
    name, _, where = function.partition(" (")
    return f"{name}\n{PurePath(where.rstrip(')')).name}" if where else name


def _functions(graph: GraphReport) -> str:
    return f"{graph.functions} + {graph.inlined_functions} inline" if graph.inlined_functions else str(graph.functions)


def _outside_table(graphs: Sequence[GraphReport]) -> Table:
    from rich.table import Table

    table = Table(title="run by PyTorch")
    for heading in ("graph", "operator", "count", "reason", "first at"):
        table.add_column(heading, overflow="fold")
    for graph in graphs:
        for one in graph.outside:
            table.add_row(graph.name, one.operator, str(one.count), one.reason, one.where)
    return table
