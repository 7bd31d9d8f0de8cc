"""What to expect of PyTorch's operator samples: gaps with their cause, tolerances, and what cannot be compared.

A name ending in a dot or a star stands for every operator that begins with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Operators that PyTorch runs inside the session (PythonOp), always; strict: one that stops to do so must go.
GAPS: dict[str, str] = {
    **dict.fromkeys(
        ("cumprod", "cummax", "cummin", "logcumsumexp", "prod"),
        "a running product or extreme has no ONNX operator (`prod`: its gradient)",
    ),
    **dict.fromkeys(
        ("digamma", "erfc", "erfinv", "i0", "igamma", "igammac", "lgamma", "nextafter", "frexp"),
        "a special function without an ONNX operator, or whose obvious formula has no correct digits in the tail",
    ),
    **dict.fromkeys(("mvlgamma.mvlgamma_p_1", "mvlgamma.mvlgamma_p_3", "mvlgamma.mvlgamma_p_5"), "lgamma"),
    **dict.fromkeys(
        ("unique", "unique_consecutive", "histc", "histogram", "histogramdd", "mode", "nanmedian", "hash_tensor", "nonzero_static"),
        "an order statistic or a histogram without an ONNX operator",
    ),
    **dict.fromkeys(("index_reduce.amax", "index_reduce.amin", "index_reduce.mean", "index_reduce.prod"), "not written; rare in training"),
    **dict.fromkeys(("_segment_reduce.lengths", "_segment_reduce.offsets"), "not written; rare in training"),
    **dict.fromkeys(("cdist", "nn.functional.pdist"), "not written: every p has a formula of its own"),
    **dict.fromkeys(("grid_sampler_2d", "grid_sampler_3d", "nn.functional.grid_sample"), "the gradient has no ONNX operator"),
    **dict.fromkeys(
        (
            "nn.functional.adaptive_avg_pool3d",
            "nn.functional.adaptive_max_pool1d",
            "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_max_pool3d",
        ),
        "windows of unequal sizes",
    ),
    "_batch_norm_with_update": "an operator of the exporter; training has _native_batch_norm_legit_functional",
    "_upsample_bilinear2d_aa": "antialiased resizing has no gradient in ONNX",
    "as_strided_copy": "an operator of functionalisation that training does not show",
    "narrow_copy": "likewise",
    "unbind_copy": "likewise",
    "nn.functional.bilinear": "_trilinear has no ONNX operator",
    "nn.functional.embedding_bag": "not written: ONNX Runtime crashes on torch_lib's",
    "nn.functional.linear_cross_entropy.chunked_none": "a composite that PyTorch keeps whole for its memory",
    "norm.nuc": "singular values have no ONNX operator",
}

# Likewise, but some samples run on ONNX Runtime: seen with enough samples only.
RARE_GAPS: dict[str, str] = {
    **dict.fromkeys(
        ("nn.functional.avg_pool1d", "nn.functional.avg_pool2d", "nn.functional.avg_pool3d"), "ceil_mode: ONNX Runtime divides by another number"
    ),
    **dict.fromkeys(("nonzero", "argwhere"), "of a scalar"),
    "nn.functional.interpolate.area": "adaptive_avg_pool3d",
    "index_fill": "a check of the gradient for equal indices: _unique",
    "searchsorted": "searchsorted.Scalar",
    "repeat_interleave": "repeats that are a tensor",
    "nn.functional.linear_cross_entropy.chunked": "a composite that PyTorch keeps whole for its memory",
}

# Families that PythonOp runs in part or as a whole; their results are compared with ORT_TRAINING_OPINFO=all.
PYTHON_FAMILIES = (
    "linalg.",
    "special.",
    "fft.",
    "masked.",
    "cholesky*",
    "lu*",
    "svd",
    "qr",
    "pinverse",
    "logdet",
    "matrix_exp",
    "polygamma*",
    "signal.",
)

# Nothing to compare: random, uninitialised, data-dependent for Dynamo, or not a function of tensors.
NOT_COMPARABLE: tuple[str, ...] = (
    # Random: tests/test_random.py compares the streams.
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal*", "rand*", "uniform", "nn.functional.dropout*"),
    *(
        "nn.functional.alpha_dropout",
        "nn.functional.feature_alpha_dropout*",
        "nn.functional.fractional_*",
        "nn.functional.rrelu",
        "svd_lowrank",
        "pca_lowrank",
    ),
    *("nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention", "linalg.lu_*", "linalg.ldl_*"),
    # Uninitialised memory.
    *("empty*", "new_empty*"),
    # Dynamo breaks the graph, or refuses.
    *(
        "item",
        "allclose",
        "equal",
        "corrcoef",
        "cov",
        "combinations",
        "resize_",
        "resize_as_",
        "nn.functional.ctc_loss",
        "nn.functional.gaussian_nll_loss",
    ),
    *(
        "isclose",
        "tensor_split",
        "to_sparse",
        "sparse.",
        "torch.ops.",
        "_refs*",
        "jiterator*",
        "as_strided.partial_views",
        "ormqr",
        "geqrf",
        "triangular_solve",
    ),
    # Complex numbers stay with PyTorch.
    *(
        "view_as_complex",
        "view_as_real",
        "complex",
        "polar",
        "angle",
        "real",
        "imag",
        "conj*",
        "resolve_*",
        "chalf",
        "cdouble",
        "cfloat",
        "stft",
        "istft",
    ),
    "isreal",
    # No tensor operation.
    "broadcast_shapes",
    "nn.functional.scaled_mm*",
)

# With ORT_TRAINING_OPINFO=all only: names of the same operator twice, operators that training does not use, slow ones.
NOT_IN_CI: tuple[str, ...] = (
    *PYTHON_FAMILIES,
    *(
        "__r*",
        "atleast_*",
        "*_copy",
        "hsplit",
        "vsplit",
        "dsplit",
        "hstack",
        "vstack",
        "dstack",
        "column_stack",
        "unsafe_*",
        "cartesian_prod",
        "block_diag",
    ),
    *(
        "byte",
        "char",
        "short",
        "int",
        "double",
        "bfloat16",
        "argwhere",
        "histc",
        "sinc",
        "trapezoid",
        "trapz",
        "cumulative_trapezoid",
        "gradient",
        "kron",
    ),
    *("nn.functional.interpolate.*", "nn.functional.upsample_*", "nn.functional.conv3d", "nn.functional.conv_transpose3d", "scatter_reduce.prod"),
    *("nn.functional.max_unpool*", "nn.functional.linear_cross_entropy*", "nn.functional.pairwise_distance", "nn.functional.cosine_similarity"),
    *(
        "deg2rad",
        "rad2deg",
        "heaviside",
        "float_power",
        "count_nonzero",
        "vander",
        "rot90",
        "quantile",
        "nanquantile",
        "nansum",
        "nanmean",
        "var_mean*",
        "std_mean*",
    ),
    *(
        "logical_xor",
        "bitwise_xor",
        "bitwise_left_shift",
        "bitwise_right_shift",
        "gcd",
        "lcm",
        "swapaxes",
        "swapdims",
        "aminmax",
        "msort",
        "isposinf",
        "isneginf",
    ),
    *("renorm", "tensordot", "inner", "chain_matmul", "cross", "diff", "positive", "fmax", "fmin", "ldexp", "dist", "digamma", "resolve_neg"),
)

# Zero-sized tensors that ONNX Runtime's kernels or optimiser fail on (1.19.2).
WITHOUT_EMPTY: dict[str, str] = {
    "nn.functional.softshrink": "the optimiser loses an output that adds an empty constant",
    **dict.fromkeys(("native_layer_norm", "nn.functional.layer_norm"), "LayerNormalizationGrad refuses them"),
    **dict.fromkeys(("native_group_norm", "nn.functional.group_norm"), "its Reshape cannot infer a size"),
    "nn.functional.adaptive_avg_pool1d": "MatMul refuses them",
}


TOLERANCES: dict[str, dict[torch.dtype, tuple[float, float]]] = {
    "nn.functional.conv2d": {torch.float32: (1e-3, 1e-3)},
    # Functions of integers are float32.
    **{name: {torch.int64: (1e-4, 1e-4)} for name in ("exp", "sqrt", "rsqrt", "div.no_rounding_mode")},
}

_HALVES = (torch.float16, torch.bfloat16)
# Beside float32.
OTHER_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    **dict.fromkeys(("add", "mul", "sum", "where", "cat", "gather", "masked_fill", "expand", "slice"), (*_HALVES, torch.int64, torch.bool)),
    **dict.fromkeys(("sub", "maximum", "clamp", "cumsum", "floor_divide", "remainder", "amax", "argmax"), (torch.int64, torch.float64)),
    **dict.fromkeys(("mean", "softmax", "nn.functional.gelu", "nn.functional.embedding", "addmm", "bmm", "exp", "div.no_rounding_mode"), _HALVES),
    **dict.fromkeys(("logical_and", "bitwise_and", "bitwise_not", "any", "all", "eq"), (torch.int64, torch.bool)),
    "index_put": (*_HALVES, torch.int64),
    **dict.fromkeys(("mm", "std", "nn.functional.layer_norm", "index_add", "scatter_add"), (torch.float64,)),
}


def family_of(name: str, families: Iterable[str]) -> str | None:
    """The entry of `families` that `name` belongs to."""
    for family in families:
        if name == family or (family.endswith(".") and name.startswith(family)):
            return family
        if family.endswith("*") and name.startswith(family[:-1]) or family.startswith("*") and name.endswith(family[1:]):
            return family
    return None
