"""Spec dataclasses as command-line options: a field's declaration is its flag, help text and
limits.
"""

import dataclasses
import inspect
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec

Values = dict[str, tuple[Any, ...]]
Network = type[ModelSpec] | type[BertSpec]


def spec_options(
    *specs: type,
    sweep: bool = False,
    defaults: dict[str, Any] | None = None,
    without: Collection[str] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of the specs as options; it receives what was given as `values`.

    With `sweep` every option takes several values, separated by blanks or commas. Options that were
    not given are not in `values`. `defaults` overrides what the help shows and the command receives
    for a field: a value, or with `sweep` a tuple of them. Fields that are not declared with
    `option`, or are in `without`, are no options; a parameter of the command's own takes the place
    of a field of its name.
    """
    shown = {
        name: value if isinstance(value, tuple) else (value,)
        for name, value in (defaults or {}).items()
    }
    network: Network = next(
        (spec for spec in specs if issubclass(spec, ModelSpec | BertSpec)), ModelSpec
    )

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "values"]
        taken = {*without, *(p.name for p in own)}
        declared = [
            field
            for spec in specs
            for field in dataclasses.fields(spec)
            if "help" in field.metadata
        ]
        fields = [field for field in declared if field.name not in taken]
        names = {field.name: field for field in fields}
        added = [
            _parameter(field, sweep, shown.get(field.name), network) for field in names.values()
        ]

        def run(*positional: Any, **given: Any) -> None:
            chosen = {name: given.pop(name) for name in names if name in given}
            values = {
                name: value or (_bare(names[name]),)
                for name, value in chosen.items()
                if value is not None
            }
            _refuse_beside_own(values, network)
            command(*positional, values={**shown, **values}, **given)

        parameters = sorted([*added, *own], key=lambda p: (p.kind, p.name not in names))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        return run

    return decorate


def _refuse_beside_own(given: Values, network: Network) -> None:
    """Raises ValueError for an option that an own model leaves nothing to say, where one is given."""
    idle = {"size", "batch", *(field.name for field in dataclasses.fields(network))}
    beside = next((name for name in given if name in idle), None)
    if any(given.get("own", ())) and beside:
        raise ValueError(
            f"{beside} is {given[beside][0]!r}; an own model brings its network and batch: leave it out"
        )


def _parameter(
    field: "dataclasses.Field[Any]", sweep: bool, defaults: tuple[Any, ...] | None, network: Network
) -> inspect.Parameter:
    choices = field.metadata["choices"] or (
        network.preset_names() if field.name == "size" else None
    )
    text = field.metadata["help"] + (f" ({', '.join(choices)})" if choices else "")
    usual = (
        "preset"
        if field.name in SHAPE
        else " ".join(_written(field, v) for v in defaults or (field.default,))
    )
    is_network = field.name == "size" or field.name in {f.name for f in dataclasses.fields(network)}
    values: Any = types.GenericAlias(tuple, (str if field.type is bool else field.type, ...))
    annotation: Any = Annotated[
        values | None,
        Parameter(
            group="Network" if is_network else "Run",
            name=_names(field),
            help=f"{text} [{usual}]" if usual else text,
            metavar=_placeholder(field) + ("..." if sweep else ""),
            consume_multiple=sweep or (0, 1),
            converter=lambda _, tokens: _convert(field, tokens, sweep),
            negative="",
            show_default=False,
        ),
    ]
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def _placeholder(field: "dataclasses.Field[Any]") -> str:
    """What stands for a value in the help; in brackets where the flag alone has a meaning."""
    if field.type is bool:
        name = "true|false"
    else:
        name = "SIZE" if _is_size(field) else field.type.__name__.upper()  # type: ignore[union-attr]
    return name if field.metadata["bare"] is None else rf"\[{name}]"  # escaped, for rich


def _written(field: "dataclasses.Field[Any]", value: Any) -> str:
    """A default as a person would type it."""
    if field.type is bool:
        return str(value).lower()
    return format_bytes(value) if _is_size(field) else str(value)


def _is_size(field: "dataclasses.Field[Any]") -> bool:
    return field.name.endswith("_bytes")


def _names(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    long = f"--{(field.metadata['flag'] or field.name).replace('_', '-')}"
    return (long, f"-{field.metadata['short']}") if field.metadata["short"] else (long,)


SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")


def _bare(field: "dataclasses.Field[Any]") -> Any:
    if field.metadata["bare"] is None:
        raise ValueError(f"{field.name} needs a value")
    return field.metadata["bare"]


def _convert(
    field: "dataclasses.Field[Any]", tokens: Sequence[Token], sweep: bool
) -> tuple[Any, ...]:
    texts = [
        text
        for token in tokens
        for text in (token.value.split(",") if sweep else [token.value])
        if text
    ]
    return tuple(_parse(field, text) for text in texts)


def _parse(field: "dataclasses.Field[Any]", text: str) -> Any:
    if field.type is bool:
        words = {
            "true": True,
            "on": True,
            "yes": True,
            "1": True,
            "false": False,
            "off": False,
            "no": False,
            "0": False,
        }
        if text.lower() not in words:
            raise ValueError(f"{field.name} is {text!r}; choose true or false")
        return words[text.lower()]
    if _is_size(field):
        return parse_bytes(text, field.name)
    try:
        return field.type(text.replace("_", "") if field.type is int else text)  # type: ignore[operator]
    except ValueError:
        kind = "a whole number" if field.type is int else "a number"
        raise ValueError(f"{field.name} is {text!r}; it must be {kind}") from None


def parse_bytes(text: str, name: str) -> int:
    """Bytes of "512K", "1M", "2G" (powers of 1024, as nccl-tests has them) or a plain number.
    Raises ValueError.
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        return round(
            float(number.replace("_", "")) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[unit]
        )
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{name} is {text!r}; it must be a number of bytes such as 65536, 512K, 1M or 2G"
        ) from None


def format_bytes(size: int) -> str:
    """What parse_bytes reads back to the size, in the largest unit that gives a whole number."""
    for unit, factor in (("G", 2**30), ("M", 2**20), ("K", 2**10)):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def expand(spec: type, values: Values, *, network: Network = ModelSpec) -> Iterator[Any]:
    """The product of the values as specs; of a spec with a model, made from the preset `size` and
    the fields given.

    The first option varies slowest. Raises ValueError for a combination that is no model.
    """
    model_fields = {field.name for field in dataclasses.fields(network)}
    order = [name for name in ("size", *values) if name in values]
    for combination in itertools.product(*(values[name] for name in dict.fromkeys(order))):
        chosen = dict(zip(dict.fromkeys(order), combination, strict=True))
        if "model" not in {field.name for field in dataclasses.fields(spec)}:
            yield spec(**chosen)
            continue
        size = chosen.pop("size")
        shape = {name: value for name, value in chosen.items() if name in model_fields}
        rest = {name: value for name, value in chosen.items() if name not in model_fields}
        label = "custom" if set(shape) & set(SHAPE) else size.lower()
        yield spec(model=network.preset(size, **shape), size=label, **rest)
