"""What is changed in Dynamo's graph before anything else."""

from __future__ import annotations

from torch import fx

from ort_backend.eager_graph import copied
from ort_backend.lowering.passes.fixed_epsilons import fix_epsilons
from ort_backend.lowering.passes.grouped_queries import group_queries
from ort_backend.lowering.passes.traced_masks import drop_traced_masks
from ort_backend.lowering.passes.written_activations import fold_activations
from ort_backend.lowering.passes.written_attention import fold_attention, has_long_softmax
from ort_backend.lowering.tracing.contiguous_draws import draw_contiguous
from ort_backend.lowering.tracing.nested_regions import inline_regions


def simplify(gm: fx.GraphModule) -> fx.GraphModule:
    """Writes nested regions out, takes masks and repetitions from attention that needs none, compiles epsilons in, and makes one operator of
    each activation, and of each attention, that is written out; in place.

    Returns:
        The graph for eager PyTorch: with attention as it is written, since its one operator has no derivative in forward mode.

    Raises:
        LoweringError: this version of PyTorch has regions and no pass that inlines them.
    """
    inline_regions(gm)
    fix_epsilons(gm)
    draw_contiguous(gm)
    fold_activations(gm)
    eager = gm
    if has_long_softmax(gm):
        eager = copied(gm)
        fold_attention(gm)
    drop_traced_masks(gm)
    group_queries(gm)
    return eager
