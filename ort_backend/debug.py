"""What a compile made, on disk (`options={"dump_dir": ...}`, `TORCH_COMPILE_DEBUG`), and in PyTorch's own log of compiles (`TORCH_TRACE`)."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import fx
from torch._dynamo.utils import get_debug_dir

from ort_backend.errors import OptionError
from ort_backend.lowering.functions.autograd_function import sources
from ort_backend.options import CompileOptions


@dataclasses.dataclass(frozen=True)
class Dump:
    """Files of one graph, all named after it.

    `<name>.fx.txt`: the graph that was lowered, with shapes and dtypes; `<name>.onnx`: as lowered; `<name>.optimized.onnx`: after ONNX
    Runtime's optimiser; `<name>.repro.py` (and `.pt`, its constants): a script that runs Dynamo's graph in eager and compiled, and compares.
    """

    directory: Path
    name: str

    @classmethod
    def asked_for(cls, settings: CompileOptions, name: str) -> Dump | None:
        """Where to write, or None if nothing is to be written.

        Raises:
            OptionError: the directory cannot be made, or written to.
        """
        directory = directory_of(settings)
        if directory is None:
            return None
        asked = "TORCH_COMPILE_DEBUG asks for" if settings.dump_dir is None else "option 'dump_dir' is"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OptionError(f"{asked} {str(directory)!r}, but that directory cannot be made: {error}") from None
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise OptionError(f"{asked} {str(directory)!r}, but that directory cannot be written to: {error}") from None
        return cls(directory, name)

    def of(self, name: str) -> Dump:
        """Where to write a part of the graph that has a name of its own."""
        return Dump(self.directory, name)

    def graph(self, module: fx.GraphModule) -> None:
        """Writes the FX graph."""
        text = module.print_readable(print_output=False, include_stride=True, include_device=True)
        self._path("fx.txt").write_text(text)

    def model(self, model: ir.Model) -> None:
        """Writes the ONNX model as lowered."""
        ir.save(model, self._path("onnx"))

    @property
    def optimized_path(self) -> str:
        """Where ONNX Runtime is to write the optimised one."""
        return str(self._path("optimized.onnx"))

    def repro(self, gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions) -> None:
        """Writes a script that runs Dynamo's graph in eager PyTorch and compiled, and compares."""
        constants = {name: value.detach().clone() for name, value in (*gm.named_parameters(), *gm.named_buffers())}
        torch.save(constants, self._path("repro.pt"))
        self._path("repro.py").write_text(_script(gm, example_inputs, options, self._path("repro.pt").name))

    def _path(self, ending: str) -> Path:
        return self.directory / f"{self.name}.{ending}"


def directory_of(settings: CompileOptions) -> Path | None:
    """The directory for what a compile makes: the option's, or PyTorch's own of this process under `TORCH_COMPILE_DEBUG=1`; None if nobody asks."""
    if settings.dump_dir is not None:
        return Path(settings.dump_dir)
    return Path(get_debug_dir(), "ort_training") if os.environ.get("TORCH_COMPILE_DEBUG", "0") == "1" else None


def trace(name: str, model: bytes) -> None:
    """Puts a graph as text into the log that `TORCH_TRACE` asks for, where `tlparse` shows it beside PyTorch's graphs of the same compile.

    Args:
        name: The graph's.
        model: A serialised `onnx.ModelProto`; read only if there is such a log.
    """
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"ort_training_{name}", "encoding": "string"},
        payload_fn=lambda: onnx.printer.to_text(onnx.ModelProto.FromString(model)),
    )


def _script(gm: fx.GraphModule, example_inputs: Sequence[Any], options: CompileOptions, constants: str) -> str:
    source = gm.print_readable(print_output=False)
    plain = [field.name for field in dataclasses.fields(options) if field.name not in ("dump_dir", "verify", "guard_log", "fx_passes", "onnx_passes")]
    changed = {name: getattr(options, name) for name in plain if getattr(options, name) != getattr(CompileOptions(), name)}
    return f'''"""Runs one graph in eager PyTorch and through backend="ort_training", and compares outputs and gradients. Inputs are random."""

import pathlib

import torch
from torch import device, inf, nan  # names that the printed graph may use

{sources(gm.graph)}
{source}

model = {type(gm).__name__ if source.lstrip().startswith(f"class {type(gm).__name__}") else "GraphModule"}()
for name, value in torch.load(pathlib.Path(__file__).with_name({constants!r})).items():
    model.register_buffer(name, value) if "." not in name else None
torch.manual_seed(0)
inputs = [
{chr(10).join(f"    {_recipe(value)}," for value in example_inputs)}
]
options = {changed!r}
torch.compile(model, backend="ort_training", options={{**options, "verify": 1}})(*inputs)
print("outputs and gradients equal eager's")
'''


def _recipe(value: Any) -> str:
    """Source of an expression that makes an input like `value`."""
    if not isinstance(value, torch.Tensor):
        return repr(_hint(value))
    shape = [_hint(size) for size in value.shape]
    tail = f"dtype={value.dtype}, device={str(value.device)!r}"
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return f"torch.randn({shape}, {tail}).mul_(0.1).requires_grad_({value.requires_grad})"
    if value.dtype == torch.bool:
        return f"torch.rand({shape}).lt(0.5).to({value.device.type!r})"
    return f"torch.randint(0, 2, {shape}, {tail})"


def _hint(size: Any) -> Any:
    return size.node.hint if isinstance(size, (torch.SymInt, torch.SymFloat)) else size
