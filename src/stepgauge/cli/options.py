"""Options of a command from the declarations of specs: spec.options as cyclopts reads it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypedDict

from cyclopts import Parameter, Token

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import check_value
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import (
    SHAPE,
    Field,
    Network,
    Values,
    expand,
    flag_of,
    is_size,
    options_of,
    parse_bytes,
    read,
    written,
)

__all__ = [
    "Networks",
    "Values",
    "expand",
    "parse_bytes",
    "spec_options",
]  # what commands need of it


class Networks(ModelSpec):
    """Our Transformers and BERT, by the names of all presets."""

    @staticmethod
    def preset_names() -> tuple[str, ...]:
        return (*ModelSpec.preset_names(), *BertSpec.preset_names())

    @classmethod
    def preset(cls, size: str, **changes: Any) -> Any:
        """Raises ValueError for an unknown name, and for a field that the network does not have."""
        network = BertSpec if size in BertSpec.preset_names() else ModelSpec
        known = {field.name for field in dataclasses.fields(network)}
        for name in changes.keys() - known:
            raise ValueError(f"{name} is {changes[name]!r}; {size} has no such choice")
        return network.preset(size, **changes)


def spec_options(
    *specs: type,
    sweep: bool = False,
    defaults: dict[str, Any] | None = None,
    without: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of the specs as options; it receives those given as `values`.

    With `sweep` every option takes several values, separated by blanks or commas. `defaults`
    overrides what the help shows and the command receives for a field: a value, or with `sweep` a
    tuple of them. No options: fields not declared with `option`, those in `without`, and those that
    the command has as parameters.
    """
    usual = {n: v if isinstance(v, tuple) else (v,) for n, v in (defaults or {}).items()}
    network: Network = next((s for s in specs if issubclass(s, ModelSpec | BertSpec)), ModelSpec)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        fields = options_of(*specs, without={*without, *own})
        options = {n: _option(f, sweep, usual.get(n), network) for n, f in fields.items()}
        given = TypedDict("given", options, total=False)  # type: ignore[misc]

        @functools.wraps(command)
        def run(*positional: Any, values: Values | None = None, **others: Any) -> None:
            chosen = {
                # A default may be a word that only the command understands.
                name: value if value == usual.get(name) else _value(fields[name], value, sweep)
                for name, value in (values or {}).items()
            }
            _require_one_network(chosen, network)
            command(*positional, values={**usual, **chosen}, **others)

        run.fields = fields  # type: ignore[attr-defined]
        # cyclopts reads the type and default of `values` from the wrapped command.
        command.__annotations__["values"] = Annotated[given | None, Parameter(name="*")]
        command.__kwdefaults__ = {**(command.__kwdefaults__ or {}), "values": None}
        return run

    return decorate


def _option(field: Field, sweep: bool, usual: tuple[Any, ...] | None, network: Network) -> Any:
    """The field's flag as cyclopts takes it: its names, its help with the default, its values."""
    shape = {each.name for each in dataclasses.fields(network)}
    of_network = {"size", "hf_config", "model", *shape}
    parameter = Parameter(
        group="Network" if field.name in of_network else "Run",
        name=_names(field),
        help=_help(field, usual, network),
        metavar=_placeholder(field) + ("..." if sweep else ""),
        consume_multiple=sweep or (0, 1),
        converter=lambda _, tokens: _convert(field, tokens, sweep),
        show_default=False,
    )
    return Annotated[tuple[str, ...], parameter]


def _help(field: Field, usual: tuple[Any, ...] | None, network: Network) -> str:
    text = field.metadata["help"]
    if field.name == "size":
        sizes = ", ".join(network.preset_names())
        text += f" ({sizes}); stepgauge model has their parameters"
    elif field.metadata["choices"]:
        text += f" ({', '.join(field.metadata['choices'])})"
    values = " ".join(written(field, value) for value in usual or (field.default,))
    default = "preset" if field.name in SHAPE else values
    return f"{text} [{default}]" if default else text


def _placeholder(field: Field) -> str:
    """What stands for a value in the help; in brackets where the flag alone has a meaning."""
    name = "SIZE" if is_size(field) else field.type.__name__.upper()  # type: ignore[union-attr]
    name = "true|false" if field.type is bool else name
    return name if field.metadata["flag_value"] is None else rf"\[{name}]"  # escaped, for rich


def _names(field: Field) -> tuple[str, ...]:
    long = f"--{flag_of(field)}"
    return (long, f"-{field.metadata['short']}") if field.metadata["short"] else (long,)


def _convert(field: Field, tokens: Sequence[Token], sweep: bool) -> tuple[Any, ...]:
    texts = [token.value for token in tokens]
    if sweep:
        texts = [text for value in texts for text in value.split(",")]
    return tuple(read(field, text) for text in texts if text)


def _value(field: Field, values: tuple[Any, ...], sweep: bool) -> tuple[Any, ...]:
    """What a flag stands for: its values, or what it means alone. Raises ValueError for none, too
    many, or one outside the field's limits.
    """
    if not values and field.metadata["flag_value"] is None:
        raise ValueError(f"{field.name} needs a value")
    if len(values) > 1 and not sweep:
        raise ValueError(f"{field.name} is given {len(values)} times; give it once")
    for value in values:
        check_value(field, value)
    return values or (field.metadata["flag_value"],)


def _require_one_network(given: Values, network: Network) -> None:
    """Raises ValueError for an unknown size, for two options that each name a network, and for an
    option that a user's model leaves without effect.
    """
    for size in given.get("size", ()):
        network.preset(size)
    if "size" in given and "hf_config" in given:
        raise ValueError("--size and --hf-config both name a network; give one of them")
    useless = {"size", "hf_config", "batch", *(f.name for f in dataclasses.fields(network))}
    beside = next((name for name in given if name in useless), None)
    if any(given.get("model", ())) and beside:
        raise ValueError(
            f"{beside} is {given[beside][0]!r}; a user's model has its own network and batch: "
            "leave it out"
        )
