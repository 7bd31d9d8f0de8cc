"""What AOTAutograd's runtime is told otherwise than its metadata has it, before it makes its wrappers (read in torch 2.11 to 2.15)."""

from __future__ import annotations

import dataclasses
from typing import Any


def keep_saved_tensors(metadata: Any) -> None:
    """Tells AOTAutograd that the backward does not take over the memory of saved tensors, so that `retain_graph=True` is allowed.

    `torch._functorch.config.donated_buffer` says the same, but for the whole process.
    """
    if hasattr(metadata, "bw_donated_idxs"):
        metadata.bw_donated_idxs = []


def hide_writes(metadata: Any) -> None:
    """Has writes hidden from autograd, which the program made under `no_grad` or to a detached tensor, put back so.

    AOTAutograd's runtime takes a gradient off what it writes to behind the graph, unless that is a leaf, which autograd would refuse: backends that
    leave such writes in the graph never meet it. It asks about leaves for nothing else from there on.
    """
    for i, one in enumerate(getattr(metadata, "input_info", ())):
        if one.mutates_data and one.requires_grad and (one.mutations_under_no_grad_or_inference_mode or one.mutations_hidden_from_autograd):
            metadata.input_info[i] = dataclasses.replace(one, is_leaf=True)
