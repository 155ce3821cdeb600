"""Dataclass fields that carry their help text and limits.

Each field is declared once, in its spec. The command line, the validation and the row labels all
read the declaration.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Preset = TypeVar("Preset")
Spec = TypeVar("Spec")

# Field type -> what its values must be, for messages.
TYPES: Mapping[Any, str] = {
    int: "a whole number (int)",
    float: "a number",
    bool: "True or False",
    str: "a text (str)",
    list: "a list",
    dict: "an object (dict)",
}

# Help of the option `device`: of commands that run on one device, and of those that run on ranks.
DEVICE_HELP = "cpu, cuda, cuda:1, mps, or auto for the fastest available"
RANKS_DEVICE_HELP = "cpu, cuda for one GPU per rank, or auto for the fastest available"


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
    """Returns a dataclass field with a help text and its accepted values.

    least, most  inclusive limits
    flag         name on the command line, if it differs from the field's
    short        one-letter name on the command line
    flag_value   value if the flag is given without one
    label        True if `field=value` is part of a row's label; "changed": only if the value is not
                 the default
    named_with   another field that is always part of the label together with this one
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
    """Returns a copy of another spec's field, with its help and choices replaced if given."""
    (field,) = [field for field in dataclasses.fields(declared) if field.name == name]
    metadata = {**field.metadata, "help": help or field.metadata["help"]}
    if choices is not None:
        metadata["choices"] = tuple(choices)
    return dataclasses.field(default=field.default, metadata=metadata)


def by_size(size: str, sizes: Mapping[str, Preset]) -> Preset:
    """Returns the preset with that name. Raises ValueError if it is unknown."""
    try:
        return sizes[size.lower()]
    except KeyError:
        raise ValueError(f"size is {size!r}; choose one of {', '.join(sizes)}") from None


def with_defaults(spec: Spec, used: Mapping[str, bool]) -> Spec:
    """Returns the spec with each field that is marked unused reset to its default.

    used  field name -> whether the field has an effect; fields that are not named keep their value
    """
    fields = dataclasses.fields(spec)  # type: ignore[arg-type]
    unused = {field.name: field.default for field in fields if not used.get(field.name, True)}
    return dataclasses.replace(spec, **unused)  # type: ignore[type-var]


def as_kind(kind: type[Spec], spec: Any, **changes: Any) -> Spec:
    """Converts a spec to another kind: copies the fields that both have, then applies changes."""
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    shared = {name: value for name, value in vars(spec).items() if name in names}
    return kind(**{**shared, **changes})


def naming_fields(field: "dataclasses.Field[Any]") -> tuple[str, ...]:
    """Returns the names of the fields that the field adds to a row's label: itself first."""
    if not field.metadata.get("label"):
        return ()
    other = field.metadata.get("named_with")
    return (field.name, other) if other else (field.name,)


def check(spec: Any) -> None:
    """Raises ValueError for the first field whose value is outside its declared limits."""
    for field in dataclasses.fields(spec):
        check_value(field, getattr(spec, field.name))


def check_type(name: str, required: Any, value: Any) -> None:
    """Raises ValueError for a value of another type. An int is a number, a bool is not. Types that are
    not in TYPES are not checked.
    """
    accepted = (int, float) if required is float else required
    is_other_bool = isinstance(value, bool) and required is not bool
    if required in TYPES and (is_other_bool or not isinstance(value, accepted)):
        raise ValueError(f"{name} is {value!r}; it must be {TYPES[required]}")


def check_value(field: "dataclasses.Field[Any]", value: Any) -> None:
    """Raises ValueError for a value of another type, or outside the field's declared limits."""
    choices, least, most = (field.metadata.get(key) for key in ("choices", "least", "most"))
    if choices and value not in choices:
        raise ValueError(f"{field.name} is {value!r}; choose one of {', '.join(choices)}")
    check_type(field.name, field.type, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{field.name} is {value}; it must be a finite number")
    if least is not None and value < least:
        raise ValueError(f"{field.name} is {value:,}; it must be at least {least:,}")
    if most is not None and value > most:
        raise ValueError(f"{field.name} is {value:,}; it must be at most {most:,}")
