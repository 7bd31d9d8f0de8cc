"""Nobody who asks for CUDA graphs is left to believe that there are some."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ort_backend.options import CompileOptions


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "reduce-overhead"},
        {"options": {"cuda_graphs": True}},
        {"options": {"provider_options": {"enable_cuda_graph": "1"}}},
        {"options": {"provider_options": {"enable_cuda_graph": True}}},
    ],
    ids=str,
)
def test_asking_for_them_is_an_error_that_says_why(settings: dict[str, Any]) -> None:
    with pytest.raises(Exception, match="captures no CUDA graphs"):
        torch.compile(torch.nn.Linear(2, 2), backend="ort_training", **settings)(torch.randn(3, 2))


def test_saying_that_they_are_not_wanted_is_none() -> None:
    options = {"provider_options": {"enable_cuda_graph": "0"}}
    assert CompileOptions.parse(options).provider_options == options["provider_options"]
