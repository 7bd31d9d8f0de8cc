"""What `torch.compile(backend="ort_training")` imports of ONNX Runtime and onnxscript, in fresh processes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

TRAIN = 'torch.compile(torch.nn.Linear(2, 2), backend="ort_training")(torch.ones(1, 2)).sum().backward()'


def run(*lines: str) -> str:
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True).stdout


def test_neither_ortmodule_nor_the_reference_implementation() -> None:
    loaded = "print([name for name in sys.modules if name.startswith(('onnxruntime.training', 'onnx.reference'))])"
    assert run("import sys, torch", TRAIN, loaded) == "[]\n"


def test_onnxscript_still_has_the_reference_implementation() -> None:
    fold = "print(onnxscript.optimizer._constant_folding.onnx.reference.ops.load_op('', 'Add', 18).__name__)"
    evaluate = "from onnx.reference import ReferenceEvaluator; print(onnx.reference.ReferenceEvaluator is ReferenceEvaluator)"
    assert run("import ort_backend.compiler, onnx, onnxscript.optimizer", fold, evaluate) == "Add\nTrue\n"


def test_what_was_imported_before_stays() -> None:
    same = "print(sys.modules['onnx.reference'] is reference is onnx.reference)"
    assert run("import sys, onnx.reference; reference = onnx.reference", "import ort_backend.compiler", same) == "True\n"


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime.training") is None, reason="this onnxruntime has no training package")
def test_onnxruntime_training_can_be_imported_afterwards() -> None:
    assert run("import ort_backend.compiler, onnxruntime.training.artifacts as artifacts", "print(artifacts.generate_artifacts.__name__)") == (
        "generate_artifacts\n"
    )
