"""onnxscript, imported without ONNX's reference implementation, which it imports for its own evaluator and optimiser: 11 MB and 0.1 s.

Lowering uses onnxscript's graph builder, and neither of the two. `onnx.reference` is imported as soon as somebody asks for something in it.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import onnx

_LATER = ("onnx.reference", "onnx.reference.ops")


class _Later(types.ModuleType):
    """Stands for a module until an attribute of it is wanted."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for `__path__` and the like
            raise AttributeError(name)
        _remove()
        for later in _LATER:
            importlib.import_module(later)
        return getattr(sys.modules[self.__name__], name)


def _import_onnxscript() -> None:
    if "onnxscript" not in sys.modules and not any(name in sys.modules for name in _LATER):
        sys.modules.update({name: _Later(name) for name in _LATER})
        onnx.reference = sys.modules[_LATER[0]]  # onnxscript reads it there at its first use
    try:
        import onnxscript  # noqa: F401
    finally:
        _remove()


def _remove() -> None:
    for name in _LATER:
        if isinstance(sys.modules.get(name), _Later):
            del sys.modules[name]


_import_onnxscript()

from onnxscript import GraphBuilder  # noqa: E402
from onnxscript._internal import param_manipulation  # noqa: E402

__all__ = ["GraphBuilder", "param_manipulation"]
