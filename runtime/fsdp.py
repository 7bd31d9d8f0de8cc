"""Which memory FSDP gives back behind a forward, to gather it again in front of the backward.

PyTorch has no public word for it: the private names of `torch.distributed.fsdp.fully_shard` are read here alone (read in torch 2.13; up to 2.12
`_fsdp_param_group` is one group, or none).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch


def gives_back(memory: Sequence[torch.UntypedStorage]) -> bool:
    """Whether some of it belongs to parameters that `fully_shard` has gathered and will release at the end of their module's forward.

    False where PyTorch names these things otherwise.
    """
    if not memory or "torch.distributed.fsdp._fully_shard._fsdp_param_group" not in sys.modules or not torch.distributed.is_initialized():
        return False
    places = {storage._cdata for storage in memory}
    try:
        return any(storage._cdata in places for group in _groups() if group._reshard_after_forward for storage in _gathered(group))
    except (AttributeError, ImportError):
        return False


def _groups() -> Iterator[Any]:
    from torch.distributed._composable_state import _module_state_mapping

    states = {id(state): state for reference in list(_module_state_mapping.values()) if (state := reference()) is not None}
    for state in states.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in (getattr(state, "_fsdp_param_group", None),) if groups is None else groups:
            if group is not None:
                yield group


def _gathered(group: Any) -> Iterator[torch.UntypedStorage]:
    for parameter in group.fsdp_params:
        for tensor in (*parameter.all_gather_outputs, *getattr(parameter, "_unsharded_inner_tensors", ())):
            yield tensor.untyped_storage()
