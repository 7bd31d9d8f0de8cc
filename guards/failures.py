"""A failed guard as data: kind, source as the user writes it, the value before and now, the user's line."""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Mapping

import torch

from ort_backend.guards import recompiles
from ort_backend.guards.sources import Scope, passed_as, sized, user_source

# From "another graph altogether" to "the same graph but for this": where several graphs were tried, the failure that comes last
# here belongs to the graph that was closest to fitting. Dynamo checks guards in about this order and tells only the first that fails.
KINDS = (
    "unknown",
    "backend",
    "deallocated",
    "grad mode",
    "global state",
    "torch function mode",
    "type",
    "object identity",
    "dict keys",
    "length",
    "attribute",
    "training flag",
    "closure value",
    "python value",
    "rank",
    "dtype",
    "device",
    "requires_grad",
    "aliasing",
    "layout",
    "shape",
    "shape condition",
)

_DTYPES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64", "Int": "int32"}
_DTYPES |= {"Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardFailure:
    """Why one graph compiled before did not fit.

    Attributes:
        kind: One of `KINDS`.
        source: What differs, as it reads inside the compiled function: `batch["input_ids"].size(1)`.
        before: Its value when that graph was compiled.
        now: Its value that made the guard fail. Both are text, None where unknown.
        passed_as: The same thing as the caller of the compiled function writes it, if found: `model.scale`.
        line: The user's line that made Dynamo guard on it, if Dynamo tells.
        graph: Compile id of the graph that did not fit.
        guard: Dynamo's own words.
        met: Whether another graph of the function was compiled for the value that it has now: it alone needed no further graph.
    """

    kind: str
    source: str = ""
    before: str | None = None
    now: str | None = None
    passed_as: str | None = None
    line: str = ""
    graph: str | None = None
    guard: str = ""
    met: bool = False

    @property
    def title(self) -> str:
        """What failed, without its values; Dynamo's own words where they name nothing."""
        return f"{self.kind} of {self.source}" if self.source else f"{self.kind}: {self.guard}"

    def __str__(self) -> str:
        if self.before is None and self.now is None:
            return self.title
        return f"{self.kind} of {self.source}: {self.before if self.before is not None else '?'} -> {self.now if self.now is not None else '?'}"


def parse(reason: str, scope: Scope, before: Callable[[str | None, str], str | None] = lambda graph, name: None) -> GuardFailure:
    """Reads one of Dynamo's guard failure texts.

    Args:
        reason: As in `torch._dynamo.utils.guard_failures`.
        scope: Where the values are.
        before: `before(graph, name)` gives the value that the global setting `name` had when that graph was compiled.
    """
    head, _, stack_text = reason.partition("\nUser stack trace:\n")
    match = re.match(r"\s*(!?\d+(?:/\d+){0,2}): ", head)
    graph = match.group(1) if match else None
    text = re.sub(r"\bL\[\s*['\"](\w+)['\"]\s*\]", r"\1", head[match.end() :] if match else head)
    expression, comment = _split_comment(text)
    failure = _read(expression, scope, graph, before)
    source = failure.source
    return dataclasses.replace(
        failure,
        source=user_source(source, scope),
        passed_as=passed_as(source, scope),
        line=_stack_line(stack_text) or _comment_line(comment),
        graph=graph,
        guard=expression.strip()[:400],
    )


def primary(failures: tuple[GuardFailure, ...]) -> GuardFailure | None:
    """The failure that tells most: of the graph that was closest to fitting, and of equals the newest, which is the most general one.

    What another graph was compiled for (`GuardFailure.met`) comes last: that graph fits but for what it failed for itself.
    """
    return max(failures, key=lambda failure: (not failure.met, _closeness(failure.kind), _age(failure.graph)), default=None)


def _closeness(kind: str) -> int:
    return min(KINDS.index(kind), KINDS.index("rank"))  # what tensors are like, from the rank on, is one level


def _age(graph: str | None) -> int:
    number = (graph or "").rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def _split_comment(text: str) -> tuple[str, str]:
    match = re.search(r"\s{2,}# ", text)
    return (text[: match.start()], text[match.end() :]) if match else (text, "")


def _read(expression: str, scope: Scope, graph: str | None, before: Callable[[str | None, str], str | None]) -> GuardFailure:
    for pattern, build in _READERS:
        match = re.match(pattern, expression.strip(), re.DOTALL)
        if match:
            failure = build(match, scope)
            if failure.kind == "torch function mode":
                was, now = before(graph, "default_device"), recompiles.global_state().get("default_device")
                failure = dataclasses.replace(failure, before=was, now=now) if was != now else failure
            return failure
    match = re.match(r"GLOBAL_STATE changed: *(.*)", expression) or re.match(r"(___check_global_state\(\)|___is_grad_enabled\(\).*)", expression)
    if match:
        return _global_state(match.group(1).split(), graph, before)
    return GuardFailure(kind="unknown", guard=expression)


def _global_state(names: list[str], graph: str | None, before: Callable[[str | None, str], str | None]) -> GuardFailure:
    names = [name for name in names if not name.startswith("___")]
    state = recompiles.global_state()
    if names == ["autocast"]:  # 2.9 does not say which of its settings
        names = [name for name in state if name.startswith("autocast(") and before(graph, name) != state[name]] or names
    if "grad_mode" in names and len(names) == 1:
        now = "inference_mode" if state.get("inference_mode") == "True" else _GRAD_MODES.get(state.get("grad_mode", ""))
        was = before(graph, "grad_mode")
        return GuardFailure(kind="grad mode", source="torch.is_grad_enabled()", before=_GRAD_MODES.get(was or ""), now=now)
    old, new = [before(graph, name) for name in names], [state.get(name) for name in names]
    return GuardFailure(kind="global state", source=", ".join(names), before=_joined(old), now=_joined(new))


_GRAD_MODES = {"True": "enable_grad", "False": "no_grad"}


def _joined(values: list[str | None]) -> str | None:
    return None if any(value is None for value in values) or not values else ", ".join(str(value) for value in values)


def _tensor(kind: str, suffix: str) -> Callable[[re.Match[str], Scope], GuardFailure]:
    def build(match: re.Match[str], scope: Scope) -> GuardFailure:
        source, *index, was, now = match.groups()
        return GuardFailure(kind=kind, source=source + suffix.format(*index), before=was.rstrip("."), now=now.rstrip("."))

    return build


def _stride(match: re.Match[str], scope: Scope) -> GuardFailure:
    """A layout, unless this torch compares strides first and the tensor is contiguous: then the size that the stride follows from."""
    layout = _tensor("layout", ".stride({})")(match, scope)
    if not recompiles.compares_strides_first():
        return layout
    source, index, was, _ = match.groups()
    try:
        tensor, dim, before = scope.value(source), int(index), int(was)
        if not tensor.is_contiguous() or before <= 1:
            return layout
        later = ((other, tensor.size(other) * before, tensor.stride(dim)) for other in range(dim + 1, tensor.dim()))
        changed = [(other, size // stride) for other, size, stride in later if stride and size % stride == 0]
    except (LookupError, ValueError, AttributeError, IndexError, RuntimeError):
        return layout
    if len(changed) != 1:  # several sizes explain it
        return layout
    ((other, size),) = changed
    return GuardFailure(kind="shape", source=f"{source}.size({other})", before=str(size), now=str(tensor.size(other)))


def _dtype(match: re.Match[str], scope: Scope) -> GuardFailure:
    source, was, now = match.groups()
    return GuardFailure(kind="dtype", source=f"{source}.dtype", before=_DTYPES.get(was, was), now=_DTYPES.get(now, now))


def _requires_grad(match: re.Match[str], scope: Scope) -> GuardFailure:
    was = match.group(2) in ("1", "True", "true")
    return GuardFailure(kind="requires_grad", source=f"{match.group(1)}.requires_grad", before=str(was), now=str(not was))


def _dispatch_keys(match: re.Match[str], scope: Scope) -> GuardFailure:
    source, was, now = match.groups()
    old, new = ({key.strip() for key in keys.split(",")} for keys in (was, now))
    functional = ("Autograd", "ADInplaceOrView", "BackendSelect", "Autocast")
    old_device, new_device = (sorted(key for key in keys if not key.startswith(functional)) for keys in (old, new))
    if old_device != new_device:
        return GuardFailure(kind="device", source=f"{source}.device", before=", ".join(old_device).lower(), now=", ".join(new_device).lower())
    for key in old ^ new:
        if key.startswith("Autocast"):  # until 2.6, for want of a guard on autocast itself
            setting = f"autocast({key.removeprefix('Autocast').lower()})_enabled"
            return GuardFailure(kind="global state", source=setting, before=str(key in old), now=str(key in new))
    was_inference, is_inference = (not any(key.startswith("Autograd") for key in keys) for keys in (old, new))
    return GuardFailure(kind="grad mode", source=f"{source}.is_inference()", before=str(was_inference), now=str(is_inference))


def _not_tensor(match: re.Match[str], scope: Scope) -> GuardFailure:
    source, expected, found = match.groups()
    return GuardFailure(kind="type", source=source, before=_class_name(expected) if expected else "Tensor", now=_class_name(found))


def _class_name(text: str) -> str:
    match = re.search(r"<class '([^']+)'>", text)
    name = (match.group(1) if match else text).rpartition(".")[2]
    return "None" if name == "NoneType" else name


def _type_id(match: re.Match[str], scope: Scope) -> GuardFailure:
    source, was = match.group(1), match.group(3) or _type_name(int(match.group(2)))
    try:
        value = scope.value(source)
        now: str | None = "None" if value is None else type(value).__name__
    except LookupError:
        now = None
    return GuardFailure(kind="type", source=source, before=_class_name(was) if was else None, now=now)


def _type_name(identity: int) -> str | None:
    """The class with this `id`, which is all that versions before 2.11 tell."""
    classes: list[type] = [object]
    seen: set[int] = set()
    while classes:
        found = classes.pop()
        if id(found) == identity:
            return found.__qualname__
        seen.add(id(found))
        subclasses: list[type] = type.__subclasses__(found)
        classes += [one for one in subclasses if id(one) not in seen]
    return None


def _not_function(match: re.Match[str], scope: Scope) -> GuardFailure:
    source = match.group(1).removesuffix(".__code__")
    return GuardFailure(kind="type", source=source, before="function", now=scope.shown(source))


def _object_id(match: re.Match[str], scope: Scope) -> GuardFailure:
    """`___check_obj_id(x, N)`: older versions use it for True, False and None too."""
    source, identity = match.group(1).removesuffix(".__code__"), int(match.group(2))
    constants = {id(value): repr(value) for value in (True, False, None)}
    if identity in constants:
        return _value(source, constants[identity], scope)
    kind = "python value" if _is_enum(source, scope) else "object identity"
    return GuardFailure(kind=kind, source=source, before=None, now=scope.shown(source))


def _is_enum(source: str, scope: Scope) -> bool:
    try:
        return hasattr(type(scope.value(source)), "__members__")
    except LookupError:
        return False


def _length(match: re.Match[str], scope: Scope) -> GuardFailure:
    """`len(x) == 2`, and a dict's `len(d) != 1`, which says that 1 was expected."""
    source, was = match.groups()
    try:
        value = scope.value(source)
    except LookupError:
        value = None
    if isinstance(value, Mapping) and not source.endswith("._modules"):
        keys = scope.shown(f"list({source})")
        return GuardFailure(kind="dict keys", source=f"{source}.keys()", before=f"{was} key{'' if was == '1' else 's'}", now=keys)
    now = scope.shown(f"len({source})")
    if now is None and value is not None:  # no longer something with a length
        return GuardFailure(kind="type", source=source, before=f"{was} entries", now=scope.shown(source))
    return GuardFailure(kind="length", source=f"len({source})", before=was, now=now)


def _empty(match: re.Match[str], scope: Scope) -> GuardFailure:
    return _length(re.match(r"(.*)(0)", match.group(1) + "0") or match, scope)


def _keys(match: re.Match[str], scope: Scope) -> GuardFailure:
    """`list(dict.keys(d))[0] == 'a'`; older versions compare the whole list."""
    source, place, was = match.group("source"), match.groupdict().get("place"), match.group("was").strip()
    before = was if place is None else f"[{'' if place == '0' else '..., '}{was}, ...]"
    return GuardFailure(kind="dict keys", source=f"{source}.keys()", before=before, now=scope.shown(f"list({source})"))


def _contains(match: re.Match[str], scope: Scope) -> GuardFailure:
    absent, key, source = match.groups()
    old, new = ("absent", "present") if absent else ("present", "absent")
    return GuardFailure(kind="dict keys", source=f"{key} in {source}", before=old, now=new)


def _attribute(match: re.Match[str], scope: Scope) -> GuardFailure:
    absent, source, name = match.groups()
    old, new = ("absent", "present") if absent else ("present", "absent")
    return GuardFailure(kind="attribute", source=f"{source}.{name}", before=old, now=new)


def _equal(match: re.Match[str], scope: Scope) -> GuardFailure:
    return _value(match.group(1), match.group(2), scope)


def _value(source: str, was: str, scope: Scope) -> GuardFailure:
    now = scope.shown(source)
    kind = "training flag" if source.endswith(".training") else "python value"
    if "__closure__" in source:
        kind = "closure value"
    elif (was == "None") != (now == "None") or _is_tensor(source, scope):  # an argument that is sometimes None, sometimes a tensor
        kind = "type"
    return GuardFailure(kind=kind, source=source, before=was.strip(), now=now)


def _is_tensor(source: str, scope: Scope) -> bool:
    try:
        return isinstance(scope.value(source), torch.Tensor)
    except LookupError:
        return False


def _condition(match: re.Match[str], scope: Scope) -> GuardFailure:
    """A guard on symbolic sizes: `(x.size()[0] % 4) == 0`, `11 <= x.size()[0]`; older versions write `Eq(Mod(x.size()[0], 4), 0)`."""
    condition = re.sub(r"\bMod\(([^(),]+(?:\(\))?[^(),]*), (\d+)\)", r"(\1 % \2)", match.group(0))
    condition = re.sub(r"^(Eq|Ne)\((.+), (.+)\)$", lambda found: f"{found[2]} {'==' if found[1] == 'Eq' else '!='} {found[3]}", condition)
    sizes = sorted(set(re.findall(r"[\w.\[\]'\"]+?\.(?:size|stride)\(\)\[\d+\]", condition)))
    values = [scope.shown(size) for size in sizes]
    now = ", ".join(f"{sized(size)} = {value}" for size, value in zip(sizes, values, strict=True)) if None not in values else None
    return GuardFailure(kind="shape condition", source=condition, before="true", now=f"false, {now}" if now else "false")


def _duplicate(match: re.Match[str], scope: Scope) -> GuardFailure:
    names = [name.strip("'\" ") for name in match.group(1).strip("[]").split(",")]
    return GuardFailure(kind="aliasing", source=" is ".join(names), before="False", now="True")


def _plain(kind: str, source: str = "") -> Callable[[re.Match[str], Scope], GuardFailure]:
    return lambda match, scope: GuardFailure(kind=kind, source=source)


def _deallocated(match: re.Match[str], scope: Scope) -> GuardFailure:
    return GuardFailure(kind="deallocated", source=match.group(1) or "")


_READERS: tuple[tuple[str, Callable[[re.Match[str], Scope], GuardFailure]], ...] = (
    (r"tensor '(.+)' size mismatch at index (\d+)\. expected (\S+), actual (\S+)", _tensor("shape", ".size({})")),
    (r"tensor '(.+)' stride mismatch at index (\d+)\. expected (\S+), actual (\S+)", _stride),
    (r"tensor '(.+)' rank mismatch\. expected (\S+), actual (\S+)", _tensor("rank", ".dim()")),
    (r"tensor '(.+)' dtype mismatch\. expected (\w+), actual (\w+)", _dtype),
    (r"tensor '(.+)' requires_grad mismatch\. expected requires_grad=(\w+)", _requires_grad),
    (r"tensor '(.+)' Tensor device index mismatch\. Expected device index to be (\S+), actual (\S+)", _tensor("device", ".device.index")),
    (r"tensor '(.+)' dispatch key set mismatch\. expected DispatchKeySet\((.*?)\), actual DispatchKeySet\((.*?)\)", _dispatch_keys),
    (r"expected type of '(.+?)' to be (?:a tensor type, '|(<class .+?>),) but found (.+)", _not_tensor),  # the class from 2.15 on
    (r"Duplicate tensors? found:? ?(?:where not expected!)? ?(.*)", _duplicate),
    (r"BACKEND_MATCH|___check_current_backend", _plain("backend", "backend")),
    (r"Cache line invalidated(?: because (.+) got deallocated)?", _deallocated),
    (r"___check_torch_function_mode_stack\(\)|utils_device\.CURRENT_DEVICE", _plain("torch function mode", "torch.get_default_device()")),
    (r"\w+ ?: Not a function on (.+)", _not_function),
    (r"___check_type_id\((.+?), (\d+)\)(?:, type=(.+))?", _type_id),
    (r"___check_obj_id\((.+?), (\d+)\)", _object_id),
    (r"(not )?___dict_contains\((.+), ([^,]+)\)", _contains),
    (r"(not )?(?:___)?hasattr\((.+), '(\w+)'\)", _attribute),
    (r"list\((?:dict\.keys\()?(?P<source>.+?)(?:\.keys\(\)|\))?\)\[(?P<place>\d+)\] == (?P<was>.+)", _keys),
    (r"list\((?:dict\.keys\()?(?P<source>.+?)(?:\.keys\(\)|\))?\) == (?P<was>.+)", _keys),
    (r"(?=.*\.(?:size|stride)\(\)\[|.*\.storage_offset\(\)).+", _condition),
    (r"len\((.+)\) [!=]= (\d+)$", _length),
    (r"not ([^=]+)$", _empty),
    (r"(.+) is (None|True|False)$", _equal),
    (r"(.+) == (.+)$", _equal),
)


def _stack_line(text: str) -> str:
    entries = [
        traceback.FrameSummary(match.group(1), int(match.group(2)), match.group(3), line=(match.group(4) or "").strip())
        for match in re.finditer(r'  File "([^"]+)", line (\d+), in (\S+)(?:\n    (?! *File)(.*))?', text)
    ]
    return recompiles.describe_line(recompiles.user_line(entries)) if entries else ""


def _comment_line(comment: str) -> str:
    match = re.search(r"# (\S+:\d+) in (\w+)", comment)
    return f"{match.group(1)} in {match.group(2)}: {comment[: match.start()].strip()}".rstrip(": ") if match else ""
