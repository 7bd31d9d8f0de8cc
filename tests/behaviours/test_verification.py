"""What `options={"verify": n}` hands to eager PyTorch and to the compiled graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from ort_backend import verify


def test_a_parameter_beside_its_view_requires_gradients() -> None:
    """As a backward that compiled autograd has traced takes them, with no gradients recorded: the view that the forward kept of a weight, and the
    weight itself, for which `AccumulateGrad` gives None if it does not require any (seen on CUDA).
    """
    weight = nn.Parameter(torch.randn(2, 12))
    with torch.no_grad():
        view = weight.t()
        (view_copy, weight_copy), _ = verify._copies([view, weight])
    assert weight_copy.requires_grad and weight_copy.is_leaf and view_copy.requires_grad == view.requires_grad
    assert torch.equal(view_copy, view) and view_copy.untyped_storage()._cdata == weight_copy.untyped_storage()._cdata


def test_a_view_that_requires_gradients_where_none_are_recorded() -> None:
    base = torch.randn(4)
    view = base[1:].requires_grad_()
    with torch.no_grad():
        (base_copy, view_copy), _ = verify._copies([base, view])
    assert view_copy.requires_grad and not base_copy.requires_grad
    assert view_copy.untyped_storage()._cdata == base_copy.untyped_storage()._cdata


def test_every_generator_starts_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    states, set_to = [torch.arange(3)], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", set_to.append)

    def run(x: torch.Tensor) -> list[Any]:
        return [x + 1]

    verify.verified(run, fx.symbolic_trace(run), "graph", 1)(torch.randn(2))
    assert set_to == [states] * 3
