"""A joint graph as two: what AOTAutograd's min-cut partition makes of it, for an ONNX Runtime without training kernels."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx
from torch._functorch import partitioners
from torch._functorch.compile_utils import rand_ops

from ort_backend.boundary import tangent_outputs
from ort_backend.lowering.fx_nodes import tangents_of, written_arguments
from ort_backend.lowering.passes.bare_biases import take_bare_biases
from ort_backend.lowering.passes.batched_rows import index_batches
from ort_backend.lowering.passes.cross_entropy import fuse_cross_entropy
from ort_backend.lowering.passes.known_masks import drop_known_masks
from ort_backend.lowering.passes.loop_rows import read_rows_at_their_source
from ort_backend.lowering.passes.recompute import delay, forget_averages, forget_averages_again, is_wanted, keep_draws, prefer_cheap
from ort_backend.lowering.passes.rotary_embeddings import fuse_rotary_embeddings
from ort_backend.lowering.passes.saved_views import lay_out, save_bases, save_copies
from ort_backend.lowering.passes.selected_gradients import mark_gradients
from ort_backend.lowering.passes.statistics import correct_statistics
from ort_backend.lowering.splitting.dependencies import await_tangents, note_runs
from ort_backend.lowering.splitting.partition import is_random
from ort_backend.target import OrtTarget


@dataclasses.dataclass(frozen=True)
class Halves:
    """A joint graph as a forward and a backward graph.

    Attributes:
        forward: What AOTAutograd is handed as forward.
        backward: Likewise.
        tangent_outputs: For each tangent, the result of the forward that it belongs to; None if that is not known.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    tangent_outputs: tuple[int, ...] | None


_LEAST_BUDGET = 1e-9


def split(joint: fx.GraphModule, joint_inputs: Any, num_fwd_outputs: int, rest: dict[str, Any], target: OrtTarget) -> Halves:
    """AOTAutograd's min-cut partition of a joint graph for `target`; `rest` is what else AOTAutograd hands to its partition function."""
    tangents = tangents_of(joint.graph)
    places = tangent_outputs(joint.graph, num_fwd_outputs, tangents)
    changing = {node.name for node in written_arguments(joint.graph, num_fwd_outputs)}
    note_runs(joint.graph)
    await_tangents(joint.graph)
    correct_statistics(joint.graph)
    read_rows_at_their_source(joint.graph)
    drop_known_masks(joint.graph)
    fuse_rotary_embeddings(joint.graph, target)
    take_bare_biases(joint.graph)
    index_batches(joint.graph)
    mark_gradients(joint.graph)
    asked = is_wanted(joint.graph)
    keep_draws(joint.graph)
    recomputes = asked or prefer_cheap(joint.graph, num_fwd_outputs)
    forget_averages(joint.graph)
    settings = torch._functorch.config
    # A budget of exactly 0 would keep nothing, draws neither.
    budget = max(settings.activation_memory_budget, _LEAST_BUDGET)
    with settings.patch(cse=settings.cse and not _has_draws_to_merge(joint.graph), activation_memory_budget=budget), _no_generator_states():
        forward, backward = min_cut_rematerialization_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
    forget_averages_again(forward, backward, num_fwd_outputs)
    save_bases(forward, backward, num_fwd_outputs)
    lay_out(forward, backward, num_fwd_outputs)
    save_copies(forward, num_fwd_outputs, changing)
    fuse_cross_entropy(backward.graph, half=False)
    if recomputes:
        delay(backward)
    return Halves(forward, backward, places)


@contextlib.contextmanager
def _no_generator_states() -> Iterator[None]:
    """Keeps the partitioner from running attention in checkpoints under a saved state of the generator: `keep_draws` leaves nothing that draws again.

    Attention is tagged as if it drew, whatever its dropout.
    """
    its_own = partitioners.has_recomputable_rng_ops  # read in torch 2.11 to 2.14
    partitioners.has_recomputable_rng_ops = lambda fx_g: False
    try:
        yield
    finally:
        partitioners.has_recomputable_rng_ops = its_own


def _has_draws_to_merge(graph: fx.Graph) -> bool:
    """Whether the partitioner would make one draw of two that are written alike: it knows most operators that draw, but not `exponential`."""
    return any(is_random(node) and getattr(node.target, "overloadpacket", None) not in rand_ops for node in graph.nodes)
