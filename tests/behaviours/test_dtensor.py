"""`DTensor`s in and out of compiled code, over one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from behaviours.check import compiled, on_ort
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """One for all: with a second mesh that equals the first, every backend fails (torch 2.13: `Node tangents_2 was invalid, but is output`)."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path_factory.mktemp('group')}/store", rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        dist.destroy_process_group()


FUNCTIONS: dict[str, Callable[[DTensor, DTensor], torch.Tensor]] = {
    "product": lambda x, w: x @ w,
    "several": lambda x, w: (x @ w).relu() + x.sin(),
    "local": lambda x, w: (x @ w).to_local() * 2,
    "gathered": lambda x, w: (x @ w).redistribute(placements=[Replicate()]).to_local().exp(),
}


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(mesh: DeviceMesh, name: str, verify: int) -> None:
    function = FUNCTIONS[name]
    values = torch.randn(4, 4), torch.randn(4, 4)
    found = []
    with on_ort(graphs=1, python_ops=None):
        for call in (compiled(function, options={"verify": verify}), function):
            x, w = (distribute_tensor(value.clone(), mesh, [Shard(0)]).requires_grad_() for value in values)
            result = call(x, w)
            (result.full_tensor() if isinstance(result, DTensor) else result).square().sum().backward()
            found.append([result, x.grad, w.grad])
    for own, expected in zip(*found, strict=True):
        assert type(own) is type(expected)
        if isinstance(own, DTensor) and isinstance(expected, DTensor):
            assert own.placements == expected.placements
            own, expected = own.to_local(), expected.to_local()
        torch.testing.assert_close(own, expected)
