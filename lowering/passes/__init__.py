"""Passes over FX graphs and ONNX graphs, one file each."""
