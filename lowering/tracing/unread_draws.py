"""Random numbers that the program draws and nothing reads: eager PyTorch draws them, so whatever is drawn behind them depends on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch._inductor import config


@contextlib.contextmanager
def unread_draws() -> Iterator[None]:
    """While AOTAutograd traces: such draws stay in the graph.

    `fx.Graph.eliminate_dead_code` takes random operators for pure while a graph is compiled, unless inductor is told to draw eager PyTorch's numbers
    (read in torch 2.13).
    """
    with config.patch(fallback_random=True):
        yield
