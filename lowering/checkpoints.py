"""`torch.utils.checkpoint` in graphs that have no backward."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import config


def nothing_to_compute_again(example_inputs: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """While AOTAutograd traces a graph for these inputs: what a checkpoint marks is left alone where nothing needs a gradient.

    PyTorch looks in such graphs, too, for a backward that is to compute marked nodes again, and raises an error where one of them draws random
    numbers (`remat_using_tags_for_fwd_loss_bwd_graph`, read in torch 2.13; older ones do not look).
    """
    needs_gradient = torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in example_inputs)
    if needs_gradient or not hasattr(config, "remat_using_tags_for_fwd_loss_bwd_graph"):
        return contextlib.nullcontext()
    return config.patch(remat_using_tags_for_fwd_loss_bwd_graph=False)
