"""Where PyTorch's CPU kernels are faster than ONNX Runtime's. Written by `python -m benchmarks.kernel_choice --write`."""

# Operator (and shape class): ranges of size, as (smallest, largest, ONNX Runtime's time over PyTorch's).
FASTER_IN_PYTORCH: dict[str, tuple[tuple[int, int, float], ...]] = {}
