"""`python -m ort_backend.lowering`: which operators run on the installed ONNX Runtime, with which of its kernels, in which dtypes.

Samples of PyTorch's own operator database are lowered, forward and backward; nothing is run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ort_backend.errors import EnvironmentProblem, OptionError
from ort_backend.options import OPSETS
from ort_backend.runtime import capabilities
from ort_backend.supported import Support, supported

_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if no operator has that name, 2 if there is no such provider or the database cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m ort_backend.lowering", description=__doc__)
    parser.add_argument("--operator", type=_pattern, default="", metavar="REGEX", help="only operators whose name has this: gelu, aten::sum")
    parser.add_argument("--outside", action="store_true", help="only those that PyTorch runs, for some arguments or always")
    parser.add_argument("--provider", default="CPUExecutionProvider", help="execution provider (%(default)s)")
    parser.add_argument("--opset", type=int, choices=OPSETS, default=18, help="ONNX operator set (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    errors = Console(stderr=True)
    # PyTorch logs each dtype that an operator turns out not to take.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")

    def progress(names: Sequence[str]) -> Iterator[str]:
        return iter(track(names, description="lowering samples", console=errors, transient=True))

    try:
        # Everything that ONNX Runtime can run, also what PyTorch would be chosen for as the faster one.
        target = dataclasses.replace(capabilities.target(options.provider, options.opset), kernels="onnxruntime")
        found = supported(target, options.operator, progress)
    except (OptionError, EnvironmentProblem) as error:
        errors.print(str(error), soft_wrap=True)
        return 2
    except ModuleNotFoundError as error:
        errors.print(f"PyTorch's operator database needs a package that is not installed: pip install {error.name}", soft_wrap=True)
        return 2
    shown = [one for one in found.values() if one.outside or not options.outside]
    if not shown:
        errors.print(f"no operator has {options.operator!r} in its name")
        return 1
    if options.json:
        sys.stdout.write(json.dumps([one.to_json() for one in shown], indent=1) + "\n")
    else:
        console = Console()
        console.print(_table(shown, options.provider))
        console.print(_summary(list(found.values())), highlight=False)
    return 0


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def _table(shown: Sequence[Support], provider: str) -> Table:
    caption = (
        "f16, bf16, i8, u8 and i16 are computed in f32 and i32 on the CPU, c64 and c128 as pairs of f32 and f64. "
        "Python: PyTorch runs it inside the session, for such arguments."
    )
    table = Table(title=f"operators on ONNX Runtime, {provider}", caption=caption)
    table.add_column("operator", overflow="fold", min_width=20)
    table.add_column("ONNX Runtime kernels", overflow="fold")
    table.add_column("dtypes", overflow="fold")
    table.add_column("Python, and why", overflow="fold")
    for one in shown:
        table.add_row(one.operator, _kernels(one), _dtypes(one.dtypes), _reasons(one))
    return table


def _kernels(one: Support) -> str:
    if one.drawn:
        return "none: PyTorch draws, in front of the session where it can"
    if not one.sampled:
        return "no sample uses it" + (f"; asks for {', '.join(one.requires)}" if one.requires else "")
    return ", ".join(sorted(kernel.replace("com.microsoft::", "ms.") for kernel in one.kernels)) or ("" if one.outside else "none: a view, or a copy")


def _dtypes(dtypes: Sequence[torch.dtype]) -> str:
    def short(name: str) -> str:
        stem = name.rstrip("0123456789")
        return _SHORT.get(stem, stem) + name[len(stem) :]

    return " ".join(short(str(dtype).removeprefix("torch.")) for dtype in dtypes)


def _reasons(one: Support) -> str:
    return "\n".join(f"{reason} ({_dtypes(dtypes)})" for reason, dtypes in one.outside.items())


def _summary(found: Sequence[Support]) -> str:
    whole = sum(bool(one.dtypes) and not one.outside for one in found)
    part = sum(bool(one.dtypes) and bool(one.outside) for one in found)
    python = sum(not one.dtypes and bool(one.outside) for one in found)
    drawn, rest = sum(one.drawn for one in found), sum(not one.sampled for one in found)
    return (
        f"{len(found)} operators: {whole} on ONNX Runtime, {part} for some arguments or dtypes, {python} in PyTorch (PythonOp), "
        f"{drawn} random; {rest} have a lowering that no sample uses."
    )


if __name__ == "__main__":
    sys.exit(main())
