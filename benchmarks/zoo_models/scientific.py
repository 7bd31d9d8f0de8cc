"""Own scientific models: fields, operators in Fourier space, equations, Gaussian processes, rendering, resampling."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import CLASSES, Built, Loss, labels, workload

SCIENCE = "scientific"


class FourierOperator(nn.Module):
    """FNO: a complex matrix for each low frequency, beside a pointwise layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.point, self.project = nn.Linear(2, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 1)
        self.spectral = nn.Parameter(torch.randn(8, 8, 4, 2) / 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = self.lift(input).transpose(1, 2)
        spectrum = torch.fft.rfft(hidden)
        low = torch.einsum("bif,iof->bof", spectrum[..., :4], torch.view_as_complex(self.spectral))
        mixed = torch.fft.irfft(F.pad(low, (0, spectrum.shape[-1] - 4)), n=hidden.shape[-1])
        return self.project(F.gelu(mixed + self.point(hidden)).transpose(1, 2))


@workload(SCIENCE)
def fourier_operator() -> Built:
    """A Fourier neural operator in one dimension."""
    return Loss(FourierOperator()), lambda batch, length: {"input": torch.randn(batch, length, 2)}


class GlobalFilter(nn.Module):
    """GFNet: a filter over the two-dimensional spectrum, by real and imaginary parts."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Parameter(torch.randn(4, 8, 5, 2) / 8), nn.Linear(4, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(input, norm="ortho") * torch.view_as_complex(self.filter)
        return self.head(F.relu(torch.fft.irfft2(spectrum, s=input.shape[-2:], norm="ortho")).mean((2, 3)))


@workload(SCIENCE)
def global_filter() -> Built:
    """Token mixing by a spectral filter."""
    return Loss(GlobalFilter()), lambda batch, _: {"input": torch.randn(batch, 4, 8, 8), "target": labels(batch)}


class Spectrogram(nn.Module):
    """A short-time Fourier transform and a classifier on its logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, CLASSES)
        self.register_buffer("window", torch.hann_window(16))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(input, 16, hop_length=8, window=self.window, return_complex=True).abs()
        return self.head(spectrum.square().clamp(min=1e-5).log().mean(-1))


@workload(SCIENCE)
def spectrogram() -> Built:
    """Audio features inside the model."""
    return Loss(nn.Sequential(nn.Conv1d(1, 1, 3, padding=1), nn.Flatten(1), Spectrogram())), lambda batch, length: {
        "input": torch.randn(batch, 1, 8 * length),
        "target": labels(batch),
    }


class RadianceField(nn.Module):
    """NeRF: positional encoding, densities composed along rays by `cumprod`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4))
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))

    def forward(self, origin: torch.Tensor, direction: torch.Tensor, colour: torch.Tensor) -> torch.Tensor:
        depth = torch.linspace(0.5, 2.0, 12) + torch.rand(origin.shape[0], 12) / 10
        points = origin[:, None] + depth[..., None] * F.normalize(direction, dim=-1)[:, None]
        angles = (points[..., None] * self.frequencies).flatten(-2)
        raw = self.network(torch.cat([angles.sin(), angles.cos()], -1))
        gaps = torch.cat([depth.diff(dim=-1), torch.full_like(depth[:, :1], 1e10)], -1)
        opacity = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
        passing = torch.cumprod(torch.cat([torch.ones_like(opacity[:, :1]), 1 - opacity + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((opacity * passing)[..., None] * raw[..., :3].sigmoid()).sum(1), colour)


@workload(SCIENCE)
def radiance_field() -> Built:
    """Volume rendering."""
    return RadianceField(), lambda batch, length: {name: torch.rand(batch * length, 3) for name in ("origin", "direction", "colour")}


class Siren(nn.Module):
    """A field of sines, and its derivative by finite differences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 16), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        field = [self.second(torch.sin(5 * self.first(x + shift))) for shift in (0.0, 0.1, -0.1)]
        return (field[0] - x.prod(-1, keepdim=True)).abs().mean() + ((field[1] - field[2]) / 0.2 - 1).square().mean()


@workload(SCIENCE)
def siren() -> Built:
    """An implicit field."""
    return Siren(), lambda batch, length: {"x": torch.rand(batch * length, 2)}


class PhysicsInformed(nn.Module):
    """The heat equation's residual; derivatives by `torch.autograd.grad` inside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def field(point: torch.Tensor) -> torch.Tensor:
            return self.network(point).squeeze(-1)

        def slope(point: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(field)(point)

        first = torch.func.vmap(slope)(x)
        second = torch.func.vmap(torch.func.jacfwd(slope))(x)
        return (first[:, 1] - 0.1 * second[:, 0, 0]).square().mean() + self.network(x).square().mean()


@workload(SCIENCE)
def physics_informed() -> Built:
    """A PINN with `torch.func`."""
    return PhysicsInformed(), lambda batch, length: {"x": torch.rand(batch * length, 2)}


class GaussianProcess(nn.Module):
    """Marginal likelihood: kernel matrix, Cholesky, triangular solves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        kernel = torch.exp(-0.5 * (x[:, None] - x[None]).square().sum(-1) / self.scale.exp()) + (1 + self.noise.exp()) * torch.eye(x.shape[0])
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[:, None], factor).squeeze(-1)
        return 0.5 * y @ solved + factor.diagonal().log().sum() + 0.5 * x.shape[0] * math.log(2 * math.pi)


