"""FX graph -> onnx_ir. Nothing in this package knows ONNX Runtime sessions."""

from ort_backend.lowering import lean_imports

lean_imports.import_onnxscript()  # before any module of this package does
