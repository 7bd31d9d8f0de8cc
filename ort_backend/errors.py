"""Errors that a user can reach. Each says what happened, where in the user's code, and what to do about it."""

from __future__ import annotations


class OrtBackendError(RuntimeError):
    """Base class of every error that this package raises itself."""


class OptionError(OrtBackendError, ValueError):
    """An option has an unknown name or a value that it does not accept."""


class EnvironmentProblem(OrtBackendError, ImportError):
    """A needed package is missing, too old, or installed twice."""


class LoweringError(OrtBackendError):
    """A node of the FX graph cannot be expressed in ONNX, or `strict` forbids how it would be."""


class PassError(OrtBackendError):
    """A pass of the user's (`fx_passes`, `onnx_passes`) raised, or left a graph that cannot be used."""


class SessionError(OrtBackendError):
    """ONNX Runtime rejected a model, or failed while it ran one."""


class OutOfRangeError(SessionError, IndexError):
    """An index, a label or a token is out of range."""


class OutOfMemoryError(SessionError):
    """There is not enough memory for what a graph computes; the message has PyTorch's words for it, and the next call is as good as any."""


class VerificationError(OrtBackendError, AssertionError):
    """`verify` found an output or gradient that differs from eager PyTorch."""
