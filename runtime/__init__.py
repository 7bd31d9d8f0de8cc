"""ONNX model -> callable over torch tensors. Nothing in this package knows FX graphs."""
