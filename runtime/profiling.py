"""Profiles that ONNX Runtime writes of a session's runs, where `session_options` has `enable_profiling`: with the user's lines, and complete.

ONNX Runtime names its events after the nodes, and writes the file when the session goes, which at the end of the process it never does.
"""

from __future__ import annotations

import atexit
import os
import re
import weakref
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Protocol

import onnx

# Attributes of nodes that hold the name of a callable, `title#number`.
CALLED = ("func_name", "operator")
_LINE = re.compile(r'File "(?P<path>.+?)", line (?P<number>\d+)')


class Profiled(Protocol):
    """A session that writes a profile."""

    def end_profile(self) -> str | None: ...


_profiled: weakref.WeakSet[Profiled] = weakref.WeakSet()


def with_lines(nodes: Iterable[onnx.NodeProto], lines: Mapping[str | None, str | None], *, backward: bool) -> dict[str | None, str | None]:
    """Renames the nodes of a graph, in place, for what reads a profile; returns the user's line for each by its new name.

    `Gemm_node_7` becomes `Gemm_node_7 (model.py:12)`, a node of the backward `Gemm_node_7 (backward of model.py:12)`, and one that calls PyTorch has
    the operator's name in front: `aten::sort ATen_node_3 (model.py:14)`. What ONNX Runtime makes of several nodes it names after one of them.

    Args:
        nodes: In their order; those behind a `YieldOp` belong to the backward.
        lines: The user's line for each, as `lowering.provenance.user_line` has it.
        backward: Whether all of them belong to it.
    """
    named: dict[str | None, str | None] = {}
    for node in nodes:
        backward = backward or node.op_type == "YieldOp"
        line = lines.get(node.name)
        called = next((one.s.decode().split("#")[0].replace(" ", "_") for one in node.attribute if one.name in CALLED), None)
        found = _LINE.search(line or "")
        if called is not None:
            node.name = f"{called} {node.name}"
        if found is not None:
            node.name += f" ({'backward of ' if backward else ''}{_short(found['path'])}:{found['number']})"
        named[node.name] = line
    return named


def _short(path: str) -> str:
    """A path as an import has it, or from the working directory; else its last two parts."""
    _, installed, module = path.rpartition("site-packages" + os.sep)
    if installed:
        return module
    inside = os.path.relpath(path)
    return inside if not inside.startswith("..") else os.sep.join(PurePath(path).parts[-2:])


def ends_at_exit(session: Profiled) -> None:
    """Has a session's profile written at the end of the process, if it lives as long."""
    _profiled.add(session)


def end_profiles() -> list[str]:
    """Writes the profiles of all sessions, which record no more of their runs from here on; the files' paths."""
    return [path for session in list(_profiled) if (path := session.end_profile()) is not None]


atexit.register(end_profiles)
