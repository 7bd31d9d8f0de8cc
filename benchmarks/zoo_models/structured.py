"""Own models over structured data: recommenders, graphs, point sets, mixtures of experts, metric learning, reinforcement learning."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import CLASSES, VOCABULARY, Built, Loss, ids, labels, workload

RECOMMENDER, GRAPH, REINFORCEMENT, DENSE = "recommender", "graph", "reinforcement learning", "dense"


class Dlrm(nn.Module):
    """Bags of features, pairwise interactions, a click."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(VOCABULARY, 8, mode=mode) for mode in ("sum", "mean", "max"))
        self.bottom, self.top = nn.Linear(6, 8), nn.Linear(14, 1)

    def forward(self, dense: torch.Tensor, items: torch.Tensor, offsets: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        features = torch.stack([self.bottom(dense), *(bag(items, offsets) for bag in self.bags)], 1)
        products = features @ features.mT
        rows, columns = torch.tril_indices(4, 4, -1)
        logits = self.top(torch.cat([features[:, 0], products[:, rows, columns]], -1))
        return F.binary_cross_entropy_with_logits(logits.squeeze(-1), clicked)


@workload(RECOMMENDER)
def dlrm() -> Built:
    """Embedding bags with offsets."""
    return Dlrm(), lambda batch, length: {
        "dense": torch.randn(batch, 6),
        "items": ids(1, batch * length)[0],
        "offsets": torch.arange(batch) * length,
        "clicked": torch.randint(0, 2, (batch,)).float(),
    }


class DeepFm(nn.Module):
    """Factorisation machine beside a network, one table for all fields."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first = nn.Embedding(4 * 20, 8), nn.Embedding(4 * 20, 1)
        self.network = nn.Sequential(nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.register_buffer("offsets", torch.arange(4) * 20)
        nn.init.normal_(self.table.weight, std=0.1)  # with larger scores 1 - sigmoid(score) has few digits left
        nn.init.normal_(self.first.weight, std=0.1)

    def forward(self, fields: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        rows = fields + self.offsets
        features = self.table(rows)
        pairs = 0.5 * (features.sum(1).square() - features.square().sum(1)).sum(-1, keepdim=True)
        logits = self.first(rows).sum(1) + pairs + self.network(features.flatten(1))
        return F.binary_cross_entropy(logits.sigmoid().squeeze(-1), clicked)


@workload(RECOMMENDER)
def deep_fm() -> Built:
    """Click prediction."""
    return DeepFm(), lambda batch, length: {"fields": labels(batch * length, 4, classes=20), "clicked": torch.rand(batch * length).round()}


class TwoTowers(nn.Module):
    """Queries and documents, in-batch negatives, learnt temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.document, self.temperature = nn.Linear(12, 8), nn.Linear(6, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, query: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
        left, right = F.normalize(self.query(query), dim=-1), F.normalize(self.document(document), dim=-1)
        logits, diagonal = self.temperature.exp() * left @ right.T, torch.arange(left.shape[0])
        return (F.cross_entropy(logits, diagonal) + F.cross_entropy(logits.T, diagonal)) / 2


@workload(RECOMMENDER)
def contrastive() -> Built:
    """Retrieval with a contrastive loss."""
    return TwoTowers(), lambda batch, length: {"query": torch.randn(batch * length, 12), "document": torch.randn(batch * length, 6)}


class MetricLosses(nn.Module):
    """Triplets, margins, cosines, rankings on one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(12, 16), nn.LogSigmoid(), nn.Linear(16, 8))

    def forward(self, anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
        a, p, n = (self.network(x) for x in (anchor, positive, negative))
        total = F.triplet_margin_loss(a, p, n) + F.cosine_embedding_loss(a, p, sign) + F.hinge_embedding_loss((a - n).norm(dim=-1), sign)
        total = (
            total + F.margin_ranking_loss((a * p).sum(-1), (a * n).sum(-1), sign, margin=0.5) + F.huber_loss(a, p) + F.soft_margin_loss(a[:, 0], sign)
        )
        return total + F.gaussian_nll_loss(a, p, n.exp()) + F.kl_div(a.log_softmax(-1), p.softmax(-1), reduction="batchmean") + torch.pdist(a).mean()


@workload(RECOMMENDER)
def metric_losses() -> Built:
    """Losses of metric learning."""
    return MetricLosses(), lambda batch, length: {
        **{name: torch.randn(batch * length, 12) for name in ("anchor", "positive", "negative")},
        "sign": torch.randint(0, 2, (batch * length,)) * 2.0 - 1.0,
    }


def _graph(batch: int, length: int) -> dict[str, Any]:
    """`length` nodes with 6 features, batch * length random edges (2, edges), a class per node."""
    return {"x": torch.randn(length, 6), "edges": torch.randint(0, length, (2, batch * length)), "y": labels(length)}


class GraphConvolution(nn.Module):
    """Messages summed with `index_add`, normalised by degree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        source, target = edges
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(target.shape[0])) + 1
        weight = (degree[source] * degree[target]).rsqrt().unsqueeze(-1)
        for layer in (self.first, self.second):
            x = layer(x)
            x = x / degree.unsqueeze(-1) + torch.zeros_like(x).index_add(0, target, x[source] * weight)
            x = F.relu(x) if layer is self.first else x
        return F.cross_entropy(x, y)


@workload(GRAPH)
def graph_convolution() -> Built:
    """Node classification."""
    return GraphConvolution(), _graph


class GraphAttention(nn.Module):
    """Softmax over the neighbours by scatters: amax, sum, mean."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.score, self.head = nn.Linear(6, 8), nn.Linear(16, 1), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        (source, target), value = edges, self.value(x)
        score = F.leaky_relu(self.score(torch.cat([value[source], value[target]], -1)), 0.2).squeeze(-1)
        largest = torch.full((x.shape[0],), -1e9).scatter_reduce(0, target, score.detach(), "amax")
        weight = (score - largest[target]).exp()
        total = torch.zeros(x.shape[0]).scatter_add(0, target, weight)
        messages = value[source] * (weight / total[target]).unsqueeze(-1)
        index = target.unsqueeze(-1).expand_as(messages)
        summed = torch.zeros_like(value).scatter_add(0, index, messages)
        mean = torch.zeros_like(value).scatter_reduce(0, index, messages, "mean", include_self=False)
        return F.cross_entropy(self.head(summed + mean), y)


@workload(GRAPH)
def graph_attention() -> Built:
    """A graph attention network."""
    return GraphAttention(), _graph


class PointNet(nn.Module):
    """Neighbours by distance and `topk`, gathered, pooled by maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, points: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        distances = (points[:, :, None] - points[:, None]).square().sum(-1)
        nearest = distances.topk(4, largest=False).indices
        rows = torch.arange(points.shape[0])[:, None, None]
        local = torch.cat([points[:, :, None].expand(-1, -1, 4, -1), points[rows, nearest] - points[:, :, None]], -1)
        hidden = F.relu(self.first(local)).amax(2)
        return F.cross_entropy(self.head(self.second(hidden).max(1).values), y)


@workload(GRAPH)
def point_net() -> Built:
    """Classification of point clouds."""
    return PointNet(), lambda batch, length: {"points": torch.randn(batch, length, 3), "y": labels(batch)}


class DeepSet(nn.Module):
    """Sets pooled by sum, mean, log-sum-exp, standard deviation, median."""

    def __init__(self) -> None:
        super().__init__()
        self.element, self.head = nn.Sequential(nn.Linear(6, 8), nn.Softsign()), nn.Linear(40, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.element(x)
        pooled = [hidden.sum(1), hidden.mean(1), hidden.logsumexp(1), hidden.std(1), hidden.median(1).values]
        return F.cross_entropy(self.head(torch.cat(pooled, -1)), y)


@workload(GRAPH)
def deep_set() -> Built:
    """Permutation invariant pooling."""
    return DeepSet(), lambda batch, length: {"x": torch.randn(batch, length, 6), "y": labels(batch)}


class Experts(nn.Module):
    """Two of four experts per token by `topk`, all computed, with the balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 32) / 4), nn.Parameter(torch.randn(4, 32, 16) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(2, -1)
        routing = torch.zeros_like(probabilities).scatter(-1, chosen, weights / weights.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("bsd,edh->bseh", x, self.up))
        output = torch.einsum("bseh,ehd,bse->bsd", hidden, self.down, routing)
        load = F.one_hot(chosen, 4).float().mean((0, 1, 2))
        return (output - x).square().mean() + (probabilities.mean((0, 1)) * load).sum()


@workload(DENSE)
def mixture_of_experts() -> Built:
    """Top-2 routing."""
    return Experts(), lambda batch, length: {"x": torch.randn(batch, length, 16)}


def vectors(batch: int, length: int) -> dict[str, Any]:
    """float32 (batch * length, 12) and a class for each."""
    return {"input": torch.randn(batch * length, 12), "target": labels(batch * length)}


@workload(DENSE)
def mlp() -> Built:
    """Linear layers, activations, dropout."""
    return Loss(nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))), vectors


@workload(DENSE)
def mlp_batch_norm() -> Built:
    """BatchNorm over vectors, alpha dropout, squared error on one-hot targets."""
    network = nn.Sequential(nn.Linear(12, 32, bias=False), nn.BatchNorm1d(32), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(32, CLASSES))
    return Loss(network, lambda output, target: F.mse_loss(output, F.one_hot(target, CLASSES).float())), vectors


ACTIVATIONS = (
    nn.ELU(),
    nn.GELU(),
    nn.SiLU(),
    nn.Mish(),
    nn.Softplus(),
    nn.Hardswish(),
    nn.Hardsigmoid(),
    nn.Hardtanh(),
    nn.ReLU6(),
    nn.Softshrink(0.1),
)
MORE = (nn.Hardshrink(0.1), nn.Tanhshrink(), nn.LogSigmoid(), nn.Softsign(), nn.Threshold(0.1, 0.0), nn.RReLU(), nn.PReLU(), nn.CELU(0.5))


@workload(DENSE)
def activations() -> Built:
    """Every activation in turn, with layers between."""
    layers: list[nn.Module] = [nn.Linear(12, 16)]
    for activation in (*ACTIVATIONS, *MORE):
        layers += [activation, nn.Linear(16, 16)]
    return Loss(nn.Sequential(*layers, nn.GLU(), nn.Linear(8, CLASSES), nn.LogSoftmax(-1)), F.nll_loss), vectors


class Mixer(nn.Module):
    """MLP-Mixer: tokens and channels in turn (a fixed number of tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.tokens = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.channels = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x = self.patches(input).flatten(2).mT
        x = x + self.tokens(self.norms[0](x).mT).mT
        x = x + self.channels(self.norms[1](x))
        return self.head(self.norms[2](x).mean(1))


@workload(DENSE)
def mlp_mixer() -> Built:
    """Token mixing by linear layers over the transposed features."""
    return Loss(Mixer()), lambda batch, _: {"input": torch.randn(batch, 3, 32, 32), "target": labels(batch)}


class QLearning(nn.Module):
    """A target network without gradients, gathered action values."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)) for _ in range(2))

    def forward(self, state: torch.Tensor, action: torch.Tensor, reward: torch.Tensor, following: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        value = self.online(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.online(following).argmax(1, keepdim=True)
            wanted = reward + 0.99 * ~done * self.target(following).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(value, wanted)


@workload(REINFORCEMENT)
def double_dqn() -> Built:
    """Deep Q-learning."""
    return QLearning(), lambda batch, length: {
        **{name: torch.randn(batch * length, 6) for name in ("state", "following")},
        "action": labels(batch * length, classes=4),
        "reward": torch.randn(batch * length),
        "done": torch.rand(batch * length) < 0.2,
    }


class Ppo(nn.Module):
    """Clipped policy ratio, value loss, entropy; a categorical and a normal policy."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.logits, self.value = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 1)
        self.mean, self.log_deviation = nn.Linear(16, 2), nn.Parameter(torch.zeros(2))

    def forward(self, state: torch.Tensor, action: torch.Tensor, move: torch.Tensor, old: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        hidden = self.body(state).tanh()
        discrete = torch.distributions.Categorical(logits=self.logits(hidden))
        continuous = torch.distributions.Normal(self.mean(hidden), self.log_deviation.exp())
        advantage = (gain - gain.mean()) / (gain.std() + 1e-8)
        ratio = (discrete.log_prob(action) + continuous.log_prob(move).sum(-1) - old).exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        value = F.mse_loss(self.value(hidden).squeeze(-1), gain)
        return policy + 0.5 * value - 0.01 * (discrete.entropy().mean() + continuous.entropy().mean())


@workload(REINFORCEMENT)
def ppo() -> Built:
    """Proximal policy optimisation."""
    return Ppo(), lambda batch, length: {
        "state": torch.randn(batch * length, 6),
        "action": labels(batch * length, classes=4),
        "move": torch.randn(batch * length, 2),
        "old": torch.randn(batch * length) - 3.0,
        "gain": torch.randn(batch * length),
    }
