"""Which kernel runs an operator, ONNX Runtime's or one of PyTorch's, as measured; and the calls of PyTorch's that need more than its arguments."""
