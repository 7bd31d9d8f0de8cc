"""What `torch.compile(backend="ort_training")` imports of ONNX Runtime and onnxscript, in fresh processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ort_backend.deferred import deferred

TRAIN = 'torch.compile(torch.nn.Linear(2, 2), backend="ort_training")(torch.ones(1, 2)).sum().backward()'


def run(*lines: str) -> str:
    """What a fresh process prints that finds no graph in PyTorch's cache."""
    variables = {**os.environ, "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True, env=variables).stdout


def test_neither_ortmodule_nor_the_reference_implementation() -> None:
    loaded = "print([name for name in sys.modules if name.startswith(('onnxruntime.training', 'onnx.reference'))])"
    assert run("import sys, torch", TRAIN, loaded) == "[]\n"


def test_the_state_of_pythons_random_numbers_is_left_alone() -> None:
    draw = "print(random.random() == random.Random(0).random())"
    assert run("import random, torch; random.seed(0)", TRAIN, "import ort_backend; str(ort_backend.report())", draw) == "True\n"


def test_onnxscript_still_has_the_reference_implementation() -> None:
    fold = "print(onnxscript.optimizer._constant_folding.onnx.reference.ops.load_op('', 'Add', 18).__name__)"
    evaluate = "from onnx.reference import ReferenceEvaluator; print(onnx.reference.ReferenceEvaluator is ReferenceEvaluator)"
    assert run("import ort_backend.joint, onnx, onnxscript.optimizer", fold, evaluate) == "Add\nTrue\n"


def test_what_was_imported_before_stays() -> None:
    same = "print(sys.modules['onnx.reference'] is reference is onnx.reference)"
    assert run("import sys, onnx.reference; reference = onnx.reference", "import ort_backend.joint", same) == "True\n"


def test_checkpoints_are_traced_whoever_imported_onnxruntime_first() -> None:
    """onnxruntime-training replaces `checkpoint`, which others have imported by its name when the backend puts it back."""
    imports = "import functools, onnxruntime, torch", "from torch.utils.checkpoint import checkpoint as its_name", "import ort_backend"
    model = "inner, again = torch.nn.Linear(2, 2), functools.partial(its_name, use_reentrant=False)"
    step = "torch.compile(lambda x: again(inner, x).sin(), backend='ort_training', fullgraph=True)(torch.ones(1, 2)).sum().backward()"
    same = "print(torch.utils.checkpoint.checkpoint.__module__, len(ort_backend.report().graphs))"
    assert run(*imports, model, step, same) == "torch.utils.checkpoint 1\n"


@pytest.mark.parametrize("first", ["", "torch.set_default_device('meta')"])
def test_no_module_keeps_a_tensor_of_the_trace_in_which_it_was_imported(first: str) -> None:
    """Most are imported by the first compile, under AOTAutograd's modes."""
    found = "[(name, key) for name, module in list(sys.modules.items()) if name.startswith('ort_backend') for key, one in vars(module).items()"
    wrong = "if isinstance(one, torch.Tensor) and (type(one) is not torch.Tensor or one.device.type != 'cpu')]"
    count = "print(sum(name.startswith('ort_backend.lowering.') for name in sys.modules) > 50)"
    backward = "torch.compile(torch.nn.Linear(2, 2, device='cpu'), backend='ort_training')(torch.ones(1, 2, device='cpu')).sum().backward()"
    assert run("import sys, torch", first, backward, f"print({found} {wrong})", count) == "[]\nTrue\n"


def test_a_deferred_module_is_imported_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late.py").write_text("def double(x): return 2 * x\ndef triple(x): return 3 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    with deferred("late", "double"):
        from late import double  # type: ignore[import-not-found]
    assert "late" not in sys.modules
    assert double(2) == 4 and "late" in sys.modules
    with deferred("late", "double"):
        assert importlib.import_module("late").double is sys.modules["late"].double is not double
    monkeypatch.delitem(sys.modules, "late")
    with deferred("late", "double"):
        from late import triple

        assert triple(2) == 6 and importlib.import_module("late").triple is triple
    monkeypatch.delitem(sys.modules, "late")
    with deferred("later than that", "double"), pytest.raises(ModuleNotFoundError):
        importlib.import_module("later than that")


@pytest.mark.skipif(importlib.util.find_spec("onnxruntime.training") is None, reason="this onnxruntime has no training package")
def test_onnxruntime_training_can_be_imported_afterwards() -> None:
    assert run("import ort_backend.compiler, onnxruntime.training.artifacts as artifacts", "print(artifacts.generate_artifacts.__name__)") == (
        "generate_artifacts\n"
    )
