"""Own generative models: autoencoders, adversarial pairs, diffusion, flows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import PICTURES, Built, Loss, workload


def _vectors(batch: int, length: int) -> dict[str, Any]:
    return {"x": torch.rand(batch * length, 12)}


class VariationalAutoencoder(nn.Module):
    """Gaussian latent, Bernoulli output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        likelihood = F.binary_cross_entropy_with_logits(self.decoder(latent), x, reduction="sum")
        return (likelihood - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()) / x.shape[0]


@workload("generative")
def vae() -> Built:
    """A variational autoencoder: draws in the middle of the graph."""
    return VariationalAutoencoder(), _vectors


class VectorQuantised(nn.Module):
    """Nearest codes by `cdist` and `argmin`, gradient straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = nn.Linear(12, 4), nn.Embedding(16, 4), nn.Linear(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        latent = self.encoder(x)
        code = self.codes(torch.cdist(latent, self.codes.weight).argmin(-1))
        commitment = F.mse_loss(code, latent.detach()) + 0.25 * F.mse_loss(latent, code.detach())
        return F.mse_loss(self.decoder(latent + (code - latent).detach()), x) + commitment


@workload("generative")
def vq_vae() -> Built:
    """An autoencoder with a codebook."""
    return VectorQuantised(), _vectors


@workload("generative", sizes=PICTURES)
def autoencoder() -> Built:
    """Convolutions down, transposed convolutions up."""
    down = (nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GELU())
    up = (
        nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1),
        nn.Sigmoid(),
    )
    return Loss(nn.Sequential(*down, *up), F.smooth_l1_loss), lambda batch, length: {
        "input": torch.rand(batch, 3, 2 * length, 2 * length),
        "target": torch.rand(batch, 3, 2 * length, 2 * length),
    }


class AdversarialStep(nn.Module):
    """Losses of a generator and of a discriminator, which sees the fakes detached."""

    def __init__(self) -> None:
        super().__init__()
        up = (nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1), nn.Tanh())
        self.generator = nn.Sequential(*up)
        down = (nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(128, 1))
        self.discriminator = nn.Sequential(*down)

    def forward(self, real: torch.Tensor) -> torch.Tensor:
        fake = self.generator(torch.randn(real.shape[0], 8, 1, 1))
        scores = [self.discriminator(x) for x in (real, fake.detach(), fake)]
        wanted = [torch.ones_like(scores[0]), torch.zeros_like(scores[1]), torch.ones_like(scores[2])]
        return sum((F.binary_cross_entropy_with_logits(s, w) for s, w in zip(scores, wanted, strict=True)), torch.zeros(()))


@workload("generative", sizes=PICTURES)
def gan() -> Built:
    """A DCGAN: both losses of one step."""
    return AdversarialStep(), lambda batch, _: {"real": torch.rand(batch, 3, 8, 8)}


class WassersteinStep(nn.Module):
    """Critic with clamped weights (no gradient penalty: that is double backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        self.critic = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake = self.generator(torch.randn(x.shape[0], 4))
        hinge = F.relu(1 - self.critic(x)).mean() + F.relu(1 + self.critic(fake.detach())).mean()
        return hinge - self.critic(fake).mean()


@workload("generative")
def hinge_gan() -> Built:
    """A GAN with hinge losses over vectors."""
    return WassersteinStep(), _vectors


class Denoiser(nn.Module):
    """Predicts the noise of a picture at a random time; attention in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.down = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Conv2d(32, 3, 3, padding=1)
        self.register_buffer("remaining", torch.linspace(0.99, 0.01, 50))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.randint(0, 50, (x.shape[0],))
        noise, left = torch.randn_like(x), self.remaining[steps][:, None, None, None]
        angles = steps[:, None] * torch.exp(-torch.arange(8) / 2.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        hidden = F.silu(self.norm(self.first(left.sqrt() * x + (1 - left).sqrt() * noise)) + time[:, :, None, None])
        small = self.down(hidden)
        tokens = small.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        small = tokens.transpose(1, 2).reshape(small.shape)
        return F.mse_loss(self.last(torch.cat([hidden, F.interpolate(small, scale_factor=2.0)], 1)), noise)


@workload("generative", sizes=PICTURES)
def diffusion() -> Built:
    """A diffusion model's step: random times, random noise, U-Net with attention."""
    return Denoiser(), lambda batch, length: {"x": torch.randn(batch, 3, length, length)}


class CouplingFlow(nn.Module):
    """RealNVP: affine couplings, permutations by index, log determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(3))
        self.register_buffer("order", torch.randperm(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        log_determinant = x.new_zeros(x.shape[0])
        for coupling in self.couplings:
            fixed, changed = x[:, self.order].split(6, -1)
            scale, shift = coupling(fixed).chunk(2, -1)
            scale = scale.tanh()
            x, log_determinant = torch.cat([fixed, changed * scale.exp() + shift], -1), log_determinant + scale.sum(-1)
        return -(torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1) + log_determinant).mean()


@workload("generative")
def normalising_flow() -> Built:
    """A flow of couplings."""
    return CouplingFlow(), _vectors


class Gumbel(nn.Module):
    """Categorical latent variables, relaxed and hard."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 8), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.encoder(x)
        codes = F.gumbel_softmax(logits, tau=0.7) + F.gumbel_softmax(logits, hard=True)
        divergence = torch.distributions.kl_divergence(
            torch.distributions.Categorical(logits=logits), torch.distributions.Categorical(torch.ones(8) / 8)
        )
        return F.poisson_nll_loss(self.decoder(codes), x) + divergence.mean()


@workload("generative")
def gumbel() -> Built:
    """Gumbel softmax and distributions."""
    return Gumbel(), _vectors
