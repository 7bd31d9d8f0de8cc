"""`python -m ort_backend.lowering`: which operators run where."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_backend.lowering import __main__ as command
from ort_backend.lowering import registry
from ort_backend.lowering.provenance import operator_name
from ort_backend.runtime import capabilities
from ort_backend.supported import DTYPES, supported

aten = torch.ops.aten


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    assert command.main([*arguments, "--json"]) == 0
    return {row["operator"]: row for row in json.loads(capsys.readouterr().out)}


def test_an_operator_and_its_gradient_with_their_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--operator", "aten::_softmax")
    assert set(found) == {"aten::_softmax", "aten::_softmax_backward_data"}
    forward, backward = found["aten::_softmax"], found["aten::_softmax_backward_data"]
    assert "Softmax" in forward["kernels"]
    gradient = {"com.microsoft::SoftmaxGrad_13"} if capabilities.has_training() else {"Mul", "Sub", "ReduceSum"}
    assert gradient <= set(backward["kernels"])
    assert {"float32", "float64", "float16", "bfloat16"} <= set(forward["dtypes"])
    assert forward["outside"] == {} and forward["sampled"]


def test_what_pytorch_runs_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--operator", "aten::igamma$")["aten::igamma"]
    assert row["kernels"] == [] and row["dtypes"] == []
    assert "float32" in row["outside"]["no lowering"]


def test_random_operators_are_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--operator", "aten::randn_like$")["aten::randn_like"]
    assert row["drawn"] and row["outside"] == {}


def test_dtypes_are_those_that_pytorch_takes(capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, "--operator", "aten::bitwise_and.Tensor$")["aten::bitwise_and.Tensor"]
    assert set(row["dtypes"]) | {dtype for dtypes in row["outside"].values() for dtype in dtypes} == {
        str(dtype).removeprefix("torch.") for dtype in DTYPES if not dtype.is_floating_point and not dtype.is_complex
    }


def test_complex_numbers_are_listed_beside_real_ones() -> None:
    target, names = capabilities.target("CPUExecutionProvider", 18), ["reciprocal", "view_as_real", "fft.rfft", "cumprod"]
    found = supported(target, "reciprocal|view_as_real|_fft_r2c|cumprod$", lambda _: iter(names))
    assert found["aten::view_as_real"].dtypes == [torch.complex64, torch.complex128]
    assert {torch.float32, torch.complex64, torch.complex128} <= set(found["aten::reciprocal"].dtypes)
    assert found["aten::_fft_r2c"].dtypes == [torch.float32, torch.float64]
    assert found["aten::cumprod"].outside["no lowering of torch.complex numbers"] == [torch.complex64, torch.complex128]


def test_every_lowering_of_complex_numbers_is_listed() -> None:
    own, linear = registry.registered_complex()
    listed = supported(capabilities.target("CPUExecutionProvider", 18), progress=lambda names: iter(()))
    assert {operator_name(target) for target in (*own, *linear)} <= set(listed)


def test_a_lowering_of_the_users_is_listed() -> None:
    torch.library.define("supported_tests::twice", "(Tensor x) -> Tensor")
    target = torch.ops.supported_tests.twice.default
    registry.register(target, requires=("com.microsoft::Gelu",))(lambda op, x: op.Add(x, x))
    try:
        found = supported(capabilities.target("CPUExecutionProvider", 18), "supported_tests::twice", lambda names: iter(names[:1]))
    finally:
        del registry._table[target]
    assert found["supported_tests::twice"].requires == ("com.microsoft::Gelu",) and not found["supported_tests::twice"].sampled


def test_the_table_names_the_operators(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--operator", "aten::igamma"]) == 0
    printed = capsys.readouterr().out
    assert "aten::igamma" in printed and "no lowering" in printed and "2 operators: 0 on ONNX Runtime" in printed


def test_only_what_pytorch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--operator", "aten::_softmax", "--outside"]) == 1
    assert "no operator" in capsys.readouterr().err


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.testing._internal.common_methods")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "expecttest", None)
    for name in [name for name in sys.modules if name == "torch.testing._internal.common_utils"]:
        monkeypatch.delitem(sys.modules, name)
    assert command.main(["--operator", "aten::_softmax"]) == 2
    assert "pip install expecttest" in capsys.readouterr().err


def test_a_wrong_provider_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--operator", "aten::relu$", "--provider", "cpu"]) == 2
    assert "option 'provider' is 'cpu', which ONNX Runtime does not know" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value", "message"), [("--operator", "(", "'(' is no regular expression"), ("--opset", "3", "invalid choice: 3")])
def test_a_wrong_argument_is_an_error(option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([option, value])
    assert message in capsys.readouterr().err


def test_it_is_a_command(python: Callable[..., str]) -> None:
    arguments = ["--operator", "aten::_log_softmax", "--json"]
    printed = python(f"import runpy, sys; sys.argv[1:] = {arguments}; runpy.run_module('ort_backend.lowering.__main__')['main']()")
    assert {row["operator"] for row in json.loads(printed)} == {"aten::_log_softmax", "aten::_log_softmax_backward_data"}
