"""The libraries that make a machine without a GPU place graphs as one with a GPU would.

`stand_in`: what ONNX Runtime's CUDA provider loads in place of NVIDIA's libraries (`../shared/fake-cuda`, or the folder `$ORT_FAKE_CUDA` where they
have been made). `pretend_cuda.cpp`: what PyTorch's autograd asks about the device of fake tensors.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = ROOT.parent / "shared" / "fake-cuda" / "make_fake_cuda.sh"
MADE = ROOT / "out" / "fake-cuda"
_TORCH = Path(torch.__file__).parent


class NotThere(Exception):
    """Why placement cannot be asked on this machine."""


def environment() -> dict[str, str]:
    """The environment for a process that places graphs. Makes the libraries where they are missing (seconds).

    Raises:
        NotThere: no stand-in libraries and no recipe for them, or making them failed.
    """
    stand_in = Path(os.environ["ORT_FAKE_CUDA"]) if "ORT_FAKE_CUDA" in os.environ else MADE / "stand-in"
    if not list(stand_in.glob("libcudart.so*")):
        _make_stand_in(stand_in)
    pretend = MADE / f"pretend_cuda-{torch.__version__}.so"
    source = HERE / "pretend_cuda.cpp"
    if not pretend.exists() or pretend.stat().st_mtime < source.stat().st_mtime:
        _compile(source, pretend)
    paths = [str(stand_in), str(_TORCH / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_PRELOAD": str(pretend), "LD_LIBRARY_PATH": ":".join(paths), "OMP_NUM_THREADS": "1"}


def _make_stand_in(folder: Path) -> None:
    if not RECIPE.exists():
        raise NotThere(f"no stand-in CUDA libraries: $ORT_FAKE_CUDA is not set, and there is no {RECIPE}")
    # Beside it, as of the library below.
    partial = folder.with_name(f"{folder.name}.{os.getpid()}")
    _run(["bash", str(RECIPE), str(partial), sys.executable], "making the stand-in CUDA libraries")
    try:
        partial.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(partial)


def _compile(source: Path, library: Path) -> None:
    if shutil.which("g++") is None:
        raise NotThere("g++ is not installed")
    library.parent.mkdir(parents=True, exist_ok=True)
    # Through a name of its own, so that a second process never loads half a library.
    partial = library.with_suffix(f".{os.getpid()}")
    flags = ["-O1", "-std=c++20", "-w", "-shared", "-fPIC", f"-I{_TORCH / 'include'}", f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    _run(["g++", str(source), "-o", str(partial), *flags], "compiling pretend_cuda.cpp")
    partial.replace(library)


def _run(command: list[str], doing: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotThere(f"{doing} failed: {(done.stderr or done.stdout).strip()[-300:]}")
