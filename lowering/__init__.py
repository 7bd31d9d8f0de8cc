"""FX graph -> onnx_ir. Nothing in this package knows ONNX Runtime sessions.

The main path is `graph`, the loop over FX nodes. It looks operators up in `registry`, which `ops` fills, and in `torchlib`; what neither has calls
PyTorch (`python_op`). Beside it lie what lowerings are written with (`axes`, `constants`, `symbolic`, ...) and, in the order of a compile:

    tracing           what AOTAutograd and Dynamo are told while they trace
    functions         users' `torch.autograd.Function`s
    splitting         where a graph divides: forward and backward, sessions and eager PyTorch
    passes            over FX graphs and ONNX graphs, one file each
    kernels           which kernel runs an operator, ONNX Runtime's or PyTorch's
    calls_on_device   calls of PyTorch in a graph for a CUDA device, and in half precision on the CPU
    fast_loops        finished graphs, for the loops of ONNX Runtime's CPU kernels
"""
