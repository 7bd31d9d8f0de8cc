"""Where a step's time goes, by the user's line and by operator: what the profiles say that ONNX Runtime writes.

    torch.compile(model, backend="ort_training", options={"session_options": {"enable_profiling": True, "profile_file_prefix": "out/profile"}})

makes each session write one (Chrome's trace format, which Perfetto shows), complete when the process ends, and

    python -m ort_backend.profile out/profile*

adds them up. A node counts with the median of its runs, so that the first ones do not matter.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import io
import json
import re
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

# What `runtime.profiling` makes of a node's name, and ONNX Runtime of that.
_NAME = re.compile(r"^(?:(?P<called>[^\s(]\S*) )?(?P<node>[^\s(]\S*)(?: \((?P<backward>backward of )?(?P<line>.+:\d+)\))?_kernel_time$")
_NO_LINE = "(no line of the program)"


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one line, or one operator, takes of a step.

    Attributes:
        name: The line, `file:number`, or the operator.
        forward: Milliseconds in the forward.
        backward: Milliseconds in the backward.
        nodes: Of how many nodes.
    """

    name: str
    forward: float
    backward: float
    nodes: int

    @property
    def total(self) -> float:
        """Milliseconds in both."""
        return self.forward + self.backward


@dataclasses.dataclass(frozen=True)
class Profile:
    """Kernels' times of one run of every graph, the most expensive first; `str` and `rich.print` show tables of them.

    Attributes:
        lines: By the user's line.
        operators: By ONNX operator, or PyTorch's where its kernel runs.
    """

    lines: tuple[Cost, ...]
    operators: tuple[Cost, ...]

    @property
    def total(self) -> float:
        """Milliseconds of all kernels. What PyTorch runs outside of sessions is none of them."""
        return sum(cost.total for cost in self.lines)

    def shown(self, top: int) -> Group:
        """Tables of the `top` most expensive lines and operators."""
        from rich.console import Group

        return Group(self._table("line", self.lines, top), self._table("operator", self.operators, top))

    def _table(self, of: str, costs: Sequence[Cost], top: int) -> Table:
        from rich.table import Table

        table = Table(title=f"kernels by {of}: {self.total:.3f} ms a step", caption=f"and {len(costs) - top} more" if len(costs) > top else None)
        table.add_column(of, overflow="fold")
        for title in ("%", "ms", "forward", "backward", "nodes"):
            table.add_column(title, justify="right")
        for cost in costs[:top]:
            share = 100 * cost.total / self.total if self.total else 0.0
            table.add_row(cost.name, f"{share:.1f}", *(f"{time:.3f}" for time in (cost.total, cost.forward, cost.backward)), str(cost.nodes))
        return table

    def __rich__(self) -> Group:
        return self.shown(20)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160)
        console.print(self)
        return console.file.getvalue()  # type: ignore[attr-defined]


def end() -> list[str]:
    """Has every session write its profile now, as at the end of the process, and record no more.

    Returns:
        The paths of the files, for `read`.
    """
    from ort_backend.runtime.profiling import end_profiles

    return end_profiles()


def read(paths: Iterable[str | Path]) -> Profile:
    """Adds up profiles of sessions.

    Raises:
        ValueError: a file is no complete profile of ONNX Runtime's.
        OSError: a file cannot be read.
    """
    lines, operators = _Costs(), _Costs()
    for path in paths:
        durations: dict[str, list[int]] = collections.defaultdict(list)
        operator: dict[str, str] = {}
        for event in _events(Path(path)):
            durations[event["name"]].append(event["dur"])
            operator[event["name"]] = event["args"]["op_name"]
        for name, runs in durations.items():
            found = _NAME.match(name)
            assert found is not None
            time, is_backward = statistics.median(runs) / 1000, found["backward"] is not None
            lines.add(found["line"] or _NO_LINE, time, is_backward)
            operators.add(found["called"] or operator[name], time, is_backward)
    return Profile(lines.sorted(), operators.sorted())


class _Costs:
    def __init__(self) -> None:
        self._times: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        self._nodes: collections.Counter[str] = collections.Counter()

    def add(self, name: str, time: float, is_backward: bool) -> None:
        self._times[name][is_backward] += time
        self._nodes[name] += 1

    def sorted(self) -> tuple[Cost, ...]:
        costs = (Cost(name, forward, backward, self._nodes[name]) for name, (forward, backward) in self._times.items())
        return tuple(sorted(costs, key=lambda cost: -cost.total))


def _events(path: Path) -> Iterable[dict[str, Any]]:
    """The runs of kernels, without those inside of loops and branches, whose own runs they are a part of."""
    text = path.read_text(encoding="utf-8")
    if not text.strip():
        raise ValueError(f"{path} is empty: a session writes its profile when the process ends, or ort_backend.profile.end() is called")
    try:
        events = [one for one in json.loads(text) if one["cat"] == "Node" and _NAME.match(one["name"])]
        events.sort(key=lambda one: (one["ts"], -one["dur"]))
    except (json.JSONDecodeError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no complete profile of ONNX Runtime's: {error}") from None
    over: dict[int, int] = {}  # by thread, when the last one ends
    for event in events:
        if event["ts"] >= over.get(event["tid"], 0):
            over[event["tid"]] = event["ts"] + event["dur"]
            yield event


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; the exit status is 2 for a file that cannot be read, or is no profile."""
    from rich.console import Console

    parser = argparse.ArgumentParser(prog="python -m ort_backend.profile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("profile", nargs="+", help="files that sessions wrote whose session_options have enable_profiling")
    parser.add_argument("--top", type=int, default=20, metavar="N", help="how many lines and operators (default: 20)")
    options = parser.parse_args(arguments)
    try:
        found = read(options.profile)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    Console().print(found.shown(options.top))
    return 0


if __name__ == "__main__":
    sys.exit(main())
