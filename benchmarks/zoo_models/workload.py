"""What a workload of the zoo is, and the register of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, CLASSES = 99, 5

# Batch and length of three calls. A picture is square, its side a multiple of the length.
Sizes = tuple[tuple[int, int], ...]
SIZES: Sizes = ((2, 16), (3, 12), (5, 20))
PICTURES: Sizes = ((4, 16), (6, 12), (5, 20))  # BatchNorm over few elements is chaotic: more of them

Batch = Callable[[int, int], dict[str, Any]]
Built = tuple[nn.Module, Batch]


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, its inputs and its loss: one training step of something real, made small.

    Attributes:
        name: Unique.
        family: What it is counted under.
        build: Makes the module, with random weights, and the function that makes keyword arguments for a batch and a length. The module
            returns its loss, or an object of transformers that has one.
        sizes: (batch, length) of the calls: the first is the static one, the others follow with other sizes.
        dynamo: Settings of `torch._dynamo.config` that it needs to be captured at all.
        autocast: The dtype of `torch.autocast` around the forward.
        tolerance: Allowed difference, as a part of the largest element of a tensor.
        needs: A package that may not be there.
    """

    name: str
    family: str
    build: Callable[[], Built]
    sizes: Sizes = SIZES
    dynamo: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    autocast: torch.dtype | None = None
    tolerance: float = 1e-4
    needs: str = ""


WORKLOADS: dict[str, Workload] = {}


def add(name: str, family: str, build: Callable[[], Built], **details: Any) -> None:
    """Puts a workload on the register; the details are `Workload`'s other attributes."""
    if name in WORKLOADS:
        raise ValueError(f"two workloads are called {name!r}")
    WORKLOADS[name] = Workload(name, family, build, **details)


def workload(family: str, **details: Any) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """`add` as a decorator: the function's name is the workload's."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        add(build.__name__, family, build, **details)
        return build

    return register


class Loss(nn.Module):
    """A network and a loss on its output: `loss(network(input), target)`; without a target the mean square of the output."""

    def __init__(self, network: nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, input: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        output = self.network(input)
        return output.square().mean() if target is None else self.loss(output, target)


def ids(batch: int, length: int) -> torch.Tensor:
    """Token ids without the special ones, int64 (batch, length)."""
    return torch.randint(3, VOCABULARY, (batch, length))


def labels(*shape: int, classes: int = CLASSES) -> torch.Tensor:
    """Class numbers, int64."""
    return torch.randint(0, classes, shape)
