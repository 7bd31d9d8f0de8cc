"""A cheap part of the zoo has no node on the CPU but for sizes, and copies nothing between devices. The whole: `python -m tools.cuda_placement`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

import pytest

from ort_backend.lowering.passes.host_values import ARITHMETIC

Run = Callable[..., "subprocess.CompletedProcess[str]"]


# lstm_cell: on CUDA, PyTorch takes a cell apart into an operator that only CUDA has
@pytest.mark.parametrize("name", ["nano_gpt", "residual", "mlp_bf16", "attention_masked", "lstm_cell"])
def test_every_node_is_on_the_device(over_stand_in: Run, name: str) -> None:
    code = f"""
import dataclasses, json
from tools.cuda_placement.placement import place
print(json.dumps(dataclasses.asdict(place({name!r}))))
"""
    placed = json.loads(over_stand_in(code).stdout.splitlines()[-1])
    assert placed["graphs"] == 1 and placed["cuda"] > 10
    assert placed["copies"] == 0, placed["names"]
    assert set(placed["cpu"]) <= ARITHMETIC, placed["names"]
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


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("bert_qa", set()),  # labels clamped at a size: ONNX Runtime takes a Clip to the CPU whose limits are there and whose input is the graph's
        ("marian", set()),  # rows of a table looked up by a Range: GatherToSliceFusion
        # Results that the backward computes again, once a gradient is there. Planes of unknown sizes would be padded to its window of 1280 x 1280.
        ("efficientnet", {"aten::avg_pool2d", "aten::avg_pool2d_backward"}),
        ("attention_decoder", set()),  # likewise a GRU's cell, and there is no shape function of it
        ("mixtral", set()),  # sizes of groups that follow from data
    ],
)
def test_what_is_worked_out_from_symbolic_sizes_is_not_copied(over_stand_in: Run, name: str, python: set[str]) -> None:
    code = f"""
import dataclasses, json
from tools.cuda_placement.placement import place
print(json.dumps(dataclasses.asdict(place({name!r}, sizes="symbolic"))))
"""
    placed = json.loads(over_stand_in(code).stdout.splitlines()[-1])
    assert placed["graphs"] == 1 and placed["cuda"] > 10
    assert placed["copies"] == 0, placed["names"]
    assert set(placed["cpu"]) <= ARITHMETIC, placed["names"]
    assert set(placed["python"]) == python


def test_sizes_that_change_from_batch_to_batch_are_symbolic(over_stand_in: Run) -> None:
    """Of Swin's windows with every size symbolic, PyTorch's own reasoning takes over ten minutes."""
    code = """
import dataclasses, json
from tools.cuda_placement.placement import place
print(json.dumps(dataclasses.asdict(place("swin", sizes="changing"))))
"""
    placed = json.loads(over_stand_in(code).stdout.splitlines()[-1])
    assert placed["graphs"] == 1 and placed["cuda"] > 100
    assert placed["copies"] == 0 and set(placed["cpu"]) <= ARITHMETIC, placed["names"]
