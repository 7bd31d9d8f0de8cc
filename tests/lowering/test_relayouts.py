"""`as_strided` that moves no element is no operation, with sizes that change as well."""

from __future__ import annotations

import pytest
import torch
from behaviours.check import single_session
from torch import nn

import ort_backend


@pytest.mark.parametrize("dynamic", [False, True])
def test_pooling_in_channels_last(dynamic: bool) -> None:
    """Adaptive pooling writes down channels-last strides for its result, and its gradient takes them back."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend="ort_training", dynamic=dynamic)
    before = len(ort_backend.report().graphs)
    for batch in (2, 3) if dynamic else (2,):
        x = torch.randn(batch, 3, 6, 6).to(memory_format=torch.channels_last)
        gradients = []
        for module in (model, compiled):
            model.zero_grad()
            module(x).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)
    graphs = ort_backend.report().graphs[before:]
    assert len(graphs) == 1 and all(one.is_choice for one in graphs[0].outside)


def test_elements_that_move() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = x.as_strided((2, 6), (6, 1)) + 1
        moved = x.as_strided((4, 3), (1, 4)) * 2
        part = x.as_strided((2, 3), (3, 1), 3) * 3
        written = torch.as_strided_scatter(x, x[:2] * 4, (2, 4), (4, 1), 4)
        return whole, moved, part, written, x.square().as_strided((3, 4, 1), (4, 1, 7))

    x = torch.randn(3, 4)
    expected, actual = function(x), torch.compile(function, backend="ort_training")(x)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def _parts(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows, columns = (x * 2)[1:], (x * 3).t()[1:]
    return (
        rows.as_strided((2, 3), (1, 2)) * 2,
        rows.as_strided((2, 3), (1, 2), 0) * 2,
        x[1:].as_strided((2, 3), (1, 2), 1) * 2,
        columns.as_strided((2, 3), (2, 1), 1) * 2,
        p.expand(4, 6).as_strided((2, 3), (0, 1)) * 2,
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_address_the_memory_of_their_base(dynamic: bool) -> None:
    compiled = torch.compile(_parts, backend="ort_training", dynamic=dynamic)
    for rows in (4, 5):
        x, p = torch.randn(rows, 6, requires_grad=True), torch.randn(1, 6, requires_grad=True)
        results = [function(x, p) for function in (_parts, compiled)]
        gradients = [torch.autograd.grad(sum(one.sin().sum() for one in result), [x, p]) for result in results]
        for mine, theirs in zip((*results[1], *gradients[1]), (*results[0], *gradients[0]), strict=True):
            torch.testing.assert_close(mine, theirs)


@single_session
def test_an_input_that_is_a_part_of_a_tensor() -> None:
    """What lies around it does not reach a session, whose own memory must not stand in for it."""
    compiled = torch.compile(lambda x: x.as_strided((2, 3), (1, 2), 0) * 2, backend="ort_training")
    with pytest.raises(Exception, match=r"as_strided reads memory around its argument.*pass the whole tensor"):
        compiled(torch.randn(6, 6)[1:])
