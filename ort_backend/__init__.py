"""`ort_training`: a `torch.compile` backend that trains PyTorch models on ONNX Runtime.

`torch.compile(model, backend="ort_training")` needs no import of this package: PyTorch finds it by its entry point. What is
here is for those who want more: `ort_backend.report()` shows what was compiled, `CompileOptions` documents the options.

Every name is loaded at its first use, so that importing the package stays cheap and never imports ONNX Runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ort_backend.compiler import ort_training
    from ort_backend.errors import (
        EnvironmentProblem,
        LoweringError,
        OptionError,
        OrtBackendError,
        OutOfMemoryError,
        OutOfRangeError,
        PassError,
        SessionError,
        VerificationError,
    )
    from ort_backend.graph_report import report
    from ort_backend.lowering.functions.function_behaviour import register_fake
    from ort_backend.lowering.registry import register as register_lowering
    from ort_backend.options import CompileOptions

__version__ = "0.1.0"

__all__ = [
    "CompileOptions",
    "EnvironmentProblem",
    "LoweringError",
    "OptionError",
    "OrtBackendError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "PassError",
    "SessionError",
    "VerificationError",
    "__version__",
    "ort_training",
    "register_fake",
    "register_lowering",
    "report",
]

# Public name -> (module, name in it).
_HOMES = {
    "CompileOptions": ("ort_backend.options", "CompileOptions"),
    "EnvironmentProblem": ("ort_backend.errors", "EnvironmentProblem"),
    "LoweringError": ("ort_backend.errors", "LoweringError"),
    "OptionError": ("ort_backend.errors", "OptionError"),
    "OrtBackendError": ("ort_backend.errors", "OrtBackendError"),
    "OutOfMemoryError": ("ort_backend.errors", "OutOfMemoryError"),
    "OutOfRangeError": ("ort_backend.errors", "OutOfRangeError"),
    "PassError": ("ort_backend.errors", "PassError"),
    "SessionError": ("ort_backend.errors", "SessionError"),
    "VerificationError": ("ort_backend.errors", "VerificationError"),
    "ort_training": ("ort_backend.compiler", "ort_training"),
    "register_fake": ("ort_backend.lowering.functions.function_behaviour", "register_fake"),
    "register_lowering": ("ort_backend.lowering.registry", "register"),
    "report": ("ort_backend.graph_report", "report"),
}


def __getattr__(name: str) -> object:
    if name == "guards":  # ort_backend.guards.report() works without an import of its own
        return importlib.import_module("ort_backend.guards")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
