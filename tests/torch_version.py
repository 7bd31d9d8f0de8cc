"""The torch under test, for what differs between versions (`tools/torch_versions.py` runs the tests under several)."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo

from ort_backend.environment import OLDEST

TORCH = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
LIMIT = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"  # of torch._dynamo.config; until 2.5
GUARDS_PARAMETERS = (2, 12)  # Dynamo compiles again when a parameter of a library module is frozen; 2.11 does not
# Before it, backend="eager" as well compiles again for each batch size of a cross entropy of probabilities, and for some sizes of what is pooled.
MORE_IS_SYMBOLIC = (2, 13)
FACTORS_ARE_SYMBOLIC = (2, 13)  # before it each learning rate of RMSprop's is compiled in; under aot_eager and inductor in 2.13 as well
DOUBLE_LOGSUMEXP = (2, 13)  # before it, traced graphs say float32 of the log-sum-exp of float64 attention; PyTorch's kernel gives float64
NEEDS_BACKEND = pytest.mark.skipif(OLDEST["torch"] > TORCH, reason=f"this torch is for guards alone: the backend needs {OLDEST['torch']}")
# backend="eager" crashes as well: torch 2.11.0 with four threads that compile at once, three times of three; none of the others does.
THREADS_CRASH = pytest.mark.skipif(TORCH == (2, 11), reason="torch 2.11 crashes when several threads compile at once, with any backend")
# Calls with fullgraph=True set a mode and put back what was there, one for all threads: where two calls cross, nothing behind a graph break is
# compiled in that process any more. With backend="aot_eager" as well.
FULLGRAPH_IS_GLOBAL = TORCH == (2, 11)
NARROW_COPIES_TRAIN = pytest.mark.skipif(TORCH == (2, 11), reason="narrow_copy has no gradient in torch 2.11, nor in eager PyTorch")
VIEWS_WITHOUT_GRADIENTS = pytest.mark.skipif(TORCH == (2, 11), reason="AOTAutograd of torch 2.11 cannot trace it, with any backend")
TELLS_ALIASES = (2, 13)  # before it PyTorch takes more of what a `scan` gives its backward for aliases, and refuses it, with aot_eager as well
CHECKS_ERRORS = (2, 13)  # in a compiled graph, of singular matrices for one: before it such operators have no effects there
TRACES_OTHER_QUANTILES = (2, 14)  # with aot_eager as well: eager's quantile then takes others of equal elements than the one that is traced
LEAVES_DUAL_TENSORS = (2, 14)  # Dynamo, with any backend: a function whose first call is in forward-mode differentiation stays in eager PyTorch
# Its inductor imports what generates code where a stand-in for that is looked for; a number that was fixed in the trace before is a symbol; and of
# writes to parts more are traced.
NEWER_TRACES = (2, 15)
LIMITS_DO_NOT_WRAP = (2, 15)  # in eager PyTorch, of unsigned integers; inductor wraps them still
