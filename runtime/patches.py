"""Imports ONNX Runtime without ORTModule, and undoes what that left behind where somebody else imported it first.

onnxruntime-training (1.19.2) imports ORTModule whenever it is imported, and with it setuptools and the tools for mobile devices: 9 MB and 0.15 s.
It replaces `torch.manual_seed`, `torch.cuda.manual_seed` and `torch.utils.checkpoint.checkpoint` by functions of its own, and then fails on
current versions of torch, but what it replaced stays replaced: Dynamo no longer knows the functions, so that activation checkpointing cannot be
compiled, by any backend. It also keeps the error for later, with its traceback: every frame on the way to the import, the user's among them with
the model in it, would live for ever.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import torch.utils.checkpoint

# Where -> (name there, the name under which the replacement keeps the original).
_REPLACED: tuple[tuple[Any, str, str], ...] = (
    (torch, "manual_seed", "torch_manual_seed"),
    (torch.cuda, "manual_seed", "torch_cuda_manual_seed"),
    (torch.utils.checkpoint, "checkpoint", "original_checkpoint"),
)


_TRAINING = "onnxruntime.training"


def _passing_on(original_checkpoint: Any, outside_kwarg_params: Any) -> Any:
    """A function over the same variables as the replacement of `checkpoint`. Dynamo does not follow what stands in ONNX Runtime's files."""

    def checkpoint(function: Any, *args: Any, **kwargs: Any) -> Any:
        outside_kwarg_params  # noqa: B018
        return original_checkpoint(function, *args, **kwargs)

    return checkpoint


_PASSES_ON = _passing_on(None, None).__code__


def import_onnxruntime() -> None:
    """Imports `onnxruntime`; `onnxruntime.training` can be imported afterwards, by those who want it."""
    if "onnxruntime" not in sys.modules:
        sys.modules[_TRAINING] = None  # type: ignore[assignment]  # onnxruntime takes the ImportError for a build without ORTModule
    try:
        import onnxruntime  # noqa: F401
    finally:
        if _TRAINING in sys.modules and sys.modules[_TRAINING] is None:
            del sys.modules[_TRAINING]
    undo()


def undo() -> None:
    """Puts the originals back and lets the frames go, whoever imported ONNX Runtime first. A failed import may have been tried several times.

    Who has imported the replacement of `checkpoint` by its name, meanwhile, keeps it. It passes calls on, which Dynamo can follow.
    """
    for owner, name, original in _REPLACED:
        function = getattr(owner, name)
        while function is not None and (function.__module__ or "").startswith("onnxruntime."):
            error = function.__globals__.get("_FALLBACK_INIT_EXCEPTION")
            if error is not None:
                error.__traceback__ = None
            seen = inspect.getclosurevars(function)
            if function.__code__.co_freevars == _PASSES_ON.co_freevars:
                function.__code__ = _PASSES_ON
            function = seen.nonlocals.get(original) or seen.globals.get(original)
        if function is not None:
            setattr(owner, name, function)
