"""The gradient of running products as one operator.

PyTorch's formula looks whether an element is zero. A trace cannot see that, and has what is right either way: the gradients of elements in front of
a row's first zero, of that zero, and of the others, which are 0, all of them for each element. (NeRF's transmittance is such a product.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import DispatchKey

from ort_backend.lowering.tracing import second_derivatives

aten = torch.ops.aten

_library = torch.library.Library("ort_training", "FRAGMENT")
_library.define("cumprod_backward(Tensor grad, Tensor input, int dim, Tensor output) -> Tensor")
CUMPROD_BACKWARD = torch.ops.ort_training.cumprod_backward.default

second_derivatives.refuse("cumprod_backward", "a running product", _library)


@torch.library.register_fake("ort_training::cumprod_backward", lib=_library)
def _(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    return input.new_empty(input.shape)


@torch.library.impl(_library, "cumprod_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    with torch.no_grad():  # with gradients of gradients it takes the way for them
        return aten.cumprod_backward.default(grad, input, dim, output)


def whole_backward(grad: Tensor, input: Tensor, dim: int, output: Tensor) -> Tensor:
    """What a trace has for `aten::cumprod_backward`: one operator, or PyTorch's formula where that has to be differentiated again."""
    if torch.is_grad_enabled() or input.is_complex():
        return aten.cumprod_backward.default._op_dk(DispatchKey.CompositeImplicitAutograd, grad, input, dim, output)
    return CUMPROD_BACKWARD(grad, input, dim, output)
