"""Dataclass fields that carry their own documentation and limits.

A field is declared once, here a spec's field; the command line, the validation and the docs all
read it.
"""

import dataclasses
import math
import string
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

Preset = TypeVar("Preset")


def option(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] | None = None,
    least: float | None = None,
    most: float | None = None,
    flag: str | None = None,
    short: str | None = None,
    bare: Any = None,
    word: str = "",
    quiet: Any = None,
    special: Mapping[Any, str] | None = None,
) -> Any:
    """A dataclass field with a help text and the values that it accepts (`least` and `most`
    inclusive).

    flag  its name on the command line, where that differs from the field's
    short its one-letter name
    bare  what the flag alone, without a value, stands for
    word  how it names a row in few words, a format of the spec's fields; nothing is said where the
          value is `quiet`
    special  other words for single values
    """
    limits = {"choices": tuple(choices) if choices else None, "least": least, "most": most}
    names = {"flag": flag, "short": short, "word": word, "quiet": quiet, "special": special or {}}
    return dataclasses.field(
        default=default, metadata={"help": help, "bare": bare, **names, **limits}
    )


def as_in(declared: type, name: str, help: str = "") -> Any:
    """The field of that name of another spec once more: its default, limits and words, and its help
    or this one.
    """
    (field,) = [field for field in dataclasses.fields(declared) if field.name == name]
    metadata = {**field.metadata, "help": help or field.metadata["help"]}
    return dataclasses.field(default=field.default, metadata=metadata)


def by_size(size: str, sizes: Mapping[str, Preset]) -> Preset:
    """The preset of that name. Raises ValueError for an unknown one."""
    try:
        return sizes[size.lower()]
    except KeyError:
        raise ValueError(f"size is {size!r}; choose one of {', '.join(sizes)}") from None


def words(
    declared: type, values: Mapping[str, Any], *, leaving_out: Iterable[str] = ()
) -> list[str]:
    """What names a row in few words, by the `word` of each field of the spec that has one; values
    by field name.
    """
    fields = [field for field in dataclasses.fields(declared) if field.name not in leaving_out]
    return [word for field in fields if (word := word_of(field, values))]


def word_of(field: Any, values: Mapping[str, Any]) -> str:
    """What one field of a spec adds to the name of a row; nothing where it has no `word` or its
    value is `quiet`.
    """
    word, value = field.metadata.get("word"), values.get(field.name)
    if not word or field.name not in values or value == field.metadata["quiet"]:
        return ""
    return str(field.metadata.get("special", {}).get(value, word)).format(**values)


def named_in(field: Any) -> set[str]:
    """The fields whose values are in a field's `word`."""
    return {
        name for _, name, _, _ in string.Formatter().parse(field.metadata.get("word") or "") if name
    }


def check(spec: Any) -> None:
    """Raises ValueError for the first field of the dataclass whose value is outside its declared
    limits.
    """
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
