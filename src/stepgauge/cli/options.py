"""Builds a command's options from the fields that specs declare with spec.options, for cyclopts."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from cyclopts import Group, Parameter, Token

from stepgauge.spec.fields import check_value
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import (
    SHAPE,
    Field,
    Values,
    expand,
    flag_of,
    is_size,
    options_of,
    parse_bytes,
    read,
    written,
)
from stepgauge.spec.presets import preset_names

__all__ = [
    "Values",
    "expand",
    "parse_bytes",
    "spec_options",
]  # with the names of spec.options that commands need


# Panels of a command's help, in this order.
RUN_GROUP = Group("Run", sort_key=1)
NETWORK_GROUP = Group("Network", sort_key=2)


def spec_options(
    *specs: type,
    sweep: bool | Collection[str] = False,
    defaults: dict[str, Any] | None = None,
    shown: Mapping[str, str] = MappingProxyType({}),
    without: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes the specs' fields options of a command, which receives them as `values`.

    specs     --size has the presets of the networks among them
    sweep     options that accept several values, separated by spaces or commas: True: all of them
    defaults  by field, in place of the field's own default: a value, or a tuple of several
    shown     by field, the default in the help if the command decides it; "": none
    without   fields that do not become options, as those that the command has as parameters
    """
    sizes = preset_names(*specs)
    all_defaults = {n: v if isinstance(v, tuple) else (v,) for n, v in (defaults or {}).items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command).parameters
        fields = options_of(*specs, without={*without, *parameters})
        swept: Collection[str] = fields if sweep is True else sweep or ()
        options = {
            name: _option(field, name in swept, all_defaults.get(name), shown.get(name), sizes)
            for name, field in fields.items()
        }
        given = TypedDict("given", options, total=False)  # type: ignore[misc]

        @functools.wraps(command)
        def run(*positional: Any, values: Values | None = None, **others: Any) -> None:
            chosen = {
                # A default may be a word that only the command understands, so it is not checked.
                name: value
                if value == all_defaults.get(name)
                else _check(fields[name], value, name in swept)
                for name, value in (values or {}).items()
            }
            _require_one_network(chosen, sizes)
            command(*positional, values={**all_defaults, **chosen}, **others)

        run.fields = fields  # type: ignore[attr-defined]
        # cyclopts reads the type and the default of `values` from the wrapped command.
        command.__annotations__["values"] = Annotated[given | None, Parameter(name="*")]
        command.__kwdefaults__ = {**(command.__kwdefaults__ or {}), "values": None}
        return run

    return decorate


def _option(
    field: Field,
    sweep: bool,
    default: tuple[Any, ...] | None,
    shown: str | None,
    sizes: Sequence[str],
) -> Any:
    """Returns the field's type for cyclopts, with its flags, help and converter."""
    network_fields = {"size", "hf_config", "model"}
    network_fields |= {each.name for each in dataclasses.fields(ModelSpec)}
    parameter = Parameter(
        group=NETWORK_GROUP if field.name in network_fields else RUN_GROUP,
        name=_flags(field),
        help=_help(field, default, shown, sizes),
        metavar=_placeholder(field) + ("..." if sweep else ""),
        consume_multiple=sweep or (0, 1),
        converter=lambda _, tokens: _convert(field, tokens, sweep),
        show_default=False,
    )
    return Annotated[tuple[str, ...], parameter]


def _help(
    field: Field, default: tuple[Any, ...] | None, shown: str | None, sizes: Sequence[str]
) -> str:
    """Returns the field's help with its choices and its default in brackets."""
    text = field.metadata["help"]
    if field.name == "size":
        text += f" ({', '.join(sizes)}); stepgauge model prints their parameters"
    elif field.metadata["choices"]:
        text += f" ({', '.join(field.metadata['choices'])})"
    if shown is None:
        values = " ".join(written(field, value) for value in default or (field.default,))
        shown = "preset" if field.name in SHAPE else values
    return f"{text} [default: {shown}]" if shown else text


def _placeholder(field: Field) -> str:
    """Returns the placeholder of a value in the help, in brackets if the flag may stand alone."""
    name = "SIZE" if is_size(field) else field.type.__name__.upper()  # type: ignore[union-attr]
    name = "true|false" if field.type is bool else name
    # The backslash keeps rich from reading the bracket as markup.
    return name if field.metadata["flag_value"] is None else rf"\[{name}]"


def _flags(field: Field) -> tuple[str, ...]:
    long = f"--{flag_of(field)}"
    return (long, f"-{field.metadata['short']}") if field.metadata["short"] else (long,)


def _convert(field: Field, tokens: Sequence[Token], sweep: bool) -> tuple[Any, ...]:
    texts = [token.value for token in tokens]
    if sweep:
        texts = [text for value in texts for text in value.split(",")]
    return tuple(read(field, text) for text in texts if text)


def _check(field: Field, values: tuple[Any, ...], sweep: bool) -> tuple[Any, ...]:
    """Returns the values, or the flag's own meaning if it has none. Raises ValueError for a missing
    value, several without `sweep`, or one outside the field's limits.
    """
    if not values and field.metadata["flag_value"] is None:
        raise ValueError(f"{field.name} needs a value")
    if len(values) > 1 and not sweep:
        raise ValueError(f"{field.name} is given {len(values)} times; give it once")
    for value in values:
        check_value(field, value)
    return values or (field.metadata["flag_value"],)


def _require_one_network(given: Values, sizes: Sequence[str]) -> None:
    """Raises ValueError for an unknown size, for two options that each name a network, and for an
    option that has no effect on a user's model.
    """
    for size in given.get("size", ()):
        if size.lower() not in sizes:
            raise ValueError(f"size is {size!r}; choose one of {', '.join(sizes)}")
    if "size" in given and "hf_config" in given:
        raise ValueError("--size and --hf-config both name a network; give one of them")
    preset_only = {"size", "hf_config", "batch", *(f.name for f in dataclasses.fields(ModelSpec))}
    extra = next((name for name in given if name in preset_only), None)
    if any(given.get("model", ())) and extra:
        raise ValueError(
            f"{extra} is {given[extra][0]!r}; a user's model has its own network and batch: "
            "leave it out"
        )
