"""Reads the objects that users write into a hardware file. Errors name the path of the key."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

Fields = TypeVar("Fields")


def read_object(
    kind: type[Fields], value: Any, path: str, *, objects: Mapping[str, Any] | None = None
) -> Fields:
    """Returns the dataclass whose fields are the keys of a JSON object.

    path     of the object in its file, such as fabric.within
    objects  fields that were read before, in place of the JSON objects in `value`

    Raises ValueError for missing and unknown keys, and for what the dataclass refuses.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    required = [field.name for field in fields if field.default is dataclasses.MISSING]
    require_keys(value, path, required, known=[field.name for field in fields])
    try:
        return kind(**{**value, **(objects or {})})
    except ValueError as error:
        raise ValueError(f"{path}.{error}") from None


def require_keys(
    value: Any, path: str, required: Collection[str], *, known: Collection[str]
) -> None:
    """Raises ValueError if the value at this path is not an object with all required and only known
    keys.
    """
    keys = f"its keys are {', '.join(known)}"
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {value!r}; {keys}")
    problems = [f"no {name}" for name in required if name not in value]
    problems += [f"an unknown {name!r}" for name in value if name not in known]
    if problems:
        raise ValueError(f"{path} has {', '.join(problems)}; {keys}")
