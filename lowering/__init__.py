"""FX graph -> onnx_ir. Nothing in this package knows ONNX Runtime sessions."""
