"""A cheap part of the zoo has no node on the CPU but for sizes, and copies nothing between devices. The whole: `python -m tools.cuda_placement`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

# What works out sizes, which the CPU knows anyhow.
SIZES = {
    "Shape",
    "Size",
    "Gather",
    "Concat",
    "Unsqueeze",
    "Squeeze",
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Cast",
    "ReduceProd",
    "Slice",
    "Equal",
    "Where",
    "Max",
    "Min",
}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize("name", ["nano_gpt", "residual", "mlp_bf16", "attention_masked"])
def test_every_node_is_on_the_device(over_stand_in: Run, name: str) -> None:
    code = f"""
import dataclasses, json
from tools.cuda_placement.placement import place
print(json.dumps(dataclasses.asdict(place({name!r}))))
"""
    placed = json.loads(over_stand_in(code).stdout.splitlines()[-1])
    assert placed["graphs"] == 1 and placed["cuda"] > 10
    assert placed["copies"] == 0, placed["names"]
    assert set(placed["cpu"]) <= SIZES, placed["names"]
    assert not placed["python"]


def test_functions_on_parameters_are_on_the_device(over_stand_in: Run) -> None:
    """ONNX Runtime would take a Python node to the CPU whose inputs are inputs of the graph and a link from another such node."""
    code = """
import dataclasses, json
from tools.cuda_placement.placement import place
print(json.dumps(dataclasses.asdict(place("quantised_function"))))
"""
    placed = json.loads(over_stand_in(code).stdout.splitlines()[-1])
    assert placed["copies"] == 0 and "PythonOp" not in placed["cpu"], placed["names"]
