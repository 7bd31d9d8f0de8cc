"""ONNX model -> callable over torch tensors. Nothing in this package knows FX graphs."""

from ort_backend.runtime import patches

patches.import_onnxruntime()  # before any module of this package does