@workload(SCIENCE)
def gaussian_process() -> Built:
    """Hyperparameters by maximum likelihood."""
    return GaussianProcess(), lambda batch, length: {"x": torch.randn(length, 2), "y": torch.randn(length)}


class SpatialTransformer(nn.Module):
    """An affine warp that the picture itself decides on, by `grid_sample` (`affine_grid` takes no symbolic sizes, in any backend)."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Conv2d(1, 4, 5, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 6))
        self.head = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))
        nn.init.constant_(self.locate[-1].bias, 0.3)  # type: ignore[arg-type]
        middles = (torch.arange(24) * 2 + 1) / 24 - 1
        self.register_buffer("places", torch.stack([*torch.meshgrid(middles, middles, indexing="xy"), torch.ones(24, 24)], -1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        grid = torch.einsum("hwk,bck->bhwc", self.places, self.locate(input).view(-1, 2, 3))
        return self.head(F.grid_sample(input, grid, align_corners=False))


@workload(SCIENCE)
def spatial_transformer() -> Built:
    """A spatial transformer network."""
    return Loss(SpatialTransformer()), lambda batch, _: {"input": torch.randn(batch, 1, 24, 24), "target": labels(batch)}


class Resampler(nn.Module):
    """Interpolation to a given size: bilinear, nearest, area, trilinear over a stack, with antialiasing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(12, 3, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = self.first(input)
        scaled = [
            F.interpolate(hidden, size=(10, 14), mode="bilinear", align_corners=False),
            F.interpolate(hidden, size=(10, 14), mode="nearest"),
            F.interpolate(hidden[:, :, None], size=(1, 10, 14), mode="trilinear")[:, :, 0],
        ]
        pooled = F.interpolate(hidden, size=(4, 4), mode="area").mean()
        return self.last(torch.cat(scaled, 1)) + pooled


@workload(SCIENCE)
def resampling() -> Built:
    """Feature maps brought to one size."""
    return Loss(Resampler()), lambda batch, length: {"input": torch.randn(batch, 3, length, length)}


class SurvivalAnalysis(nn.Module):
    """Cox's partial likelihood: a sort, and sums over everybody still at risk."""

    def __init__(self) -> None:
        super().__init__()
        self.risk = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
        order = time.sort(descending=True).indices
        risk, happened = self.risk(x).squeeze(-1)[order], event[order]
        return -((risk - torch.logcumsumexp(risk, 0)) * happened).sum() / happened.sum().clamp(min=1)


@workload(SCIENCE)
def survival_analysis() -> Built:
    """Cox regression."""

    def batch_of(batch: int, length: int) -> dict[str, Any]:
        people = batch * length
        return {"x": torch.randn(people, 6), "time": torch.rand(people), "event": (torch.rand(people) < 0.7).float()}

    return SurvivalAnalysis(), batch_of


class SoftSort(nn.Module):
    """Ranking by pairwise sigmoids, and the Wasserstein distance of sorted samples."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
        score = self.score(x).squeeze(-1)
        rank = 1 + ((score[:, None] - score[:, :, None]) / 0.1).sigmoid().sum(-1) - 0.5
        gain = ((2**relevance - 1) / torch.log2(rank + 1)).sum(-1)
        ideal = ((2 ** relevance.sort(descending=True).values - 1) / torch.log2(torch.arange(x.shape[1]) + 2.0)).sum(-1)
        transport = (score.sort(-1).values - relevance.sort(-1).values).abs().mean()
        return 1 - (gain / ideal.clamp(min=1e-3)).mean() + transport


@workload(SCIENCE)
def learning_to_rank() -> Built:
    """Normalised discounted cumulative gain, made differentiable."""
    return SoftSort(), lambda batch, length: {"x": torch.randn(batch, length, 6), "relevance": labels(batch, length, classes=4).float()}


class Special(nn.Module):
    """Beta, gamma and Student likelihoods: special functions with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second, third, fourth = (F.softplus(self.network(x)) + 0.5).unbind(-1)
        beta = torch.distributions.Beta(first, second).log_prob(y)
        gamma = torch.distributions.Gamma(third, fourth).log_prob(y + 1)
        return -(beta + gamma + torch.special.log_ndtr(first - y) + torch.erf(second)).mean() + torch.special.entr(y * third.sigmoid()).mean()


@workload(SCIENCE)
def likelihoods() -> Built:
    """Distributions with special functions."""
    return Special(), lambda batch, length: {"x": torch.randn(batch * length, 6), "y": torch.rand(batch * length) * 0.8 + 0.1}
