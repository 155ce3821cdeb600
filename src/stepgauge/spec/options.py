"""A spec's fields as options: how a value is written and read, and the product of several values as
specs.
"""

import dataclasses
import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.hf_config import HfConfig, name_of, read_network
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.user_model import UserModel, UserModelOption

Field = dataclasses.Field[Any]
Values = dict[str, tuple[Any, ...]]
Network = type[ModelSpec] | type[BertSpec]

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")  # what a preset decides
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
TRUTH = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}


def options_of(*specs: type, without: Collection[str] = ()) -> dict[str, Field]:
    """The fields that are declared with `option`, by name; of equal names the last spec's.

    Where there is a model, it may be a user's: `model` is then FILE.py:factory. Or that of a
    config.json, `hf_config`.
    """
    every = [field for spec in specs for field in dataclasses.fields(spec)]
    has_model = any(field.name == "model" for field in every)
    others = (UserModelOption, HfConfig) if has_model else ()
    fields = [*(field for other in others for field in dataclasses.fields(other)), *every]
    return {f.name: f for f in fields if "help" in f.metadata and f.name not in without}


def is_size(field: Field) -> bool:
    """Whether the field is a number of bytes, which people write as 512K or 2G."""
    return field.name.endswith("_bytes")


def read(field: Field, text: str) -> Any:
    """The value that a text stands for. Raises ValueError for one that is of another type."""
    if field.type is bool:
        if text.lower() not in TRUTH:
            raise ValueError(f"{field.name} is {text!r}; choose true or false")
        return TRUTH[text.lower()]
    if is_size(field):
        return parse_bytes(text, field.name)
    if field.name == "device":
        return device_name(text)
    try:
        return field.type(text.replace("_", "") if field.type is int else text)  # type: ignore[operator]
    except ValueError:
        kind = "a whole number" if field.type is int else "a number"
        raise ValueError(f"{field.name} is {text!r}; it must be {kind}") from None


def device_name(text: str) -> str:
    """The text, said to be no device before torch is loaded. Raises ValueError."""
    if not DEVICE.fullmatch(text):
        raise ValueError(f"device is {text!r}; choose cpu, cuda, cuda:N, mps or auto")
    return text


def flag_of(field: Field) -> str:
    """What the command line calls it, without dashes before it."""
    return (field.metadata["flag"] or field.name).replace("_", "-")


def written(field: Field, value: Any) -> str:
    """A value as a person would type it."""
    if field.type is bool:
        return str(value).lower()
    return format_bytes(value) if is_size(field) else str(value)


def command_line(command: str, chosen: Iterable[tuple[Field, Any]]) -> str:
    """A command of stepgauge with values of its options, as a person would type it."""
    told = (f"--{flag_of(field)} {shlex.quote(written(field, value))}" for field, value in chosen)
    return " ".join(["stepgauge", command, *told])


def parse_bytes(text: str, name: str) -> int:
    """Bytes of "512K", "1M", "2G" (powers of 1024) or a plain number. Raises ValueError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        return round(float(number.replace("_", "")) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{name} is {text!r}; it must be a number of bytes such as 65536, 512K, 1M or 2G"
        ) from None


def format_bytes(size: int) -> str:
    """What parse_bytes reads back to the size, in the largest unit that gives a whole number."""
    units = [(unit, factor) for unit, factor in UNITS.items() if size and size % factor == 0]
    unit, factor = max(units, key=lambda each: each[1], default=("", 1))
    return f"{size // factor}{unit}"


def expand(spec: type, values: Mapping[str, Any], *, network: Network = ModelSpec) -> list[Any]:
    """The product of the values as specs; of a spec with a model, made from the preset `size`, or
    the file `hf_config`, and the fields given. Several values stand in a tuple or a list.

    The first option varies slowest. Raises ValueError for a field that there is not, and for a
    combination that is no model.
    """
    has_model = any(field.name == "model" for field in dataclasses.fields(spec))
    _require_fields(values, spec, *([network, UserModelOption, HfConfig] if has_model else []))
    several = {
        name: tuple(value) if isinstance(value, list | tuple) else (value,)
        for name, value in values.items()
    }
    whole_network = ("hf_config",) if "hf_config" in values else ("size",)
    names = [name for name in whole_network if name in values]
    names += [name for name in values if name not in ("size", "hf_config")]
    combinations = itertools.product(*(several[name] for name in names))
    chosen = [dict(zip(names, combination, strict=True)) for combination in combinations]
    if has_model:
        return [_with_model(spec, each, network) for each in chosen]
    return [spec(**each) for each in chosen]


def _require_fields(names: Iterable[str], *specs: type) -> None:
    """Raises ValueError for a name that is no field of any of these."""
    known = dict.fromkeys(field.name for spec in specs for field in dataclasses.fields(spec))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
            raise ValueError(f"no field {name!r}: {hint}")


def _with_model(spec: type, chosen: dict[str, Any], network: Network) -> Any:
    """The spec of a user's model where one is chosen, else of the preset, or of a config.json, with
    its shape changed.
    """
    if not chosen.keys() & {"size", "hf_config", "model"}:
        raise ValueError(
            f"no network is named: give 'size' ({', '.join(network.preset_names())}), 'hf_config' "
            f"or 'model'"
        )
    size = chosen.pop("size", "")
    file = chosen.pop("hf_config", "")
    users = chosen.pop("model", "")
    of_network = {field.name for field in dataclasses.fields(network)}
    shape = {name: value for name, value in chosen.items() if name in of_network}
    rest = {name: value for name, value in chosen.items() if name not in of_network}
    if users:  # a command's usual shape says nothing of it
        return spec(model=UserModel.read(users), **rest)
    if file:
        model, label = read_network(file, **shape), name_of(file)
    else:
        model, label = network.preset(size, **shape), size.lower()
    if set(shape) & set(SHAPE):
        label = "custom"
    return spec(model=model, size=label, **rest)
