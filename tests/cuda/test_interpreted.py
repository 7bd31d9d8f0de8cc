"""The numbers of a program that is written for a device, from beginning to end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

_RESIDUAL = """
import copy, torch
from transformers import ResNetConfig, ResNetForImageClassification
from tests.cuda.interpreter import Program

torch.manual_seed(0)
sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 48], "depths": [2, 2, 2], "num_labels": 5}
model = ResNetForImageClassification(ResNetConfig(num_channels=3, layer_type="bottleneck", **sizes)).train()
batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([1, 3])}
eager = copy.deepcopy(model)
loss = eager(**batch).loss
loss.backward()
program = Program(copy.deepcopy(model), batch, {"Conv", "ConvTranspose", "ConvGrad", "BatchNormalization"}, normalizes=True)
results = program.run([torch.ones(()), torch.zeros(2, 5)])
close = lambda one, other: one.shape == other.shape and torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-4 * float(other.abs().max()))
wanted = [*(parameter.grad for parameter in eager.parameters()), *eager.buffers(), loss.detach()]
print(len(wanted), sum(any(close(one, other) for one in results) for other in wanted), len(program.calls), len(program.graph))
"""


def test_a_residual_network(over_stand_in: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    wanted, found, calls, nodes = map(int, over_stand_in(_RESIDUAL).stdout.split())
    assert found == wanted
    assert calls < 16 and nodes < 80  # what lies between calls of PyTorch is a part of them
