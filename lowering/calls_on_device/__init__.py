"""Calls of PyTorch in a graph for a CUDA device: fewer of them, with less between them."""
