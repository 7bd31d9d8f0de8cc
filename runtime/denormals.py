"""Denormal numbers: sessions flush them to zero where the program does (`torch.set_flush_denormal`)."""

from __future__ import annotations

import onnxruntime as ort

# The smallest denormal number of float64. A constant times another would be computed before there is a mode to ask for.
_SMALLEST = 5e-324


def follow_thread(options: ort.SessionOptions) -> None:
    """Lets a session that is made with `options` treat denormal numbers as the calling thread does: its own threads, and the calling one.

    The first session in a process sets the mode of the thread that makes it, and would turn the program's off (`session.set_denormal_as_zero` in
    onnxruntime_session_options_config_keys.h). A mode is a thread's own; later changes hold in sessions that run in that thread.
    """
    if flushes():
        options.add_session_config_entry("session.set_denormal_as_zero", "1")


def flushes() -> bool:
    """Whether the calling thread takes denormal numbers for zero."""
    return _SMALLEST * 1.0 == 0.0
