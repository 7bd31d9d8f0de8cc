"""Own convolutional networks and generative models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import CLASSES, PICTURES, Batch, Built, Loss, add, labels, workload


def pictures(scale: int = 2, channels: int = 3) -> Batch:
    """float32 (batch, channels, side, side), side = scale * length, and a class for each."""
    return lambda batch, length: _classified(torch.randn(batch, channels, scale * length, scale * length))


def _classified(x: torch.Tensor) -> dict[str, Any]:
    return {"input": x, "target": labels(x.shape[0])}


def head(channels: int) -> tuple[nn.Module, ...]:
    """From a feature map to classes."""
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)


def block(inside: int, outside: int, activation: nn.Module, **details: Any) -> tuple[nn.Module, ...]:
    """Convolution, BatchNorm, activation."""
    return nn.Conv2d(inside, outside, 3, padding=1, bias=False, **details), nn.BatchNorm2d(outside), activation


class Residual(nn.Module):
    """`x + inner(x)`, or both side by side."""

    def __init__(self, inner: nn.Module, concatenate: bool = False) -> None:
        super().__init__()
        self.inner, self.concatenate = inner, concatenate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1) if self.concatenate else x + self.inner(x)


class Parallel(nn.Module):
    """Several modules on one input, outputs side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class SqueezeExcite(nn.Module):
    """Channels weighed by what is in them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weights = nn.Sequential(nn.Conv2d(channels, 4, 1), nn.ReLU(), nn.Conv2d(4, channels, 1), nn.Hardsigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weights(x.mean((2, 3), keepdim=True))


def vgg() -> nn.Module:
    """Convolutions, pools, dropout of channels."""
    layers = (*block(3, 8, nn.ReLU()), nn.MaxPool2d(2), *block(8, 16, nn.LeakyReLU(0.1)), nn.Dropout2d(0.1), nn.MaxPool2d(2))
    return nn.Sequential(*layers, *head(16))


def residual() -> nn.Module:
    """A residual block, strides, ELU."""
    layers = (*block(3, 8, nn.ReLU()), Residual(nn.Sequential(*block(8, 8, nn.ReLU()), *block(8, 8, nn.Identity()))), nn.ReLU())
    return nn.Sequential(*layers, *block(8, 16, nn.ELU(), stride=2), *head(16))


def mobilenet_v3() -> nn.Module:
    """Depthwise convolution, squeeze and excite, hard activations."""
    depthwise = nn.Conv2d(16, 16, 5, stride=2, padding=2, groups=16, bias=False)
    inverted = (nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish(), depthwise, nn.BatchNorm2d(16), SqueezeExcite(16), nn.Hardswish())
    return nn.Sequential(*block(3, 8, nn.Hardswish()), *inverted, nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8), *head(8))


def densenet() -> nn.Module:
    """Concatenated features."""
    layers = [Residual(nn.Sequential(*block(8 + 4 * i, 4, nn.SiLU())), concatenate=True) for i in range(3)]
    return nn.Sequential(*block(3, 8, nn.ReLU()), *layers, nn.AvgPool2d(2), *head(20))


def inception() -> nn.Module:
    """Parallel branches, asymmetric kernels, pools that keep the size."""
    wide = nn.Sequential(nn.Conv2d(8, 4, (1, 7), padding=(0, 3)), nn.Conv2d(4, 4, (7, 1), padding=(3, 0)))
    pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1, count_include_pad=False), nn.Conv2d(8, 4, 1))
    mixed = Parallel(nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 3, padding=1), wide, pooled, nn.MaxPool2d(3, 1, 1))
    return nn.Sequential(*block(3, 8, nn.ReLU()), mixed, nn.BatchNorm2d(24), nn.ReLU6(), *head(24))


def norms() -> nn.Module:
    """Group, instance and local response norms."""
    layers = (nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Mish(), nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.PReLU(8))
    return nn.Sequential(*layers, nn.LocalResponseNorm(3), nn.Conv2d(8, 8, 1), nn.GroupNorm(1, 8), nn.CELU(), *head(8))


def paddings() -> nn.Module:
    """Reflected, replicated, circular padding; dilation."""
    layers = (nn.ReflectionPad2d(2), nn.Conv2d(3, 8, 3), nn.ReplicationPad2d(1), nn.Conv2d(8, 8, 3, dilation=2), nn.Softplus())
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.ZeroPad2d(1), nn.Tanh(), *head(8))


def weight_norms() -> nn.Module:
    """Weights reparametrised by their norm and by their largest singular value."""
    first = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    second = nn.utils.parametrizations.spectral_norm(nn.Conv2d(8, 8, 3))
    return nn.Sequential(first, nn.ReLU(), second, nn.SELU(), *head(8))


def adaptive_pools() -> nn.Module:
    """Adaptive pools that do not divide evenly."""
    layers = (nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d((5, 3)), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveMaxPool2d((3, 2)))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, CLASSES))


def pixel_shuffle() -> nn.Module:
    """Space to channels and back."""
    return nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(12, 8, 3, padding=1), nn.PixelShuffle(2), nn.ChannelShuffle(2), nn.Conv2d(2, 8, 3), *head(8))


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "vgg": vgg,
    "residual": residual,
    "mobilenet_v3": mobilenet_v3,
    "densenet": densenet,
    "inception": inception,
    "norms": norms,
    "paddings": paddings,
    "weight_norms": weight_norms,
    "adaptive_pools": adaptive_pools,
    "pixel_shuffle": pixel_shuffle,
}


def _classifier(make: Callable[[], nn.Module]) -> Callable[[], Built]:
    return lambda: (Loss(make()), pictures())


for _name, _make in CLASSIFIERS.items():
    add(_name, "convolutional", _classifier(_make), sizes=PICTURES)


@workload("convolutional", sizes=PICTURES)
def channels_last() -> Built:
    """Weights and pictures with the channels innermost in memory."""
    model = Loss(residual()).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, lambda batch, length: _classified(torch.randn(batch, 3, 2 * length, 2 * length).to(memory_format=torch.channels_last))


class FrozenNorms(Loss):
    """BatchNorm keeps its statistics in training, as in fine-tuning."""

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


@workload("convolutional", sizes=PICTURES)
def frozen_norms() -> Built:
    """Fine-tuning with frozen BatchNorm and a frozen first layer."""
    model = FrozenNorms(residual())
    model.network[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return model, pictures()


@workload("convolutional", sizes=PICTURES)
def one_dimensional() -> Built:
    """1-d convolutions over a signal, dilated, with a transposed one."""
    layers = (nn.Conv1d(2, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(8, 8, 3, dilation=2, padding=2), nn.GELU())
    network = nn.Sequential(
        *layers, nn.ConvTranspose1d(8, 8, 4, stride=2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, CLASSES)
    )
    return Loss(network), lambda batch, length: _classified(torch.randn(batch, 2, 4 * length))


@workload("convolutional", sizes=PICTURES)
def three_dimensional() -> Built:
    """3-d convolutions over video."""
    layers = (nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(4, 8, 3, groups=2, padding=1), nn.AvgPool3d(2))
    network = nn.Sequential(*layers, nn.ConvTranspose3d(8, 4, 2, stride=2), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, CLASSES))
    return Loss(network), lambda batch, length: _classified(torch.randn(batch, 1, 8, length // 2, length // 2))


class UNet(nn.Module):
    """Two levels down, two up; `up` scales a feature map by two."""

    def __init__(self, *ups: nn.Module) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Sequential(*block(3, 8, nn.ReLU())), nn.Sequential(nn.MaxPool2d(2), *block(8, 16, nn.ReLU()))])
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *block(16, 16, nn.ReLU()))
        self.ups = nn.ModuleList(ups)
        self.up = nn.ModuleList([nn.Sequential(*block(32, 8, nn.ReLU())), nn.Sequential(*block(16, 8, nn.ReLU()), nn.Conv2d(8, 3, 1))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down[0](x)
        second = self.down[1](first)
        x = self.up[0](torch.cat([second, self.ups[0](self.bottom(second))], 1))
        return self.up[1](torch.cat([first, self.ups[1](x)], 1))


def _segmented(batch: int, length: int) -> dict[str, Any]:
    return {"input": torch.randn(batch, 3, 2 * length, 2 * length), "target": labels(batch, 2 * length, 2 * length, classes=3)}


def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """One minus the overlap of prediction and target; scalar."""
    probabilities, wanted = logits.softmax(1), F.one_hot(target, 3).movedim(-1, 1)
    return 1 - (2 * (probabilities * wanted).sum((2, 3)) / (probabilities + wanted).sum((2, 3))).mean()


@workload("convolutional", sizes=PICTURES)
def unet_bilinear() -> Built:
    """Segmentation, bilinear upsampling, cross entropy per pixel."""
    return Loss(UNet(*(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=corners) for corners in (True, False)))), _segmented


@workload("convolutional", sizes=PICTURES)
def unet_nearest() -> Built:
    """Segmentation, nearest upsampling, dice loss."""
    return Loss(UNet(nn.Upsample(scale_factor=2), nn.Upsample(scale_factor=2, mode="bicubic")), dice), _segmented


@workload("convolutional", sizes=PICTURES)
def unet_transposed() -> Built:
    """Segmentation, transposed convolutions, class weights and ignored pixels."""

    def weighted(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target, weight=torch.tensor([0.2, 0.3, 0.5]), ignore_index=2, label_smoothing=0.1)

    return Loss(UNet(nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(8, 8, 4, stride=2, padding=1)), weighted), _segmented
