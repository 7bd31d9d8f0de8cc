"""How attention runs on the CPU: by whose kernels, in how many blocks, and what of it is kept for the backward, as measured."""

from __future__ import annotations

import math

import torch
from torch import fx

from ort_backend.lowering.fx_nodes import arguments_of
from ort_backend.lowering.symbolic import hint
from ort_backend.target import OrtTarget

aten = torch.ops.aten

ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Queries up to which blocks of rows on ONNX Runtime were measured.
_LONGEST = 4096


def long_attention(node: fx.Node, target: OrtTarget) -> str | None:
    """Why PyTorch's kernel runs attention, or its backward; None where ONNX Runtime's products and softmax do.

    ONNX Runtime's forward and backward hold the probabilities, queries x keys for each head, even where none are kept between them. Beyond 512
    queries that is too much memory; PyTorch's fused kernels hold none. Below, PyTorch is the faster one for narrow heads: a step of three layers
    with 8 heads took by PyTorch, of the time by ONNX Runtime, 16 wide at 64, 128, 192, 256 and 320 queries 1.09, 0.99, 0.90, 0.85, 0.74; 24 wide at
    128, 192, 256 1.01, 0.96, 0.91; 32 wide at 128, 192, 256, 320 1.00, 0.97, 0.95, 0.90; 48 wide at 256, 320, 384 0.91, 0.96, 0.96; causal 16 and 32
    wide at 512 1.10 and 1.05 (AMD EPYC of family 25, model 17). Steps of a BERT of 512 tokens and of a ViT of 577 with heads 64 wide took by both
    0.98 to 1.01 of eager's.

    In blocks of rows (`row_blocks`) ONNX Runtime holds the probabilities of one. Where MKL's products are slow it is the faster one then. Forward and
    backward, of PyTorch's time, which is eager's: 600, 1024, 2048 and 4096 queries 64 wide 0.65, 0.70, 0.70, 0.67, causal 0.64, 0.64, 0.70, 0.70; 768
    queries 8, 16, 32, 128 and 256 wide 0.64, 0.94, 0.71, 0.58, 0.62, causal 0.53, 0.81, 0.69, 0.48, 0.49; in bfloat16, with instructions for it,
    0.85, causal 0.78; in float16 0.1; in float64 1.6 and 1.4; 1024 queries of a symbolic number 0.75, causal 0.67 (AMD EPYC of family 26).

    Where they are not, PyTorch's is the faster one: 600, 1024, 2048 and 4096 queries 64 wide took in blocks 0.90, 1.14, 1.15, 1.13 of its time,
    causal 0.81, 0.98, 1.13, 1.17, 768 queries 16 to 256 wide 1.00 to 1.14, causal 0.87 to 0.94, 1024 in bfloat16 1.36 and 1.20. But heads 8 wide took
    0.62, 0.69, 0.78, 0.77 (causal 0.48, 0.61, 0.77, 0.79), and float16 0.12 to 0.26 for heads 16 to 128 wide (family 25, model 17).

    On a processor of Intel's, whose exponentials PyTorch computes 16 at once, steps of two layers took by PyTorch, of the time by ONNX Runtime, at
    64, 128, 256 and 384 queries: with heads 16 wide 0.90, 0.80, 0.70, 0.67; 32 wide 0.99, 0.91, 0.83, 0.78, causal 0.94, 0.80, 0.71; 64 wide 1.01,
    1.00, 0.97, 0.91, causal 1.00, 0.96, 0.98 (Intel Xeon of family 6, model 207).
    """
    given = arguments_of(node)
    query, key = given["query"].meta["val"], given["key"].meta["val"]
    length, keys, width = (one if isinstance(one, int) else one.node.hint for one in (query.shape[-2], key.shape[-2], query.shape[-1]))
    if length is None or keys is None:
        return None
    is_tiny, is_narrow = width is not None and width < 16, width is not None and width < 64
    is_slow = query.dtype is torch.float16 or (is_tiny and not (query.dtype is torch.bfloat16 and target.bfloat16_products))
    in_blocks = (target.slow_mkl or (is_slow and not target.mkl)) and query.dtype is not torch.float64
    if query.dtype is torch.float32 and length <= 512:
        if target.mkl:
            least = 64 if is_narrow else 128 if given["is_causal"] else 256
        else:
            least = min(8 * width, 256) if is_narrow and not (in_blocks or is_tiny or given["is_causal"]) else 513
        return "PyTorch's kernel is faster at this size on this processor" if min(length, keys) >= least else None
    return f"{length} x {keys} probabilities are too many to keep" if length > (_LONGEST if in_blocks else 512) else None


def few_probabilities(length: int | torch.SymInt, keys: int | torch.SymInt, width: int) -> bool:
    """Whether attention of `length` queries to `keys` keys, its heads `width` wide, keeps its probabilities for the backward.

    Else they are computed again.

    They are keys / width times as large as the queries (with all that belongs to it, a block of a transformer keeps some 17 tensors of that
    size), and what they save grows with the width. Steps in turns with and without them: 0.97 to 0.92 of the time for 256 keys and a width of 64
    (gpt-medium), 0.95 for 128 (gpt), 0.96 for 197 (vit), 0.93 for 64 keys and a width of 32 (gpt-tiny), no less for 128 (bert).
    """
    return hint(length) <= 512 and 16 * hint(keys) <= width * width


def row_blocks(length: int, keys: int, is_causal: bool) -> int:
    """Blocks of rows in which attention runs on ONNX Runtime.

    The queries of a block of a causal attention see the keys up to its end, so that of two blocks a quarter of all products and of the softmax falls
    away, of four three eighths, against some copies. Forward and backward on ONNX Runtime, of the time in one block: in two 0.77 for 256 queries 64
    wide (24 heads of a batch), 0.86 for 128 (32 heads), 0.92 (12 heads), 0.98 for 64 queries 32 wide; for 512 queries 0.77, in four 0.69; for 256 in
    four 0.75, for 128 in four 0.90. A step of three layers with 8 heads, causal, took in four, of its time in two, at 256, 320, 384 and 448 queries
    0.93, 0.90, 0.90, 0.88 with heads 16 wide, 1.01, 0.96, 0.94, 0.94 32 wide, 1.00, 0.99, 1.00, 1.00 64 wide (AMD EPYC of family 25, model 17).

    Of more than 512 queries a block has 256 rows, or, of fewer than 1024 keys, as many probabilities as 256 x 1024; one takes the memory of another.
    A step of attention of 1024 queries to as many keys (24 heads 64 wide) took 204 ms in one block and 200 to 209 in two, four or eight, and 455,
    295, 200 and 165 MB more than eager's step (family 26).

    Args:
        length: Queries, or an example of their number.
        keys: As many, where it is causal.
        is_causal: Whether a query sees the keys up to its own place alone.

    Returns:
        How many, 1 for all rows at once.
    """
    count = 1 if length <= 512 else math.ceil(length * min(keys, 1024) / (256 * 1024))
    return max(count, 1 if not is_causal or length < 128 else 2 if length < 320 else 4)


def bounds_scores(target: OrtTarget) -> bool:
    """Whether masked scores are kept from exponentials too small for a normal number: on a processor of Intel's.

    ONNX Runtime's Softmax of 8 x 4 x 128 x 128 scores takes 1.9 ms there with one half of them masked, else 0.3 (Intel Xeon of family 6, model 207);
    what bounds them and takes out the masked ones again takes 0.4. A step of a GPT took 0.96 to 0.99 of its time.
    """
    return target.mkl
