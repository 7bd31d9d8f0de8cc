"""Users' `torch.autograd.Function`s: from the call that Dynamo meets to `PythonOp` and `PythonOpGrad`."""
