"""The operator for the same tensor, later: once a gradient is there."""

from __future__ import annotations

import torch

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("behind(Tensor(a) x, Tensor gradient) -> Tensor(a)")
_library.impl("behind", lambda x, gradient: x.view(x.shape), "CompositeExplicitAutograd")
BEHIND = torch.ops.ort_training.behind.default
