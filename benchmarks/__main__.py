"""Is it worth using? `ort_training` beside eager PyTorch, `aot_eager` and inductor, on real models.

    python -m benchmarks run                                   # everything
    python -m benchmarks run --quick                           # three small models
    python -m benchmarks run --models gpt bert --no-compile    # step times only
    python -m benchmarks run --device cuda                     # models of real sizes, float32, and bfloat16 autocast

Writes results.json, report.md with its plots, and table.md (a table for the README). The exit status is 1 if a backend failed, or computed
another loss or gradient than eager. Single questions have commands of their own, which benchmarks/README.md lists.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import report, suite
from benchmarks.models import DEFAULT, LARGE, QUICK, REAL, WORKLOADS
from benchmarks.training import BACKENDS, REFERENCE


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    run = parser.add_subparsers(dest="action", required=True).add_parser("run", help="measure, and write the report")
    run.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, and fewer rounds")
    run.add_argument(
        "--models", nargs="+", choices=WORKLOADS, metavar="MODEL", help=f"from {', '.join((*DEFAULT, *REAL))}; on CUDA: {', '.join(LARGE)}"
    )
    run.add_argument("--backends", nargs="+", default=BACKENDS, metavar="BACKEND", help=f"default: {' '.join(BACKENDS)}; eager always runs")
    run.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    run.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), help="default: float32; on CUDA bfloat16 autocast as well")
    run.add_argument("--threads", type=int, default=1, help="of PyTorch and of ONNX Runtime (default: 1)")
    run.add_argument("--seconds", type=float, help="for the step times of a model, all backends together (default: 10, quick: 4)")
    run.add_argument("--no-compile", action="store_true", help="no compile times and no memory, which take a process for each backend")
    run.add_argument("--no-plots", action="store_true", help="for an environment without matplotlib")
    run.add_argument("--out", type=Path, default=Path("out/benchmarks"), help="folder (default: out/benchmarks)")
    return parser.parse_args(arguments)


def settings_of(arguments: argparse.Namespace) -> suite.Settings:
    """What the command line asks for."""
    return suite.Settings(
        models=tuple(arguments.models or (QUICK if arguments.quick else LARGE if arguments.device == "cuda" else DEFAULT)),
        backends=tuple(dict.fromkeys((REFERENCE, *arguments.backends))),
        device=arguments.device,
        dtypes=tuple(arguments.dtypes or (("float32", "bfloat16") if arguments.device == "cuda" else ("float32",))),
        threads=arguments.threads,
        seconds=arguments.seconds or (4.0 if arguments.quick else 10.0),
        compiles=not arguments.no_compile,
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    )


def _drawn(results: dict[str, Any], folder: Path) -> list[Path]:
    from benchmarks import plots  # needs matplotlib, which `--no-plots` does without

    return plots.draw(results, folder)


def main() -> int:
    """Runs, writes, and shows the report."""
    arguments = parse(sys.argv[1:])
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch sees no CUDA device")
    if unknown := set(arguments.backends) - set(torch._dynamo.list_backends(exclude_tags=None)):  # type: ignore[arg-type]
        sys.exit(f"--backends {min(unknown)}: PyTorch knows no backend of that name")
    results = suite.run(settings_of(arguments))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    pictures = [] if arguments.no_plots else _drawn(results, arguments.out)
    text = report.full(results, pictures)
    (arguments.out / "report.md").write_text(text)
    (arguments.out / "table.md").write_text(report.readme_table(results))
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(Markdown(report.full(results, [])))
    console.print(f"\n{', '.join(str(arguments.out / name) for name in ('results.json', 'report.md', 'table.md'))}, {len(pictures)} plots")
    return 1 if results["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
