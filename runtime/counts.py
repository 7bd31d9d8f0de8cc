"""How often a compiled graph ran."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class RunCounts:
    """Runs of one graph so far; outlives its session, so that a report can still show it."""

    forward: int = 0
    backward: int = 0
    eager: int = 0  # inside a Python node, where ONNX Runtime cannot run another

    def ran_forward(self) -> None:
        """One more forward."""
        self.forward += 1

    def ran_backward(self) -> None:
        """One more backward."""
        self.backward += 1
