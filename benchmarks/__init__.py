"""Benchmarks; run them as modules, `python -m benchmarks.overhead`."""
