"""Who may import whom. The table below is the design's; the imports are read from the source, deferred ones included."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BASE = ("ort_backend.options", "ort_backend.errors", "ort_backend.target")


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a module may import beside Python's standard library, and the exceptions to it.

    Each name stands for itself and what is below it.
    """

    may: tuple[str, ...]
    but_not: tuple[str, ...] = ()


# The longest name that a module starts with gives its rule.
RULES = {
    "ort_backend.options": Rule(may=BASE),
    "ort_backend.errors": Rule(may=BASE),
    "ort_backend.target": Rule(may=BASE),
    "ort_backend.lowering": Rule(may=("ort_backend.lowering", *BASE, "torch", "functorch", "onnxscript", "onnx_ir", "numpy")),
    "ort_backend.lowering.lean_imports": Rule(may=("onnx", "onnxscript")),
    # A command, which nobody imports.
    "ort_backend.lowering.__main__": Rule(may=("ort_backend.lowering", "ort_backend.runtime", "ort_backend.supported", *BASE, "torch", "rich")),
    "ort_backend.runtime": Rule(may=("ort_backend.runtime", *BASE, "torch", "onnxruntime", "onnx", "onnx_ir", "numpy"), but_not=("torch.fx",)),
    "ort_backend.guards": Rule(may=("ort_backend.guards", "ort_backend.options", "ort_backend.errors", "torch")),
    "ort_backend.graph_pickle": Rule(may=("torch", "cloudpickle")),
    # The face: compiler, joint, graph_report, environment, debug, verify. Nothing below it imports it, as the rules above say.
    "ort_backend": Rule(may=("ort_backend", "torch", "functorch", "onnxscript", "onnx_ir", "onnx", "onnxruntime", "numpy", "rich")),
}

# Where a module of the installed package lies in the checkout.
FOLDERS = {"ort_backend": "ort_backend", **{f"ort_backend.{name}": name for name in ("lowering", "runtime", "guards")}}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its installed name, its file."""
    for package, folder in FOLDERS.items():
        for file in sorted((ROOT / folder).rglob("*.py")):  # rglob does not enter symlinks
            if (ROOT / folder).resolve() in file.resolve().parents:
                parts = file.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join([package, *parts]).removesuffix(".__init__"), file


MODULES = dict(modules())


def imports(source: str, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that a source imports: `from a import b` gives `a.b`; a use of `torch.fx` counts as its import."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            above = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.fx":
            yield node.lineno, "torch.fx"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module", "__import__"):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def rule_for(module: str) -> Rule:
    return RULES[max((name for name in RULES if within(module, (name,))), key=len)]


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    rule = rule_for(module)
    return [
        f"{module}:{line} imports {name}"
        for line, name in imports(source, module, is_package)
        if name.split(".")[0] not in sys.stdlib_module_names and (not within(name, rule.may) or within(name, rule.but_not))
    ]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    file = MODULES[module]
    assert violations(file.read_text(), module, file.name == "__init__.py") == []


def test_every_folder_is_read_under_its_installed_name() -> None:
    assert {"ort_backend", "ort_backend.options", "ort_backend.lowering.registry", "ort_backend.runtime", "ort_backend.guards"} <= set(MODULES)
    assert len({file.resolve() for file in MODULES.values()}) == len(MODULES)


@pytest.mark.parametrize("folder", ["lowering", "runtime", "guards", "ort_backend", "tests", "examples", "benchmarks"])
def test_nobody_imports_the_bare_names_of_a_checkout(folder: str) -> None:
    found = [
        (file.name, line, name)
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, name in imports(file.read_text(), "user.module", is_package=False)
        if within(name, ("lowering", "runtime", "guards"))
    ]
    assert found == []


@pytest.mark.parametrize("file", sorted((ROOT / "examples").rglob("*.py")), ids=lambda file: file.name)
def test_examples_import_only_public_names(file: Path) -> None:
    ours = {name for _, name in imports(file.read_text(), "user.module", is_package=False) if within(name, ("ort_backend",))}
    assert all(name.count(".") <= 1 for name in ours)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ort_backend.options", "import torch"),
        ("ort_backend.target", "import onnx_ir"),
        ("ort_backend.errors", "from ort_backend.lowering import registry"),
        ("ort_backend.lowering.graph", "import onnxruntime as ort"),
        ("ort_backend.lowering.graph", "from ort_backend.runtime.capabilities import has_kernel"),
        ("ort_backend.lowering.graph", "from ort_backend import compiler"),
        ("ort_backend.lowering.ops.matmul", "from ...guards import records"),
        ("ort_backend.lowering.ops.matmul", "def f():\n    import onnxruntime"),
        ("ort_backend.runtime.binding", "import torch.fx"),
        ("ort_backend.runtime.binding", "from torch import fx"),
        ("ort_backend.runtime.binding", "import torch\ndef f(node: torch.fx.Node): ..."),
        ("ort_backend.runtime.binding", "import importlib\nimportlib.import_module('ort_backend.lowering')"),
        ("ort_backend.guards.records", "import onnx"),
        ("ort_backend.guards.records", "import onnx_ir"),
        ("ort_backend.guards.records", "from ort_backend.compiler import ort_training"),
    ],
)
def test_a_violation_is_seen(module: str, line: str) -> None:
    assert len(violations(line, module)) == 1


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ort_backend.options", "from ort_backend.errors import OptionError"),
        ("ort_backend.lowering.graph", "import numpy, torch.fx, onnxscript.ir"),
        ("ort_backend.lowering.ops.matmul", "from ..registry import register"),
        ("ort_backend.runtime.binding", "from torch.utils import dlpack"),
        ("ort_backend.guards.records", "import json, torch._dynamo"),
        ("ort_backend.joint", "from ort_backend.runtime.training_graph import TrainingGraph"),
    ],
)
def test_what_is_allowed_passes(module: str, line: str) -> None:
    assert violations(line, module) == []
