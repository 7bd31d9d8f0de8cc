"""Models of timm, where it is installed: `pip install --no-deps timm==1.0.31`.

timm depends on torchvision, whose wheels on PyPI are built for CUDA and fail to import beside a CPU build of PyTorch; `create_model` does
not need it. So timm is no dependency of this project, and where torchvision does not import an empty module stands for it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any
from unittest import mock

import torch

from benchmarks.zoo_models.workload import Built, Loss, Sizes, add, labels

TIMM = "timm"
BATCHES: Sizes = ((4, 64), (6, 64), (5, 96))
FIXED: Sizes = ((4, 64), (6, 64), (5, 64))

# name: (settings, sizes)
MODELS: dict[str, tuple[dict[str, Any], Sizes]] = {
    "resnet18": ({}, BATCHES),
    "regnetx_002": ({}, BATCHES),
    "convnext_atto": ({}, BATCHES),
    "densenet121": ({"block_config": (2, 2, 2, 2)}, BATCHES),
    "efficientnet_b0": ({}, BATCHES),
    "ghostnet_050": ({}, BATCHES),
    "mobilenetv3_small_050": ({}, BATCHES),
    "vit_tiny_patch16_224": ({"img_size": 64, "depth": 2}, FIXED),
    "mixer_s32_224": ({"img_size": 64}, FIXED),
    "swin_tiny_patch4_window7_224": ({"img_size": 64, "window_size": 4, "depths": (1, 1, 2, 1), "embed_dim": 24}, FIXED),
}


class _Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of torchvision: an empty one, whose attributes are mocks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        is_ours = fullname.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_ours else None

    def exec_module(self, module: types.ModuleType) -> None:
        module.__getattr__ = _mock  # type: ignore[method-assign]


def _mock(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return mock.MagicMock()


def _timm() -> Any:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, _Stub())
    return importlib.import_module("timm")


def _model(name: str, settings: dict[str, Any]) -> Built:
    model = _timm().create_model(name, pretrained=False, num_classes=5, **settings)
    return Loss(model), lambda batch, side: {"input": torch.randn(batch, 3, side, side), "target": labels(batch)}


for _name, (_settings, _sizes) in MODELS.items():
    add(f"timm_{_name}", "timm", lambda row=(_name, _settings): _model(*row), sizes=_sizes, needs=TIMM)
