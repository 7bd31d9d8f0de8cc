"""The lines that random programs are made of: templates over values a and b, a dimension d of a, its size n, and a place i in it.

In lines that write, c is the value that they write to, of which m is the first size.
"""

from __future__ import annotations

POINTWISE = """
torch.tanh({a}) | torch.sigmoid({a}) | F.gelu({a}) | F.gelu({a}, approximate="tanh") | F.relu({a}) | torch.exp({a}.clamp(max=2))
torch.log1p({a}.abs()) | torch.sqrt({a}.abs() + 0.1) | {a}.square() | -{a} | F.silu({a}) | F.softplus({a}) | torch.erf({a}) | torch.sin({a})
F.leaky_relu({a}, 0.1) | F.elu({a}) | F.hardtanh({a}) | {a}.abs() | torch.rsqrt({a}.square() + 0.5) | 1 / ({a}.square() + 1) | F.logsigmoid({a})
F.mish({a}) | F.hardswish({a}) | {a}.clamp(-0.7, 0.9) | {a} * 0.5 | 2 - {a} | {a} / 3 | {a}.pow(3) * 0.1 | torch.atan({a})
torch.expm1({a}.clamp(max=1)) | {a}.detach() * {a} | torch.nan_to_num({a}) | F.threshold({a}, 0.1, 0.0) | ({a} > 0).float() * {a} | {a}.sign() + {a}
torch.logit(torch.sigmoid({a}) * 0.8 + 0.1) | {a}.frac() + {a} | {a} + {b} | {a} - {b} | {a} * {b} | {a} / ({b}.abs() + 0.5)
torch.maximum({a}, {b}) | torch.where({a} > 0.1, {a}, {b}) | torch.atan2({a}, {b}.abs() + 0.3) | torch.lerp({a}, {b}, 0.3)
torch.addcmul({a}, {a}, {b}, value=0.5) | torch.hypot({a}, {b} + 3) | {a}.masked_fill({b} > 0.5, 0.0) | torch.logaddexp({a}, {b}) | {a} * ({b} > 0)
torch.copysign({a}, {b} + 5) | ({a} + {b}) * ({a} - {b}) | {a} - {b} * 0.1 + {a} * 0.2 | torch.fmax({a}, {b}) | {a} @ {b}.mT
"""

REDUCTIONS = """
{a}.sum({d}) | {a}.sum({d}, keepdim=True) | {a}.mean({d}) | {a}.mean({d}, keepdim=True) | {a}.amax({d}) | torch.logsumexp({a}, {d})
{a}.var({d}, unbiased=False) | ({a} + 0.01).norm(dim={d}) | torch.softmax({a}, {d}) | torch.log_softmax({a}, {d}) | {a}.cumsum({d})
{a}.sort({d})[0] | {a}.max({d})[0] | {a}.sum() | {a}.mean() | F.normalize({a}, dim={d}) | {a}.cummax({d})[0] | F.layer_norm({a}, {a}.shape[-1:])
F.rms_norm({a}, {a}.shape[-1:]) | {a} - {a}.mean({d}, keepdim=True) | {a} / ({a}.std({d}, keepdim=True, unbiased=False) + 0.1) | {a}.prod({d})
F.one_hot({a}.argmax({d}), {n}).float().movedim(-1, {d}) * {a} | F.glu({a}, {d}) | {a}.gather({d}, {a}.argsort({d})) | torch.logcumsumexp({a}, {d})
{a}.median({d})[0] | torch.diff({a}, dim={d}) | {a}.topk(2, {d})[0]
"""

MOVEMENTS = """
{a}.transpose({d}, 0) | {a}.flatten() | {a}.unsqueeze({d}) | {a}.flatten(0, 1) | {a}.squeeze() | {a}.narrow({d}, {i}, 1) | {a}.select({d}, {i})
{a}[None] | torch.cat([{a}, {a} * 2], {d}) | torch.stack([{a}, {a}.flip({d})], {d}) | {a}.flip({d}) | {a}.roll({i}, {d}) | {a}.chunk(2, {d})[-1]
{a}[..., ::2] | {a}[..., 1:] | {a}[:, None] | F.pad({a}, (1, 1)) | F.pad({a}, (1, -1, 0, 2)) | {a}.tril() | {a}.triu(1) | {a}.diagonal()
torch.diag_embed({a}) | {a}.index_select({d}, idx % {n}) | {a}[idx % {a}.shape[0]] | {a}.take_along_dim({a}.argsort({d}), {d})
{a}.repeat_interleave(2, {d}) | {a}.expand(2, *{a}.shape) | {a}.movedim({d}, 0) | {a}.reshape(2, -1) | {a}.mT | torch.rot90({a})
{a}.unbind({d})[{i}] | {a}.split({i} + 1, {d})[0] | torch.einsum("...i,...i->...", {a}, {a}) | {a}[..., [0, -1]]
torch.cat([{a}.flatten(), {b}.flatten()]) | torch.outer({a}.flatten()[:8], {b}.flatten()[-6:]) | torch.stack(list({a}.unbind({d})), {d})
torch.cdist({a}, {a})
"""

