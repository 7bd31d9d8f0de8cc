"""Workloads whose blocks are computed again in the backward, by `torch.utils.checkpoint`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_models.workload import WORKLOADS, Built, Workload

SUFFIX = "/checkpointed"


class NoBlocks(Exception):
    """A workload has none to checkpoint."""


def find(name: str) -> Workload:
    """The workload of that name; with `SUFFIX`, the one without it, checkpointed."""
    plain = WORKLOADS[name.removesuffix(SUFFIX)]
    return plain if name in WORKLOADS else dataclasses.replace(plain, name=name, build=functools.partial(_build, plain))


def _build(workload: Workload) -> Built:
    module, batch = workload.build()
    if not (_switch_on(module) or _wrap(module)):
        raise NoBlocks("has no blocks to checkpoint")
    return module, batch


def _switch_on(module: nn.Module) -> bool:
    """Switches the checkpoints of transformers' models on; False where there is none that has them."""
    able = [one for one in module.modules() if getattr(one, "supports_gradient_checkpointing", False)]
    for one in able:
        one.config.use_cache = False  # type: ignore[union-attr]  # else it warns, which breaks the graph
        one.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return bool(able)


def _wrap(module: nn.Module) -> bool:
    """Checkpoints what a module holds in lists and sequences; False where that is nothing.

    Not what counts in its forward, as BatchNorm does: eager PyTorch would count twice.
    """
    wrapped = False
    for name, child in list(module.named_children()):
        in_list = isinstance(module, (nn.ModuleList, nn.Sequential)) and len(list(child.children())) > 1
        if in_list and not any(isinstance(one, _BatchNorm) for one in child.modules()):
            setattr(module, name, _Checkpointed(child))
            wrapped = True
        else:
            wrapped = _wrap(child) or wrapped
    return wrapped


class _Checkpointed(nn.Module):
    """Another module, computed again in the backward; it has that module's attributes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)
