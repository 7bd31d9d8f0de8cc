"""Calls of PyTorch in a graph for a CUDA device, and in half precision on the CPU: fewer of them, with less between them."""