LAYERS = """
F.linear({a}, W({a})) | {a} @ W({a}) | F.dropout({a}, 0.3) | F.cosine_similarity({a}, {a}.flip(0), dim={d}) | torch.matmul({a}.mT, {a})
F.group_norm({a}, 1) | F.scaled_dot_product_attention({a}, {a}, {a}, is_causal=True) | F.scaled_dot_product_attention({a}, {a}, {a})
torch.softmax({a} @ {a}.mT / 3, -1) @ {a} | F.avg_pool1d({a}, 2) | F.max_pool1d({a}, 2) | F.max_pool2d({a}, 2) | F.avg_pool2d({a}, 3, 1, 1)
F.interpolate({a}, scale_factor=2.0) | F.adaptive_avg_pool1d({a}, 2) | F.instance_norm({a}) | torch.fft.rfft({a}).abs()
torch.fft.irfft(torch.fft.rfft({a}), n={a}.shape[-1]) | F.batch_norm({a}, None, None, training=True)
F.cross_entropy({a}.flatten(0, -2), {a}.flatten(0, -2).argmin(-1)) | F.mse_loss({a}, {a}.roll(1, 0)) | F.embedding(idx % {a}.shape[0], {a})
F.pixel_shuffle({a}, 2) | torch.cumprod(torch.sigmoid({a}) + 0.3, {d}) | torch.tensordot({a}, {a}, dims=([0], [0]))
F.pad({a}, (1, 1), mode="reflect") | F.unfold({a}, 2) | F.binary_cross_entropy_with_logits({a}, torch.sigmoid({a}.detach()))
{a} * torch.rand_like({a}) | torch.bernoulli(torch.sigmoid({a}.detach())) * {a}
"""

MIXED = """
{a}.double() | {a}.long() | {a}.int() | {a}.bool() | {a} > 0 | {a} != {b} | {a} <= {b} | torch.complex({a}, {a}.flip(-1)) | {a}.real | {a}.imag
{a}.abs() | {a}.conj() | torch.view_as_real({a}) | {a}.float() | {a} // 2 | {a} % 3 | {a} & {b} | torch.bitwise_or({a}, {b}) | ~{a} | {a}.sum(-1)
{a}.any(-1) | {a}.all(0) | {a}.cumsum(0) | {a}.argmax(-1) | {a}.argsort(-1) | {a} * {b} | {a} + {b} | {a} / 2 | {a} ** 2 | {a}.floor() | {a}.round()
{a}.type_as({b}) | torch.where({a}.bool(), {b}, 0) | {a}.clamp(0, 3) | {b}.masked_fill({a}.bool(), 1)
{b}[({a}.long() % {b}.shape[0]).flatten()[:5]] | torch.remainder({a}, 2.5) | torch.div({a}, 3, rounding_mode="floor")
{a}.mean(dtype=torch.float64) | {a}.count_nonzero(-1) | {a}[{a} > 0].sum() | {a}.nonzero().sum() | {a}.masked_select({a} > 0).mean()
torch.fft.fft({a}) | torch.fft.fft2({a}).abs() | {a}.double() @ {a}.double().mT | {a} @ {a}.mH | torch.full_like({a}, 2)
torch.arange({a}.shape[-1]) * {a} | torch.cat([{a}, {b}], -1)
torch.zeros_like({b}).scatter_reduce(0, ({a}.long() % {b}.shape[0]).abs(), {b}, "amax") | {a}.index_copy(0, idx[:1] % {a}.shape[0], {a}[:1] * 3)
torch.slice_scatter({a}, {a}[..., :1] * 2, -1, 0, 1) | torch.select_scatter({a}, {a}[0], 0, -1)
torch.bucketize({a}, torch.tensor([-1.0, 0.0, 1.0])) | {a}[..., None, :] - {a}[..., :, None] | {a}[idx % {a}.shape[0], idx % {a}.shape[1]]
{a}[:, idx % {a}.shape[1]] | {a}.logsumexp(-1) | {a}.nanmean(-1)
"""

COPIES = "{a}.clone() | ({a} * 1.0) | {a}.clone().transpose(0, -1)"

WRITES = """
{c}.add_({b}) | {c}.mul_(0.5) | {c}[..., 1:] = {c}[..., :-1] * 0.5 | {c}[{i}] = 0.25 | {c}[{i}] = {b} | {c}[:, 0] += 1 | {c}[{c} > 0.5] = 0.1
{c}.clamp_(-0.5, 0.5) | {c}.relu_() | {c}[idx % {m}] = {c}[idx % {m}] * 2 | {c}.index_add_(0, idx % {m}, {c}[idx % {m}]) | {c}[0].mul_({c}[-1])
{c}.masked_fill_({c} < -0.5, 0.3) | {c}.copy_({b}) | {c}.t_() | {c}.fill_diagonal_(0.5) | {c}.tanh_() | {c}[..., 0].zero_()
{c}.view(-1)[::2].mul_(3) | {c}.index_fill_(0, idx % {m}, 0.2) | {c}.sub_({b}.mean())
{c}.index_put_((idx % {m},), {c}[idx % {m}] * 0.5, accumulate=True) | {c}.addcmul_({c}, {c}, value=0.1) | {c}[1:].add_({c}[:-1]) | {c}.unsqueeze_(0)
"""

# Shapes of the three arguments.
SHAPES = (
    ((4, 6), (4, 6), (6,)),
    ((2, 3, 8), (3, 8), (8,)),
    ((2, 4, 6, 6), (4, 1, 1), (6,)),
    ((8, 8), (8,), (8, 1)),
    ((3, 5, 4), (3, 4, 5), (4,)),
    ((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8)),
    ((1, 16), (16, 1), ()),
    ((12,), (3, 4), (2, 3, 4)),
)


def templates(table: str) -> list[str]:
    """The templates of a table: they stand between bars with a space on either side."""
    return [one for line in table.strip().splitlines() for one in line.split(" | ")]
