"""Samples of an operator as one straight-line function of all their tensors: nothing for Dynamo to trace but the operator."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Program:
    """A function that calls an operator once for each sample.

    Attributes:
        tensors: The tensors of each sample.
        function: Takes all of them, one after the other; returns the operator's results, a list for each sample.
        source: The function's text.
    """

    def __init__(self, operator: Callable[..., Any], chosen: Sequence[Any]) -> None:
        self.tensors: list[list[torch.Tensor]] = []
        self._names: dict[str, Any] = {"operator": operator, "own": _own}
        self._count = 0
        lines, results = [], []
        for i, sample in enumerate(chosen):
            self.tensors.append([])
            arguments = [self._text(one) for one in (sample.input, *sample.args)]
            arguments += [f"{name}={self._text(one)}" for name, one in sample.kwargs.items()]
            call = f"operator({', '.join(arguments)})"
            if sample.output_process_fn_grad.__qualname__ != "SampleInput.__init__.<locals>.<lambda>":
                # It picks what of the results is well defined, as singular vectors up to their signs.
                call = f"{self._constant(sample.output_process_fn_grad)}({call})"
            lines.append(f"    r{i} = own({call})")
            results.append(f"r{i}")
        parameters = ", ".join(f"t{i}" for i in range(self._count))
        self.source = "\n".join([f"def program({parameters}):", *lines, f"    return [{', '.join(results)}]"])
        exec(self.source, self._names)
        self.function: Callable[..., list[Any]] = self._names["program"]

    def _text(self, value: Any) -> str:
        """An expression for an argument; tensors become parameters."""
        if isinstance(value, torch.Tensor):
            self.tensors[-1].append(value)
            self._count += 1
            return f"t{self._count - 1}"
        if type(value) is list:
            return f"[{', '.join(self._text(one) for one in value)}]"
        if type(value) is tuple:
            return f"({''.join(f'{self._text(one)}, ' for one in value)})"
        if type(value) is dict and all(type(key) is str for key in value):
            return f"{{{', '.join(f'{key!r}: {self._text(one)}' for key, one in value.items())}}}"
        is_literal = value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value))
        return repr(value) if is_literal else self._constant(value)

    def _constant(self, value: Any) -> str:
        if type(value) is slice:
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if isinstance(value, builtins.type):
            return value.__name__ if value in (bool, int, float, complex) else self._named(value)
        return self._named(value)

    def _named(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def _own(result: Any) -> Any:
    """A copy: AOTAutograd would compute a view of an argument outside of the graph."""
    if isinstance(result, torch.Tensor):
        return result.clone()
    return [_own(one) for one in result] if isinstance(result, (list, tuple)) else result
