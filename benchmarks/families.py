"""Families of operators, by name: what ONNX Runtime, ATen and inductor call the same kind of work."""

from __future__ import annotations

import re

# The first family of which a pattern is found in the name (lower case, without domain or namespace) has it.
_PATTERNS = {
    "attention": r"attention",
    "matrix products": r"gemm|matmul|^mm$|bmm|addmm|baddbmm|^linear|einsum|mkl_linear",
    "convolution": r"conv",
    "recurrent": r"lstm|gru|rnn",
    "embedding and indexing": r"embedding|gather|scatter|index|^take|onehot",
    "normalisation": r"norm(?!al_?$)|welford",
    "loss and softmax": r"softmax|nll_loss|crossentropy|cross_entropy|mse_loss",
    "pooling and resizing": r"pool|^resize$|upsample|interpolate",
    "in PyTorch": r"^(aten$|pythonop)",
    "reductions": r"^reduce|^sum|^mean|^amax|^amin|^max_|argmax|^prod|^any|^all$|cumsum|^var",
    "copies and layout": r"transpose|copy|^clone|^concat|^cat$|^split|slice|^pad|constant_pad|reshape|expand|tile|^identity|contiguous|^to$|cast|"
    r"^stack|unsqueeze|squeeze|flatten|permute|repeat|^yieldop|reorder",
    "sorting": r"sort|topk|unique",
    "fills": r"^fill|zero|constantofshape|^full|^empty|^ones|^arange|^range",
    "generated pointwise": r"cpp_fused|triton",
}

# ATen operators that move no data. ONNX Runtime's of the same names, Transpose for one, do.
_VIEWS = re.compile(
    "alias|as_strided|detach_?|diagonal|expand|expand_as|flatten|narrow|permute|reshape|_reshape_alias|select|slice|split|split_with_sizes|squeeze|t|transpose|"
    "unbind|unflatten|unfold|unsqueeze|view|view_as|_unsafe_view|empty|empty_like|empty_strided|resize_|result_type"
)

FAMILIES = (*_PATTERNS, "pointwise", "views and allocation")


def family(operator: str) -> str:
    """The family of an operator such as `FusedMatMul`, `aten::addmm` or `graph_0_cpp_fused_gelu_1`; pointwise if no other fits."""
    name = operator.rpartition(":")[2].lower()
    if "cpp_fused" in name or "triton" in name:  # named after all that is in it
        return "generated pointwise"
    if operator.startswith("aten::") and _VIEWS.fullmatch(name):
        return "views and allocation"
    return next((key for key, pattern in _PATTERNS.items() if re.search(pattern, name)), "pointwise")
