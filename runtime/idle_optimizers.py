"""Graph optimizers of ONNX Runtime that have nothing to do in a graph: each sorts all nodes anew, in a time that grows with their square.

ONNX Runtime keeps the nodes that may come next in a list, and looks for the place of each from its front (seen in the machine code of 1.19.2).
"""

from __future__ import annotations

import onnx_ir as ir

# What each looks for: a graph with none of these operators it leaves as it is. They are none that ONNX Runtime writes for another one.
_LOOKS_FOR = {
    "AttentionFusion": {"Softmax"},
    "BiasDropoutFusion": {"Dropout"},
    "BiasSoftmaxDropoutFusion": {"Dropout"},
    "BiasSoftmaxFusion": {"Softmax"},
    "BitmaskDropoutReplacement": {"Dropout", "BiasDropout"},
    "ConvActivationFusion": {"Conv"},
    "DoubleQDQPairsRemover": {"QuantizeLinear", "DequantizeLinear"},
    "DynamicQuantizeMatMulFusion": {"MatMulInteger", "MatMulIntegerToFloat"},
    "EmbedLayerNormFusion": {"Gather"},
    "FastGeluFusion": {"Tanh"},
    "GatherSliceToSplitFusion": {"Gather", "Slice"},
    "GatherToSliceFusion": {"Range"},
    "MatMulIntegerToFloatFusion": {"MatMulInteger"},
    "MatMulNBitsFusion": {"MatMulNBits"},
    "QDQFinalCleanupTransformer": {"QuantizeLinear", "DequantizeLinear"},
    "QuickGeluFusion": {"Sigmoid"},
    "SceLossGradBiasFusion": {"SoftmaxCrossEntropyLossInternalGrad"},
}


def idle_optimizers(model: ir.Model) -> list[str]:
    """Graph optimizers of ONNX Runtime that change nothing in this graph, by name.

    RocmBlasAltImpl marks the nodes behind a `YieldOp` for AMD's devices, in each round anew. By that ONNX Runtime takes the graph for changed, and
    runs all optimizers of its first level ten times, where two do (1.19.2: half of the time in which a session is made of a large graph).
    """
    there = {node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph)}
    return ["RocmBlasAltImpl", *(name for name, operators in _LOOKS_FOR.items() if there.isdisjoint(operators))]
