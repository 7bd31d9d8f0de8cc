"""The models of the zoo: importing this fills `WORKLOADS`."""

from benchmarks.zoo_models import convolutional, generative, language, perception, programs, scientific, sequences, structured, timm_models
from benchmarks.zoo_models.workload import WORKLOADS, Workload

__all__ = [
    "WORKLOADS",
    "Workload",
    "convolutional",
    "generative",
    "language",
    "perception",
    "programs",
    "scientific",
    "sequences",
    "structured",
    "timm_models",
]
