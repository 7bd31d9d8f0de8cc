"""The machine and its software, for reports."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "onnxruntime-training", "onnxruntime", "onnxruntime-gpu", "onnxscript", "onnx-ir", "transformers", "numpy")


def describe(device: str) -> dict[str, Any]:
    """Processor, memory, load, versions; the GPU where `device` is `"cuda"`."""
    described = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": list(os.getloadavg()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "compiler": _compiler(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "commit": _commit(),
    }
    if device == "cuda":
        described["gpu"] = torch.cuda.get_device_name()
    return described


def sentence(machine: dict[str, Any], threads: int) -> str:
    """One line about it."""
    gpu = f"{machine['gpu']}; " if "gpu" in machine else ""
    packages = ", ".join(f"{name} {version}" for name, version in machine["packages"].items() if name in PACKAGES[:4])
    count = "one thread" if threads == 1 else f"{threads} threads"
    processor = f"{machine['processor']} ({machine['cores']} cores, {machine['instructions']}, {machine['memory_bytes'] / 2**30:.0f} GiB)"
    return f"{gpu}{processor}, {count}; {packages}, Python {machine['python']}"


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", information.read_text(), re.MULTILINE) if information.exists() else None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if name.startswith("onnxruntime") and not _is_imported(found) else found.version


def _is_imported(package: importlib.metadata.Distribution) -> bool:
    """Whether this distribution of ONNX Runtime is the one that is imported: an environment over another sees that one's as well."""
    found = importlib.util.find_spec("onnxruntime")
    return found is not None and found.origin is not None and Path(found.origin).parent == Path(str(package.locate_file("onnxruntime")))


def _compiler() -> str | None:
    """The C++ compiler that inductor needs on the CPU."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return _first_line([found, "--version"]) if found else None


def _commit() -> str | None:
    return _first_line(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"])


def _first_line(command: list[str]) -> str | None:
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.partition("\n")[0].strip() or None
