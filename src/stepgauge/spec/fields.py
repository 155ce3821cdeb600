"""Dataclass fields that carry their own documentation and limits.

A field is declared once, here a spec's field; the command line, the validation and the docs all
read it.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Preset = TypeVar("Preset")
Spec = TypeVar("Spec")


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    flag: str | None = None,
    short: str | None = None,
    flag_value: Any = None,
    label: bool | str = False,
    named_with: str = "",
) -> Any:
    """A dataclass field with a help text and the values that it accepts (`least` and `most`
    inclusive).

    flag        its name on the command line, where that differs from the field's
    short       its one-letter name
    flag_value  what the flag alone, without a value, stands for
    label       whether `key=value` of the field names a row; "changed": only one that is not at
                its default
    named_with  the field that names a row together with this one
    """
    metadata = {
        "help": help,
        "choices": tuple(choices) if choices else None,
        "least": least,
        "most": most,
        "flag": flag,
        "short": short,
        "flag_value": flag_value,
        "label": label,
        "named_with": named_with,
    }
    return dataclasses.field(default=default, metadata=metadata)


def as_in(declared: type, name: str, help: str = "", choices: Iterable[str] | None = None) -> Any:
    """The field of that name of another spec once more: its default, limits and label, and its help
    and choices or these.
    """
    (field,) = [field for field in dataclasses.fields(declared) if field.name == name]
    metadata = {**field.metadata, "help": help or field.metadata["help"]}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    return dataclasses.field(default=field.default, metadata=metadata)


def by_size(size: str, sizes: Mapping[str, Preset]) -> Preset:
    """The preset of that name. Raises ValueError for an unknown one."""
    try:
        return sizes[size.lower()]
    except KeyError:
        raise ValueError(f"size is {size!r}; choose one of {', '.join(sizes)}") from None


def with_defaults(spec: Spec, used: Mapping[str, bool]) -> Spec:
    """The spec with the default of each field that it has no use for; what is not named is used."""
    fields = dataclasses.fields(spec)  # type: ignore[arg-type]
    unused = {field.name: field.default for field in fields if not used.get(field.name, True)}
    return dataclasses.replace(spec, **unused)  # type: ignore[type-var]


def as_kind(kind: type[Spec], spec: Any, **changes: Any) -> Spec:
    """A spec of another kind: with the fields that both have, and changes; its own are as by
    default.
    """
    own = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    shared = {name: value for name, value in vars(spec).items() if name in own}
    return kind(**{**shared, **changes})


def naming_fields(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """The fields that name a row together with this one, itself first; none without a `label`."""
    if not field.metadata.get("label"):
        return ()
    other = field.metadata.get("named_with")
    return (field.name, other) if other else (field.name,)


def check(spec: Any) -> None:
    """Raises ValueError for the first field whose value is outside its declared limits."""
    for field in dataclasses.fields(spec):
        check_value(field, getattr(spec, field.name))


def check_value(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raises ValueError for a value outside the field's declared limits."""
    choices, least, most = (field.metadata.get(key) for key in ("choices", "least", "most"))
    if choices and value not in choices:
        raise ValueError(f"{field.name} is {value!r}; choose one of {', '.join(choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name} is {value}; it must be a finite number")
    if least is not None and value is not None and value < least:
        raise ValueError(f"{field.name} is {value:,}; it must be at least {least:,}")
    if most is not None and value is not None and value > most:
        raise ValueError(f"{field.name} is {value:,}; it must be at most {most:,}")
