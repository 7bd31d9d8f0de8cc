"""Where a graph divides: into forward and backward, and into sessions and what stays in eager PyTorch between them."""
