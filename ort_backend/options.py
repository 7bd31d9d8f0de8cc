"""The options of `torch.compile(..., backend="ort_training", options={...})`: each is declared once, here."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ort_backend.errors import OptionError

OPSETS = range(18, 22)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Settings of one compiled model.

    Attributes:
        provider: ONNX Runtime execution provider, such as `"CPUExecutionProvider"`. None follows the tensors: CPU tensors run
            on the CPU provider, CUDA tensors on the CUDA provider.
        provider_options: Options of that provider, as `onnxruntime.InferenceSession(provider_options=[...])` takes them.
        session_options: Attributes of `onnxruntime.SessionOptions` by name (`{"intra_op_num_threads": 4}`); a name with a dot is a
            session configuration entry (`{"session.intra_op.allow_spinning": "1"}`). `"custom_op_libraries"` is a list of paths of shared
            libraries with operators for ONNX Runtime, which a lowering of yours may then write.
        opset: ONNX operator set of the generated graphs, 18 to 21.
        autograd_functions: What a `torch.autograd.Function` becomes. `"opaque"`: one node whose forward and backward run the user's own
            Python, whatever it does. `"inline"`: the operators that its forward and backward consist of, where they can be traced, which is
            the fast way for small pointwise Functions; where they cannot, the graph breaks.
        fx_passes: Functions that AOTAutograd's graph goes through before it is lowered, in this order: the joint graph of forward and backward,
            or the graph of a forward alone. Each takes an `fx.GraphModule` of ATen operators and changes it in place, or returns another one.
            Placeholders and results (their number, dtypes and shapes) must stay; dtypes and shapes of new nodes (`meta["val"]`) are worked out.
        onnx_passes: Functions that the ONNX graph goes through before the session is made, in this order. Each takes an `onnx_ir.Model` and
            changes it in place, or returns another one. Inputs, outputs and the node `YieldOp`, at which the forward ends, must stay.
        kernels: `"measured"`: an operator that both ONNX Runtime and PyTorch have a kernel for runs on the faster one, by a table of
            measurements (`lowering/kernels/kernel_table.py`; large tensors only). `"onnxruntime"`: always on ONNX Runtime's; so with `strict`.
        cuda_graphs: Capture the kernels of each session's run as a CUDA graph and replay it from then on, where sizes are fixed; also
            `mode="reduce-overhead"`. Forward and backward are sessions of their own then, and what has no kernel runs in PyTorch between them.
            On the CPU there is nothing to capture.
        strict: If true, an operator that would run outside ONNX Runtime's own kernels (as a `PythonOp`) is an error.
        verify: Compare the first `verify` calls of every graph, outputs and gradients, with eager PyTorch, and raise
            `VerificationError` naming the first that differs.
        dump_dir: Directory that gets, for every graph, the FX text, the `.onnx` files before and after ONNX Runtime's
            optimiser, and a runnable repro script. None writes nothing.
        guard_log: File to which a JSON line is appended for every compile; `python -m ort_backend.guards FILE` reads it. Under
            `torch.distributed` each rank writes a file of its own.
    """

    provider: str | None = None
    provider_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    session_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    opset: int = 18
    autograd_functions: str = "opaque"
    fx_passes: Sequence[Callable[..., Any]] = ()
    onnx_passes: Sequence[Callable[..., Any]] = ()
    kernels: str = "measured"
    cuda_graphs: bool = False
    strict: bool = False
    verify: int = 0
    dump_dir: str | None = None
    guard_log: str | None = None

    def __post_init__(self) -> None:
        _require(self.provider is None or isinstance(self.provider, str), "provider", self.provider, "a provider name or None")
        for name in ("provider_options", "session_options"):
            _require_names(name, getattr(self, name))
        if str(self.provider_options.get("enable_cuda_graph", 0)) not in ("0", "False"):
            raise OptionError("provider_options['enable_cuda_graph']: a captured session needs its memory to stay; say options={'cuda_graphs': True}")
        _require(_is_int(self.opset) and self.opset in OPSETS, "opset", self.opset, f"an int from {OPSETS[0]} to {OPSETS[-1]}")
        _require(self.autograd_functions in ("opaque", "inline"), "autograd_functions", self.autograd_functions, "'opaque' or 'inline'")
        for name in ("fx_passes", "onnx_passes"):
            _require_functions(name, getattr(self, name))
        _require_libraries(self.custom_op_libraries)
        _require(self.kernels in ("measured", "onnxruntime"), "kernels", self.kernels, "'measured' or 'onnxruntime'")
        _require(isinstance(self.cuda_graphs, bool), "cuda_graphs", self.cuda_graphs, "True or False")
        _require(isinstance(self.strict, bool), "strict", self.strict, "True or False")
        _require(_is_int(self.verify) and self.verify >= 0, "verify", self.verify, "a number of calls, 0 or more")
        for name in ("dump_dir", "guard_log"):
            given = getattr(self, name)
            _require(given is None or (isinstance(given, (str, os.PathLike)) and given != ""), name, given, "a path or None")

    @property
    def custom_op_libraries(self) -> tuple[str, ...]:
        """Paths of the shared libraries with operators of the user's, from `session_options`."""
        given = self.session_options.get("custom_op_libraries", ())
        _require(isinstance(given, (list, tuple)), "session_options", self.session_options, "such that 'custom_op_libraries' is a list of paths")
        return tuple(os.fspath(path) if isinstance(path, os.PathLike) else path for path in given)

    @property
    def threads(self) -> int | None:
        """How many threads `session_options` has a kernel run on, where 0 means one for each processor; None where it does not say."""
        given = self.session_options.get("intra_op_num_threads")
        return os.cpu_count() if given == 0 else given if _is_int(given) else None  # what else it is ONNX Runtime will refuse

    @classmethod
    def parse(cls, options: Mapping[str, Any] | CompileOptions | None) -> CompileOptions:
        """The options that `torch.compile` hands over, checked.

        Raises:
            OptionError: they are no dict, a name is unknown (with the nearest known one), or a value is not accepted.
        """
        if isinstance(options, CompileOptions):
            return options
        if not isinstance(options, (Mapping, type(None))):
            raise OptionError(f'options for backend="ort_training" must be a dict, such as {{"strict": True}}, or CompileOptions, not {options!r}')
        known = [field.name for field in dataclasses.fields(cls)]
        given: dict[str, Any] = {**options} if options else {}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                raise OptionError(f'unknown option {name!r} for backend="ort_training"; {hint}')
        return cls(**given)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_names(name: str, given: object) -> None:
    _require(isinstance(given, Mapping) and all(isinstance(key, str) for key in given), name, given, "a dict with names as its keys")


def _require_functions(name: str, given: object) -> None:
    _require(isinstance(given, (list, tuple)), name, given, "a list of functions")
    for one in given:  # type: ignore[attr-defined]
        if not callable(one):
            raise OptionError(f"option {name!r} has {one!r}, which cannot be called; each must be a function of the graph")


def _require_libraries(paths: Sequence[object]) -> None:
    for path in paths:
        if not isinstance(path, str) or not os.path.isfile(path):
            raise OptionError(f"session_options['custom_op_libraries'] has {path!r}, but there is no such file")


def _require(accepted: bool, name: str, value: object, wanted: str) -> None:
    if not accepted:
        raise OptionError(f"option {name!r} is {value!r}, but must be {wanted}")
