"""ONNX model -> callable over torch tensors. Nothing in this package knows FX graphs."""

import onnxruntime  # noqa: F401 - first, since what it replaces in torch is put back here

from ort_backend.runtime import patches

patches.undo()
