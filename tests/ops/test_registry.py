"""The table of lowerings: signatures, duplicates, names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ort_backend.lowering import registry
from ort_backend.lowering.registry import Lowering, register

aten = torch.ops.aten

# Arguments that come by position only, by their names up to torch 2.14.
RENAMED = {("aten::_cdist_backward", "grad_output"): "grad"}


def _lowerings() -> Iterator[Any]:
    for target, lowerings in registry.registered().items():
        for lowering in lowerings:
            requires = "+".join(lowering.requires)
            yield pytest.param(lowering, id=f"{target}[{requires}]" if requires else str(target))
    for target, lowering in registry.registered_complex()[0].items():
        yield pytest.param(lowering, id=f"{target}[complex]")


@pytest.mark.parametrize("lowering", list(_lowerings()))
def test_signature_is_the_schema(lowering: Lowering) -> None:
    op, *parameters = inspect.signature(lowering.function).parameters.values()
    arguments = lowering.target._schema.arguments
    assert op.name == "op"
    name = lowering.target._schema.name
    assert [parameter.name for parameter in parameters] == [RENAMED.get((name, argument.name), argument.name) for argument in arguments]
    for parameter, argument in zip(parameters, arguments):
        # A default that the schema lacks is that of another overload, which shares the function.
        if argument.has_default_value():
            assert _plain(parameter.default) == _plain(argument.default_value), parameter.name
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert argument.kwarg_only, f"{parameter.name} may come by position"


def _plain(default: Any) -> Any:
    """A default in one form: `int[2] padding=0` reads as 0 and as [0, 0], `ScalarType dtype=long` as a dtype and as its number."""
    if isinstance(default, torch.dtype):
        return {torch.int64: 4}[default]
    if isinstance(default, (list, tuple)):
        return default[0] if len(default) > 0 and all(part == default[0] for part in default) else list(default)
    return default


@pytest.mark.parametrize("lowering", list(_lowerings()))
def test_named_arguments_exist(lowering: Lowering) -> None:
    names = {argument.name for argument in lowering.target._schema.arguments}
    # A function that several overloads share names the arguments of all of them.
    parameters = set(inspect.signature(lowering.function).parameters)
    assert lowering.keep <= names | parameters
    assert lowering.whole_storage <= names


def test_every_lowering_says_what_it_lowers() -> None:
    undocumented = [str(target) for target, lowerings in registry.registered().items() for one in lowerings if not one.function.__doc__]
    assert not undocumented


@pytest.mark.parametrize(("target", "linear"), [pytest.param(*one, id=str(one[0])) for one in registry.registered_complex()[1].items()])
def test_linear_arguments_are_those_of_a_lowering(target: Any, linear: frozenset[str]) -> None:
    assert target in registry.registered()
    assert not linear or linear & {argument.name for argument in target._schema.arguments}


def test_a_second_lowering_of_complex_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="already has a lowering of complex numbers"):
        registry.register_complex(aten.neg.default)(lambda op, self: self)
    with pytest.raises(ValueError, match="already has a lowering of complex numbers"):
        registry.register_linear(aten.mul.Tensor, linear=("self",))


def test_a_duplicate_is_refused() -> None:
    with pytest.raises(ValueError, match="already has a lowering"):
        register(aten.add.Tensor)(lambda op, self, other, alpha=1: self)


def test_an_overload_packet_is_refused() -> None:
    with pytest.raises(TypeError, match="is registered for operator overloads"):
        register(aten.add)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is registered for operator overloads"):
        register()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"requires": "com.microsoft::GeluGrad"}, TypeError, "requires='com.microsoft::GeluGrad' must be a tuple"),
        ({"requires": ["com.microsoft::GeluGrad"]}, TypeError, "must be a tuple"),
        ({"requires": ("GeluGrad",)}, ValueError, "requires has 'GeluGrad', but must name operators with their domain"),
        ({"keep": "self"}, TypeError, "keep='self' must be a tuple"),
        ({"keep": ("selv",)}, ValueError, "names 'selv', which aten::gcd"),
        ({"whole_storage": ("selv",)}, ValueError, "names 'selv', which aten::gcd"),
        ({"promote": "outputs"}, ValueError, "promote='outputs' must be None or one of 'output'"),
        ({"device": "gpu"}, ValueError, "device='gpu' must be None, 'cpu' or 'cuda'"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        register(aten.gcd.default, **arguments)(lambda op, self, other: self)
    assert aten.gcd.default not in registry.registered()


@pytest.mark.parametrize("name", ["aten::gcd", "mine::operator.default"])
def test_a_name_that_would_not_be_found_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' would not be found"):
        register(name)


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="a lowering is a function"):
        register(aten.gcd.default)(3)  # type: ignore[type-var]
