"""Convolutions amid permutations run with the channels last: eager's numbers and gradients, and no Transpose of a picture."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from behaviours.check import compiled, on_ort, same_gradients, same_tree, single_session
from default_device import ON_CPU, seeded
from torch import Tensor, nn

from ort_backend.lowering import registry, simplify
from ort_backend.lowering.kernels.channels_last import CONVOLUTION, CONVOLUTION_BACKWARD, to_first, to_last
from ort_backend.lowering.passes import channels_last

pytestmark = single_session


@pytest.fixture(name="written")
def _written(counted: Callable[..., list[int]]) -> list[int]:
    """How many nodes each run of the pass wrote anew."""
    return counted("put_channels_last", channels_last.put_channels_last, simplify)


class _Tokens(nn.Module):
    """A feed-forward layer with a depthwise convolution, as in SegFormer and PVT v2."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.filters = nn.Conv2d(64, 64, 3, padding=1, stride=stride, groups=64)

    def forward(self, tokens: Tensor) -> Tensor:
        images, length, _ = tokens.shape
        size = int(length**0.5)
        picture = self.up(tokens).transpose(1, 2).reshape(images, 64, size, size)
        return self.down(F.gelu(self.filters(picture).flatten(2).transpose(1, 2)))


class _Block(nn.Module):
    """ConvNeXt's: convolution, normalization, two linear layers or 1 x 1 convolutions, scale, residual."""

    def __init__(self, *, pointwise: bool) -> None:
        super().__init__()
        self.filters, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32)
        layer = functools.partial(nn.Conv2d, kernel_size=1) if pointwise else nn.Linear
        self.up, self.down = layer(32, 64), layer(64, 32)
        self.scale = nn.Parameter(torch.rand(32))
        self.pointwise = pointwise

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.filters(x).permute(0, 2, 3, 1))
        if self.pointwise:
            return x + self.down(F.gelu(self.up(rows.permute(0, 3, 1, 2)))) * self.scale.reshape(1, -1, 1, 1)
        return x + (self.down(F.gelu(self.up(rows))) * self.scale).permute(0, 3, 1, 2)


