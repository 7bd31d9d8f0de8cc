"""LayerNormalization where ONNX Runtime's CPU kernel cancels: the mean taken off in front of it, which changes nothing else.

Up to some version (1.19.2 does, 1.31.1 does not) the kernel takes the variance as the mean of the squares less the square of the mean. That is
rounding error where numbers are nearly equal; it can be below `-epsilon`, and the result NaN. A mean of ten deviations costs two digits of seven.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from ort_backend.runtime.probe import result_of

# They make a LayerNormalization, or a node with the same formula, behind `take_means_off`.
FUSIONS = ("LayerNormFusion", "SkipLayerNormFusion")

# A mean of ten thousand deviations; what is left when it is taken off is one of them, up or down.
_NUMBERS = np.array([[1000.6, 1000.8] * 32], np.float32)


@functools.cache
def cancels() -> bool:
    """Whether this ONNX Runtime's kernel does; asked once in a process, by running it."""
    result = result_of("LayerNormalization", _NUMBERS, [np.ones(_NUMBERS.shape[1], np.float32)])
    return not bool((np.abs(np.abs(result) - 1) < 0.01).all())  # false for NaN, too


def take_means_off(model: ir.Model) -> None:
    """Writes, in place, `LayerNormalization(x - mean(x))` where the model has `LayerNormalization(x)`; its second result is still that mean."""
    for node in [node for node in model.graph if node.op_type == "LayerNormalization" and not node.domain]:
        x, axis = node.inputs[0], node.attributes.get_int("axis", -1)
        if x is None or (axis >= 0 and x.shape is None):
            continue
        axes = range(axis - x.shape.rank() if axis >= 0 else axis, 0)  # type: ignore[union-attr]
        where = ir.node("Constant", [], {"value": ir.tensor(np.array(axes, np.int64))}, name=f"{node.name}_axes")
        mean = ir.node("ReduceMean", [x, where.outputs[0]], name=f"{node.name}_mean")
        centred = ir.node("Sub", [x, mean.outputs[0]], name=f"{node.name}_centred")
        for made in (mean, centred):
            made.outputs[0].type = x.type
            made.metadata_props.update(node.metadata_props)
        centred.outputs[0].shape = x.shape
        if len(node.outputs) > 1:
            node.outputs[1].replace_all_uses_with(mean.outputs[0], replace_graph_outputs=True)
        model.graph.insert_before(node, [where, mean, centred])
        node.replace_input_with(0, centred.outputs[0])
