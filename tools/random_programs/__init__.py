"""Random programs, compiled and compared with eager PyTorch: see `__main__`."""
