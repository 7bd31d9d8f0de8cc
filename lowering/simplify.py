"""The passes that come first in every graph."""

from __future__ import annotations

from torch import fx

from ort_backend.lowering.kernels.kernel_choice import faster_in_pytorch
from ort_backend.lowering.passes.bare_biases import take_bare_biases
from ort_backend.lowering.passes.batched_rows import index_batches
from ort_backend.lowering.passes.channels_last import put_channels_last
from ort_backend.lowering.passes.effects import mark_effects
from ort_backend.lowering.passes.gathered_parts import gather_parts
from ort_backend.lowering.passes.known_masks import drop_known_masks
from ort_backend.lowering.passes.linear_gradients import simplify_linear_gradients
from ort_backend.lowering.passes.loop_rows import read_rows_at_their_source
from ort_backend.lowering.passes.real_transforms import transform_back
from ort_backend.lowering.passes.relayouts import drop_relayouts
from ort_backend.lowering.passes.rotary_embeddings import fuse_rotary_embeddings
from ort_backend.lowering.passes.row_indices import index_rows
from ort_backend.lowering.passes.selected_gradients import mark_gradients, select_gradients
from ort_backend.lowering.passes.signed_zeros import settle_zeros
from ort_backend.lowering.passes.statistics import correct_statistics
from ort_backend.lowering.passes.strided_sums import add_blocks
from ort_backend.lowering.passes.widened_sums import keep_sums_wide
from ort_backend.target import OrtTarget


def simplify(graph: fx.Graph, target: OrtTarget, *, everywhere: bool = False) -> None:
    """Runs them, in place.

    Args:
        graph: A graph of AOTAutograd's, or the body of a loop.
        target: What it is lowered for.
        everywhere: Whether it may be a backward without its forward.
    """
    read_rows_at_their_source(graph)
    settle(graph)
    put_channels_last(graph, target)
    mark_gradients(graph, everywhere=everywhere)
    select_gradients(graph, lambda node: faster_in_pytorch(node, target) is not None)
    drop_known_masks(graph)
    fuse_rotary_embeddings(graph, target)
    take_bare_biases(graph)
    index_rows(graph)
    index_batches(graph)
    add_blocks(graph)
    gather_parts(graph)


def settle(graph: fx.Graph) -> None:
    """Runs those that come first whatever the graph is lowered for, in place."""
    mark_effects(graph)
    correct_statistics(graph)
    settle_zeros(graph)
    keep_sums_wide(graph)
    drop_relayouts(graph)
    transform_back(graph)
    simplify_linear_gradients(graph)
