"""PyTorch's own database of operators (`op_db`): names, and samples of arguments. The tests and `ort_backend.supported` read the same.

It is private to PyTorch (read in torch 2.13), and needs the package expecttest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of the database, and the dtype that it was asked for in."""

    given: Any
    dtype: torch.dtype

    def __str__(self) -> str:
        def one(leaf: Any) -> Any:
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else leaf

        return str(pytree.tree_map(one, (self.given.input, *self.given.args, self.given.kwargs)))[:300]


def operators() -> dict[str, Any]:
    """PyTorch's `OpInfo` of every operator, by name (with the variant, as in `div.floor_rounding`).

    Raises:
        ModuleNotFoundError: expecttest is not installed.
    """
    database = importlib.import_module("torch.testing._internal.common_methods_invocations")
    # Random operators are seeded in a function that Dynamo refuses to trace; whoever compares seeds both runs.
    setattr(database, "wrapper_set_seed", lambda operator, *args, **kwargs: operator(*args, **kwargs))  # noqa: B010
    return {f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name: info for info in database.op_db}


def samples(info: Any, dtype: torch.dtype, at_most: int, *, gradients: bool) -> list[Sample]:
    """Samples of an operator, spread evenly over all that there are; with `gradients`, its tensors ask for them where it has one."""
    device = torch.get_default_device().type
    differentiable = gradients and info.supports_autograd and dtype in info.supported_backward_dtypes(device)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        # For which test of PyTorch's they are, is looked for in the sources of all functions on the stack: a sixth of the time of a test here.
        for module in ("common_utils", "opinfo.core"):
            stack.enter_context(mock.patch(f"torch.testing._internal.{module}.extract_test_fn", lambda: None))
        every = list(info.sample_inputs(device, dtype, requires_grad=differentiable and (dtype.is_floating_point or dtype.is_complex)))
    step = max(len(every) - 1, 1) / max(at_most - 1, 1)
    return [Sample(one, dtype) for one in (every if len(every) <= at_most else [every[round(i * step)] for i in range(at_most)])]