class _Stages(nn.Module):
    """Patches of a picture, blocks, patches of these, blocks, the mean over all pixels."""

    def __init__(self, *, pointwise: bool) -> None:
        super().__init__()
        self.stem, self.norm, self.down = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32), nn.Conv2d(32, 32, 2, 2, bias=False)
        self.blocks = nn.ModuleList(_Block(pointwise=pointwise) for _ in range(3))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](self.stem(x)))
        x = self.down(self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.head(self.blocks[2](x).mean((2, 3)))


class _Excited(nn.Module):
    """Channels weighted by their means, two halves of the channels taken apart and put together, between permutations."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.weights, self.out = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Conv2d(32, 32, 1), nn.Conv2d(64, 24, 1)

    def forward(self, rows: Tensor) -> Tensor:
        x = F.hardswish(self.filters(rows.permute(0, 3, 1, 2)))
        x = x * torch.sigmoid(self.weights(x.mean((2, 3), keepdim=True))) + x.sum(1, keepdim=True) * 0.1
        x = torch.cat([x[:, :16] * x[:, 16:], x[:, 8:24], torch.where(x > 0, x, 0.5)], 1)
        return self.out(x).permute(0, 2, 3, 1)


class _Sequences(nn.Module):
    """A convolutional module of speech models: (N, L, C) there and back around convolutions over (N, C, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.filters = nn.Conv1d(64, 128, 1), nn.Conv1d(64, 64, 15, padding=7, groups=64)
        self.norm, self.out, self.patches = nn.LayerNorm(64), nn.Conv1d(64, 64, 1, bias=False), nn.Conv1d(64, 32, 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.wide(x.transpose(1, 2)).chunk(2, 1)
        x = self.filters(value * gate.sigmoid()).transpose(1, 2)
        return self.patches(self.out(F.silu(self.norm(x)).transpose(1, 2))).transpose(1, 2)


class _Collected(nn.Module):
    """Pictures put beside one another, from nothing on: a vector without elements, as `torch.cat` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))

    def forward(self, rows: Tensor) -> Tensor:
        x, collected = rows.permute(0, 3, 1, 2), torch.empty(0, device=rows.device)
        for layer in self.layers:
            x = layer(x).tanh()
            collected = torch.cat([collected, x], 1)
        return collected.permute(0, 2, 3, 1)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tokens": (_Tokens, (4, 256, 16)),
    "tokens_with_a_stride": (functools.partial(_Tokens, stride=2), (16, 256, 16)),
    "blocks_of_linear_layers": (functools.partial(_Stages, pointwise=False), (2, 3, 64, 64)),
    "blocks_of_convolutions": (functools.partial(_Stages, pointwise=True), (2, 3, 64, 64)),
    "weighted_channels": (_Excited, (4, 32, 32, 32)),
    "sequences": (_Sequences, (4, 128, 64)),
    "collected": (_Collected, (2, 6, 6, 8)),
}


def _step(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    module.zero_grad()
    result = call(x)
    (result * torch.rand(result.shape, generator=seeded(2))).sum().backward()
    return result.detach(), x


@pytest.mark.parametrize("input_gradient", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_module(written: list[int], name: str, input_gradient: bool) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make()
    other = copy.deepcopy(module)
    x, y = (torch.randn(shape, generator=seeded(1)).requires_grad_(input_gradient) for _ in range(2))
    with on_ort(graphs=1):
        actual = _step(module, compiled(module), x)
    expected = _step(other, other, y)
    same_tree(actual[0], expected[0])
    same_gradients([*module.parameters(), x], [*other.parameters(), y], rtol=1e-3, atol=1e-4)
    assert actual[0].stride() == expected[0].stride()
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.parametrize("name", CASES)
def test_inference(written: list[int], name: str) -> None:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randn(shape)
    with torch.no_grad(), on_ort(graphs=1):
        same_tree(compiled(module)(x), module(x))
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.parametrize("name", ["tokens", "blocks_of_convolutions", "weighted_channels", "sequences"])
def test_any_number_of_images(written: list[int], name: str) -> None:
    make, (_, *shape) = CASES[name]
    torch.manual_seed(0)
    module = make()
    other = copy.deepcopy(module)
    # Of tokens there may be none, which PyTorch's kernels for CUDA take.
    of_none = [] if ON_CPU or name != "tokens" else ["aten::convolution", "aten::convolution_backward", "aten::sum.dim_IntList"]
    with on_ort(graphs=1, python_ops=of_none):
        call = compiled(module, dynamic=True)
        for images in (4, 3, 6):
            x, y = (torch.randn(images, *shape, generator=seeded(1)).requires_grad_() for _ in range(2))
            same_tree(_step(module, call, x)[0], _step(other, other, y)[0])
            same_gradients([*module.parameters(), x], [*other.parameters(), y], rtol=1e-3, atol=1e-4)
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.cpu_only(reason="the pass")
def test_no_picture_is_transposed(written: list[int]) -> None:
    graphs: list[ir.Model] = []
    options = {"onnx_passes": [lambda model: graphs.append(model) or model]}
    module = _Tokens()
    with on_ort(graphs=1):
        _step(module, torch.compile(module, backend="ort_training", options=options), torch.randn(4, 256, 16))
    (model,) = graphs
    assert (sum(written) > 0) == ON_CPU
    assert [len(node.inputs[0].shape) for node in model.graph if node.op_type == "Transpose"].count(4) == 0


def test_networks_without_permutations_stay(written: list[int]) -> None:
    """Batch normalization takes (N, C, H, W)."""
    module = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.BatchNorm2d(32), nn.ReLU()
    )
    with on_ort(graphs=1):
        _step(module, compiled(module), torch.randn(4, 3, 32, 32))
    assert not sum(written)


def test_a_lowering_of_the_users_is_used(written: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten.convolution.default
    registry.load()
    monkeypatch.setitem(registry._table, target, [*registry._table[target]])

    @registry.register(target, device=torch.get_default_device().type)
    def doubled(op, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):  # type: ignore[no-untyped-def]
        return op.Mul(op.Conv(input, weight, bias), op.CastLike(2.0, input))

    pixels = nn.Conv2d(8, 8, 1)
    x = torch.randn(2, 5, 5, 8)
    with torch.no_grad(), on_ort(graphs=1):
        same_tree(compiled(lambda x: pixels(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))(x), pixels(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1) * 2)
    assert not sum(written)


def test_what_is_read_elsewhere_too(written: list[int]) -> None:
    """The picture before it is permuted, and a mean of it, leave the graph in eager's order."""
    filters = nn.Conv2d(64, 64, 3, padding=1, groups=64)

    def read(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        picture = filters(rows.permute(0, 3, 1, 2)).relu()
        return picture, picture.permute(0, 2, 3, 1) * 2, picture.sum((0, 2, 3))

    x, y = (torch.randn(2, 16, 16, 64, generator=seeded(0)).requires_grad_() for _ in range(2))
    expected = read(y)
    with on_ort(graphs=1):
        actual = compiled(read)(x)
        for results in (actual, expected):
            sum(one.square().sum() for one in results).backward()
    same_tree(actual, expected)
    assert [one.stride() for one in actual] == [one.stride() for one in expected]
    same_gradients([x], [y], rtol=1e-3, atol=1e-4)
    assert (sum(written) > 0) == ON_CPU


def test_a_model_in_channels_last(written: list[int]) -> None:
    """Pictures come in and go out with the channels last."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=64), nn.GELU(), nn.Conv2d(64, 32, 1)).to(memory_format=torch.channels_last)
    other = copy.deepcopy(module)
    x, y = (torch.randn(4, 16, 16, 64, generator=seeded(0)).permute(0, 3, 1, 2).requires_grad_() for _ in range(2))
    with on_ort(graphs=1):
        actual = _step(module, compiled(module), x)[0]
    expected = _step(other, other, y)[0]
    same_tree(actual, expected)
    assert actual.stride() == expected.stride()
    same_gradients([*module.parameters(), x], [*other.parameters(), y], rtol=1e-3, atol=1e-4)
    assert (sum(written) > 0) == ON_CPU


@pytest.mark.parametrize(
    ("shape", "filters", "stride", "groups"),
    [
        ((2, 9, 9, 16), (16, 1, 3, 3), 1, 16),
        ((2, 9, 9, 16), (16, 1, 7, 7), 1, 16),
        ((2, 8, 8, 16), (32, 16, 3, 3), 2, 1),
        ((2, 20, 8), (8, 1, 5), 1, 8),
    ],
)
def test_the_operators(shape: tuple[int, ...], filters: tuple[int, ...], stride: int, groups: int) -> None:
    """What nodes call, and their fake values, beside PyTorch's operator on (N, C, ...)."""
    image, weight, bias = torch.randn(shape), torch.randn(filters), torch.randn(filters[0])
    dims, border = len(shape), [size // 2 for size in filters[2:]]
    settings = ([stride] * (dims - 2), border, [1] * (dims - 2))
    first = image.permute(to_first(dims)).contiguous()
    expected = torch.convolution(first, weight, bias, *settings, False, [0] * (dims - 2), groups)
    torch.testing.assert_close(CONVOLUTION(image, weight, bias, *settings, groups), expected.permute(to_last(dims)))
    gradient = torch.randn_like(expected)
    wanted = torch.ops.aten.convolution_backward(
        gradient, first, weight, [filters[0]], *settings, False, [0] * (dims - 2), groups, [True, True, True]
    )
    last = gradient.permute(to_last(dims)).contiguous()
    made = CONVOLUTION_BACKWARD(last, image, weight, [filters[0]], *settings, groups, [True, True, True])
    torch.testing.assert_close(made, (wanted[0].permute(to_last(dims)), *wanted[1:]), rtol=1e-4, atol=1e-4)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fakes = CONVOLUTION_BACKWARD(last, image, weight, [filters[0]], *settings, groups, [True, True, True])
    assert [one.shape for one in fakes] == [one.shape for one in made]
    some = CONVOLUTION_BACKWARD(last, image, weight, None, *settings, groups, [False, True, False])
    assert some[0] is None and some[2] is None
