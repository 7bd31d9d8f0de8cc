"""What to do about a cause of recompiles: one concrete remedy per kind, with the line of code to write."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence

import torch

from ort_backend.guards import recompiles


@dataclasses.dataclass(frozen=True)
class Remedy:
    """Advice in words, and the code that does it (empty where it is a matter of where existing code stands)."""

    text: str
    code: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Symptom:
    """What a remedy is chosen by.

    Attributes:
        kind: Kind of the failed guard.
        expression: What differs, as the caller writes it where that is known, else as the compiled function does.
        values: Values seen, in order, the first one the oldest graph's.
        count: Recompiles.
        line: The user's line that made Dynamo guard on it.
        guard: Dynamo's words.
    """

    kind: str
    expression: str
    values: tuple[str, ...]
    count: int
    line: str = ""
    guard: str = ""

    @property
    def tensor(self) -> str:
        """`batch["ids"]` of `batch["ids"].size(1)`."""
        return re.sub(r"\.(size|stride)\(\d+\)$|\.(dim|is_inference)\(\)$|\.(dtype|device|requires_grad)(\.index)?$", "", self.expression)

    @property
    def numbers(self) -> list[int]:
        """The values, where they are all whole numbers."""
        return [int(value) for value in self.values] if all(re.fullmatch(r"-?\d+", value) for value in self.values) else []


def remedy(symptom: Symptom) -> Remedy:
    """The remedy for a cause."""
    found = _REMEDIES.get(symptom.kind, _unknown)(symptom)
    unnamed = re.search(r"\b___stack\d+\b", symptom.expression)  # read in torch 2.13: `torch._dynamo.output_graph`, `resume_execution`
    if unnamed is None:
        return found
    text = f"{unnamed[0]} is Dynamo's name for what the calling line had computed where the graph was cut: without that graph break (see below) it is"
    return Remedy(f"{text} no argument. Else: {found.text}", "" if unnamed[0] in found.code else found.code)


def _shape(symptom: Symptom) -> Remedy:
    match = re.search(r"\.size\((\d+)\)$", symptom.expression)
    dim, numbers = match.group(1) if match else "0", symptom.numbers
    if "on a parameter" in symptom.guard:
        text = (
            "Models whose parameters differ in size go through one compiled def, as all library modules such as Sequential do: a graph for each "
            "model, and one recompile limit for all of them. To part them, "
        )
        if "isolate_recompiles" in inspect.signature(torch.compile).parameters:  # torch 2.13
            return Remedy(f"{text}compile each with isolate_recompiles=True.", "compile = functools.partial(torch.compile, isolate_recompiles=True)")
        return Remedy(f"{text}{_APART}.")
    if any(number in (0, 1) for number in numbers):
        return Remedy(_ZERO_ONE, "loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=True)")
    mark = f"torch._dynamo.mark_dynamic({symptom.tensor}, {dim})"
    if len(set(numbers)) < 3:
        return Remedy(
            "Dynamo takes a size for fixed until it has seen a second value. Say beforehand that this one varies, before the first call "
            "(dynamic=True in torch.compile says it of every size).",
            mark,
        )
    text = (
        "This size is compiled for again and again, although Dynamo makes a size dynamic by itself at its second value: it was told not to, by "
        "dynamic=False, mark_static or torch._dynamo.config.automatic_dynamic_shapes = False. Pass dynamic=True to torch.compile, or mark this size, "
        "before every call: one graph then serves all."
    )
    return Remedy(text + _buckets(symptom), mark)


_ZERO_ONE = (
    "Sizes 0 and 1 always get a graph of their own. Where it is the last, smaller batch of an epoch: leave it out with drop_last=True, or pad it to "
    "2 rows or more."
)


def _buckets(symptom: Symptom) -> str:
    """Padding, where there are enough values for it to pay: the smallest power of two with at most 4 buckets."""
    numbers = sorted({number for number in symptom.numbers if number > 1})
    if len(numbers) < 4:
        return ""
    step = 2 ** math.ceil(math.log2(max(2, (numbers[-1] - numbers[0]) / 3)))
    sizes = sorted({-(-number // step) * step for number in numbers})
    return f" If the sizes must stay fixed, pad to multiples of {step}: {len(sizes)} graphs ({', '.join(map(str, sizes))}) instead of {len(numbers)}."


def _shape_condition(symptom: Symptom) -> Remedy:
    condition = symptom.expression
    if re.match(r"2 <= ", condition):
        return Remedy(_ZERO_ONE, "loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size, drop_last=True)")
    where = f" at {symptom.line}" if symptom.line else ""
    match = re.search(r"([\w.\[\]\"']+)\.size\((\d+)\) % (\d+)", condition)
    if match:
        name, dim, multiple = match.groups()
        return Remedy(
            f"The code{where} needs a size that is a multiple of {multiple}, or takes another way for those that are not. "
            f"Pad to a multiple of {multiple}.",
            f"{name} = torch.cat([{name}, {name}.new_zeros([*{name}.shape[:{dim}], -{name}.size({dim}) % {multiple}, "
            f"*{name}.shape[{int(dim) + 1}:]])], {dim})",
        )
    return Remedy(
        f"The code{where} takes one way if {condition} and another if not, and each way is a graph. Decide outside the compiled function, "
        "pad so that it always goes one way, or write both ways as tensor operations (torch.where, torch.cond).",
    )


def _dtype(symptom: Symptom) -> Remedy:
    return Remedy(
        "Give it one dtype in all calls (for a parameter or buffer: convert the model before the first call).",
        f"{symptom.tensor} = {symptom.tensor}.to(torch.{symptom.values[0] if symptom.values else 'float32'})",
    )


def _device(symptom: Symptom) -> Remedy:
    device = symptom.values[0] if symptom.values else "cpu"
    return Remedy("Move it to one device before the call (a model: before the first call).", f'{symptom.tensor} = {symptom.tensor}.to("{device}")')


def _rank(symptom: Symptom) -> Remedy:
    dims = symptom.numbers
    code = f"{symptom.tensor} = {symptom.tensor}.unsqueeze(0)" if dims and dims[0] == dims[-1] + 1 else ""
    return Remedy(
        "Each number of dimensions is a graph. Bring it to one number of dimensions before the call: unsqueeze the smaller or flatten the larger.",
        code or f"{symptom.tensor} = {symptom.tensor}.flatten(0, 1)",
    )


def _requires_grad(symptom: Symptom) -> Remedy:
    if "on a parameter" in symptom.guard:
        return Remedy(
            "Every pattern of frozen and trained parameters is a graph. Set requires_grad before the first step and leave it. To freeze by turns, "
            "keep requires_grad on and leave the parameter out of the update instead.",
            f"{symptom.tensor}.grad = None  # before optimizer.step(), in place of requires_grad_(False)",
        )
    return Remedy(
        "A gradient for this input is wanted in some calls only: two graphs. If it is never used, detach; if it is, ask for it always.",
        f"{symptom.tensor} = {symptom.tensor}.detach()",
    )


def _grad_mode(symptom: Symptom) -> Remedy:
    if "is_inference" in symptom.expression:
        return Remedy(
            "A tensor made under torch.inference_mode() goes in some of the calls. Make it under torch.no_grad(), or copy it before the call.",
            f"{symptom.tensor} = {symptom.tensor}.clone()",
        )
    if symptom.count <= 1:
        return Remedy("One graph with gradients for training and one without for evaluation: as it should be, nothing to do.")
    return Remedy(
        "The function is called with gradients and without, in several forms. Use one of torch.no_grad(), torch.inference_mode() throughout.",
        "with torch.no_grad():",
    )


def _training(symptom: Symptom) -> Remedy:
    module = symptom.expression.removesuffix(".training")
    if symptom.count <= 1:
        return Remedy(
            "One graph for training and one for evaluation: as it should be, if both are meant to run. If not, call .eval() or .train() before "
            "the first call.",
            f"{module}.eval()",
        )
    return Remedy(
        "Modules change between training and evaluation one by one, and every combination is a graph. Change the whole model, and as seldom as "
        "can be.",
        f"{_root(module)}.train()  # or .eval(), on the whole model",
    )


def _python_value(symptom: Symptom) -> Remedy:
    name = symptom.expression
    if symptom.values and all(re.fullmatch(r"-?(\d+\.?\d*(e[+-]?\d+)?|inf|nan)", value) for value in symptom.values):
        also, on_module = "", re.fullmatch(r"\w+(\.\w+)+", name) is not None
        if recompiles.guards_attributes_by_identity() and on_module:
            return Remedy(
                "A number is compiled in, once per value. Keep it in a tensor, one and the same: this torch compiles again for another tensor.",
                f"{name}.fill_({symptom.values[-1]})  # and self.{name.rpartition('.')[2]} = torch.tensor({symptom.values[-1]}) in __init__",
            )
        if (
            "allow_unspec_int_on_nn_module" in symptom.guard
            or recompiles.has_setting("allow_unspec_int_on_nn_module")
            and on_module
            and symptom.numbers
        ):
            also = " For whole numbers on modules, torch._dynamo.config.allow_unspec_int_on_nn_module = True stops it too, after the second value."
        return Remedy(
            "A number is compiled in, once per value. Pass it as a tensor: its value is then data, as everything else." + also,
            f"{name} = torch.tensor({symptom.values[-1]})",
        )
    return Remedy(f"Every value has a graph of its own, {len(symptom.values)} so far. Keep one value during the training, or {_APART}.")


_APART = (
    "write one function per case, each a def of its own, compile each, and choose outside (Dynamo keeps its graphs by the def: functools.partial or "
    "compiling the same def twice does not part them; torch.compile(..., isolate_recompiles=True) does, from torch 2.13 on)"
)


def _closure(symptom: Symptom) -> Remedy:
    return Remedy(
        f"A function made anew with another value of {symptom.expression} goes in, or the value is changed. Make the function once, outside "
        "the loop, and pass the value as a tensor argument.",
        f"{symptom.expression} = torch.tensor({symptom.values[-1]})" if symptom.values and re.fullmatch(r"-?[\d.]+", symptom.values[-1]) else "",
    )


def _identity(symptom: Symptom) -> Remedy:
    return Remedy(
        f"Dynamo compiled for one particular object, and {symptom.expression} is another one now (a function, class or object made in the loop?). "
        "Make it once, before the loop, and pass the same object in every call."
    )


def _type(symptom: Symptom) -> Remedy:
    if "None" in symptom.values:
        other = next((value for value in symptom.values if value != "None"), "tensor")
        if not other.isidentifier():  # a value, not the name of a class
            return Remedy(
                f"It is None in some calls and {other} in others: a graph for each. If the model sets it in its first call, set it before that.",
                f"{symptom.expression} = {other}",
            )
        return Remedy(
            f"It is None in some calls and a {other} in others: a graph for each. Pass a neutral tensor (zeros, ones) in the place of None if one "
            "graph must do; two graphs cost two compiles, once.",
            f"{symptom.expression} = torch.zeros(()) if {symptom.expression} is None else {symptom.expression}",
        )
    return Remedy(f"Each type is a graph. Convert to one type before the call, or {_APART}.")


def _dict_keys(symptom: Symptom) -> Remedy:
    name = re.sub(r"\.keys\(\)$|^.* in ", "", symptom.expression)
    return Remedy(
        "Each set of keys, in its order, is a graph. Always pass the same keys in the same order, missing ones with a neutral tensor.",
        f"{name} = {{key: {name}.get(key, torch.zeros(())) for key in KEYS}}",
    )


def _length(symptom: Symptom) -> Remedy:
    name = re.sub(r"^len\((.*)\)$", r"\1", symptom.expression)
    return Remedy(
        "Each number of entries is a graph. Stack the entries into one tensor, whose size can be dynamic, or pad to one length.",
        f"{name} = torch.stack(tuple({name}))",
    )


def _attribute(symptom: Symptom) -> Remedy:
    return Remedy("The attribute appears or goes away between calls. Set it before the first call, in __init__.")


def _global_state(symptom: Symptom) -> Remedy:
    return Remedy(
        f"A setting of the whole process, {symptom.expression}, differs between calls. Set it once, before the first call; for autocast: put the "
        "with statement around all calls, or inside the compiled function."
    )


def _function_mode(symptom: Symptom) -> Remedy:
    return Remedy(
        'A "with torch.device(...)", torch.set_default_device() or another torch function mode is active in some of the calls. Have it on in all '
        "calls or in none: put the with statement around what makes the tensors, not around the compiled call."
    )


def _aliasing(symptom: Symptom) -> Remedy:
    name = symptom.expression.rpartition(" is ")[2]
    return Remedy("The same tensor is passed for two arguments in some calls. Pass a copy.", f"{name} = {name}.clone()")


def _layout(symptom: Symptom) -> Remedy:
    return Remedy("Each memory layout is a graph. Bring it to the plain layout before the call.", f"{symptom.tensor} = {symptom.tensor}.contiguous()")


def _deallocated(symptom: Symptom) -> Remedy:
    return Remedy("The module or object that the graph was compiled for has been freed, and its graph with it. Keep it, and use it again.")


def _unknown(symptom: Symptom) -> Remedy:
    words = f" Dynamo's words: {symptom.guard}" if symptom.guard else ' Dynamo gives no cause here; TORCH_LOGS="recompiles_verbose" may.'
    return Remedy("No remedy is known for this guard." + words)


def _root(expression: str) -> str:
    return re.split(r"[.\[]", expression, maxsplit=1)[0]


_REMEDIES: dict[str, Callable[[Symptom], Remedy]] = {
    "shape": _shape,
    "shape condition": _shape_condition,
    "dtype": _dtype,
    "device": _device,
    "rank": _rank,
    "requires_grad": _requires_grad,
    "grad mode": _grad_mode,
    "training flag": _training,
    "python value": _python_value,
    "closure value": _closure,
    "object identity": _identity,
    "type": _type,
    "dict keys": _dict_keys,
    "length": _length,
    "attribute": _attribute,
    "global state": _global_state,
    "torch function mode": _function_mode,
    "aliasing": _aliasing,
    "layout": _layout,
    "deallocated": _deallocated,
}


def limit_remedy(limit: str, value: int, cause: str) -> Remedy:
    """For a function on which Dynamo gave up."""
    return Remedy(
        f"Remove the cause ({cause}). If this many graphs are meant, raise the limit, before the first call.",
        f"torch._dynamo.config.{limit} = {max(16, 4 * value)}",
    )


def break_remedy(reasons: Sequence[str]) -> Remedy:
    """For graph breaks: the reason says what Dynamo could not trace."""
    if any("print" in reason or "logging" in reason for reason in reasons):
        return Remedy(
            "Print outside the compiled function, or let Dynamo move it behind the graph.",
            "torch._dynamo.config.reorderable_logging_functions.add(print)",
        )
    if any("item" in reason or "Tensor.tolist" in reason for reason in reasons):
        return Remedy("Keep the value in a tensor, or let Dynamo capture it.", "torch._dynamo.config.capture_scalar_outputs = True")
    if any("data-dependent" in reason.lower() or "Data-dependent" in reason for reason in reasons):
        return Remedy("Write the branch as tensor operations: torch.where or torch.cond.")
    return Remedy("torch.compile(..., fullgraph=True) makes a break an error and shows it in full.")
