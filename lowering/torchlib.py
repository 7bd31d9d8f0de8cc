"""onnxscript's torch_lib as the second source of lowerings. The only file that touches it (read in onnxscript 0.7.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def find(target: object) -> Callable[..., Any] | None:
    """torch_lib's lowering of an operator overload, if there is a usable one."""
    return None


def call(function: Callable[..., Any], op: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a torch_lib lowering so that its nodes go where `op` writes."""
    raise AssertionError("find gives nothing")
