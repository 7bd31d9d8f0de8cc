"""The node of autograd's graph that a compiled forward has made, and what its backward returns to it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ort_backend.runtime.lazy_zeros import Kind, kind_of, zeros


def next_number() -> int:
    """The number of the next node that autograd makes on this thread (private; read in torch 2.13)."""
    return torch._C._autograd._get_sequence_nr()


def node_of(tensors: Sequence[Any], since: int) -> Any:
    """The node that tensors come from of which some are results of a compiled forward, themselves, as views, or written to them; None without one.

    Args:
        tensors: What the forward returned, and what it may have written to. A view of an input comes from whatever made the input, which may be
            another compiled forward.
        since: `next_number()` in front of the forward.
    """
    waiting = [one.grad_fn for one in reversed(tensors) if isinstance(one, torch.Tensor)]
    while waiting:
        node = waiting.pop()
        if node is None or node._sequence_nr() < since:
            continue
        if type(node).__name__ == "CompiledFunctionBackward":
            return node
        waiting.extend(source for source, _ in node.next_functions)
    return None


class Undefined(threading.local):
    """The tangents without a gradient of the backward that is about to run on this thread.

    Of the thread, not of a forward: under `torch.utils.checkpoint` a node's backward comes with what a later forward has saved.
    """

    tangents: frozenset[int] = frozenset()
    kinds: Sequence[Kind] = ()
    _seen: Sequence[Kind] = ()  # of the forward that ran last

    def see(self, results: Sequence[Any], places: Sequence[int]) -> None:
        """Shows the results of a forward that `watch` will be called for; `places`: for each tangent, the result that it belongs to."""
        tensors = [results[place] for place in places]
        self._seen = [kind_of(one) for one in tensors] if all(type(one) is torch.Tensor for one in tensors) else ()

    def watch(self, node: Any, places: Sequence[int], known: Sequence[Any]) -> None:
        """Has `node` tell, in front of each backward, and has autograd leave out the zeros that it makes for missing gradients.

        Args:
            node: The node.
            places: For each tangent, the result that it belongs to.
            known: What the program gave to the forward and got of it. Where a subclass of tensors is among it, zeros are made as ever.
        """
        kinds = self._seen if all(map(_is_plain, known)) else ()
        if kinds:
            node.set_materialize_grads(False)  # AOTAutograd hands on None (seen in torch 2.11, 2.13 and 2.14)

        def note(gradients: Sequence[Any]) -> None:
            self.tangents, self.kinds = frozenset(i for i, place in enumerate(places) if gradients[place] is None), kinds

        node.register_prehook(note)

    def take(self, tangents: list[Any], loose: Mapping[int, torch.Tensor]) -> frozenset[int]:
        """What was told, once.

        Args:
            tangents: Those of the backward that runs. In place, None becomes zeros.
            loose: What stands for some of them.
        """
        found, kinds = self.tangents, self.kinds
        self.tangents, self.kinds = frozenset(), ()
        if kinds:
            for i in found:
                tangents[i] = loose[i] if i in loose else zeros(kinds[i])
        return found


def _is_plain(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def without_gradient(depends_on: Sequence[frozenset[int]], undefined: frozenset[int]) -> set[int]:
    """Which arguments get None in the backward that runs on this thread: those whose gradients depend on undefined tangents only.

    Not so leaves with hooks, which get zeros: autograd calls hooks with what a node returns, None included, and few expect that. Eager PyTorch, where
    such a leaf is not reached, does not call them.
    """
    missing = {i for i, needs in enumerate(depends_on) if needs and needs <= undefined}
    node = torch._C._current_autograd_node() if missing else None
    needed = getattr(node, "needs_input_grad", ())  # of every argument, numbers included, which have no source
    if node is not None and len(needed) == len(depends_on):
        sources = [source for source, _ in node.next_functions if source is not None]
        leaves = ((i, getattr(source, "variable", None)) for i, source in zip(itertools.compress(itertools.count(), needed), sources))
        missing.difference_update([i for i, leaf in leaves if leaf is not None and leaf._backward_hooks])
    return missing
