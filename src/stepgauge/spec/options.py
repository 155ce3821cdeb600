"""Spec fields as options: reading and writing values, and expanding several values into specs."""

import dataclasses
import difflib
import itertools
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.fields import check_type
from stepgauge.spec.hf_config import HfConfig, name_of, read_network
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.presets import preset, preset_names
from stepgauge.spec.user_model import UserModel, UserModelOption

Field = dataclasses.Field[Any]
Values = dict[str, tuple[Any, ...]]

SHAPE = ("d_model", "d_ff", "num_layers", "num_heads")  # the fields that a preset sets
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
BOOLEANS = {
    **dict.fromkeys(("true", "on", "yes", "1"), True),
    **dict.fromkeys(("false", "off", "no", "0"), False),
}


def options_of(*specs: type, without: Collection[str] = ()) -> dict[str, Field]:
    """Returns the fields declared with `option`, by name; a later spec's field replaces an earlier one.

    Specs with a model also get the options `model` (a user's model) and `hf_config`.
    """
    shown = [spec for spec in specs if spec is not BertSpec]  # a ModelSpec has all of its options
    fields = [field for spec in shown for field in dataclasses.fields(spec)]
    if any(field.name == "model" for field in fields):
        fields = [*dataclasses.fields(UserModelOption), *dataclasses.fields(HfConfig), *fields]
    return {f.name: f for f in fields if "help" in f.metadata and f.name not in without}


def is_size(field: Field) -> bool:
    """Returns True for a field in bytes, which may be written as 512K or 2G."""
    return field.name.endswith("_bytes")


def read(field: Field, text: str) -> Any:
    """Parses a value of the field. Raises ValueError for a text of another type."""
    if field.type is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError(f"{field.name} is {text!r}; choose true or false")
        return BOOLEANS[text.lower()]
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
    """Returns the text. Raises ValueError if it is not a device, without importing torch."""
    if not DEVICE.fullmatch(text):
        raise ValueError(f"device is {text!r}; choose cpu, cuda, cuda:N, mps or auto")
    return text


def flag_of(field: Field) -> str:
    """Returns the option's name on the command line, without the leading dashes."""
    return (field.metadata["flag"] or field.name).replace("_", "-")


def written(field: Field, value: Any) -> str:
    """Returns the value as a user would type it."""
    if field.type is bool:
        return str(value).lower()
    return format_bytes(value) if is_size(field) else str(value)


def command_line(command: str, chosen: Iterable[tuple[Field, Any]]) -> str:
    """Returns a stepgauge command with these option values, as a user would type it."""
    options = (
        f"--{flag_of(field)} {shlex.quote(written(field, value))}" for field, value in chosen
    )
    return " ".join(["stepgauge", command, *options])


def parse_bytes(text: str, name: str) -> int:
    """Parses "512K", "1M", "2G" (powers of 1024) or a plain number of bytes. Raises ValueError."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        return round(float(number.replace("_", "")) * UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{name} is {text!r}; it must be a number of bytes such as 65536, 512K, 1M or 2G"
        ) from None


def format_bytes(size: int) -> str:
    """Returns the size in the largest unit that gives an integer; the inverse of parse_bytes."""
    units = [(unit, factor) for unit, factor in UNITS.items() if size and size % factor == 0]
    unit, factor = max(units, key=lambda each: each[1], default=("", 1))
    return f"{size // factor}{unit}"


def expand(spec: type, values: Mapping[str, Any]) -> list[Any]:
    """Returns one spec per combination of the values; the first option varies slowest.

    A tuple or list gives several values of a field. A spec with a model gets it from `size` (a
    preset), `hf_config` or `model`, changed by the fields of the network that are given.
    Raises ValueError for an unknown field and for an invalid combination.
    """
    has_model = any(field.name == "model" for field in dataclasses.fields(spec))
    _require_fields(values, spec, *([ModelSpec, UserModelOption, HfConfig] if has_model else []))
    several = {
        name: tuple(value) if isinstance(value, list | tuple) else (value,)
        for name, value in values.items()
    }
    for name in ("size", "hf_config", "model") if has_model else ():
        for value in several.get(name, ()):
            check_type(name, str, value)
    chosen = combinations(several)
    if has_model:
        return [_with_model(spec, each) for each in chosen]
    return [spec(**each) for each in chosen]


def combinations(values: Values) -> list[dict[str, Any]]:
    """Returns one dict per combination of the values; the network varies slowest, then the first
    option. A size is left out where a config.json is the network.
    """
    network_first = "hf_config" if "hf_config" in values else "size"
    names = [network_first] if network_first in values else []
    names += [name for name in values if name not in ("size", "hf_config")]
    products = itertools.product(*(values[name] for name in names))
    return [dict(zip(names, product, strict=True)) for product in products]


def _require_fields(names: Iterable[str], *specs: type) -> None:
    """Raises ValueError for a name that is not a field of any of these specs."""
    known = dict.fromkeys(field.name for spec in specs for field in dataclasses.fields(spec))
    for name in names:
        if name not in known:
            similar = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {similar[0]!r}?" if similar else f"choose one of {', '.join(known)}"
            )
            raise ValueError(f"no field {name!r}: {hint}")


def _with_model(spec: type, chosen: dict[str, Any]) -> Any:
    """Returns the spec with a user's model, else with that of a config.json or a preset."""
    if not chosen.keys() & {"size", "hf_config", "model"}:
        raise ValueError(
            f"the network is missing: give 'size' ({', '.join(preset_names(ModelSpec, BertSpec))}), "
            f"'hf_config' or 'model'"
        )
    size = chosen.pop("size", "")
    file = chosen.pop("hf_config", "")
    user_model = chosen.pop("model", "")
    network_fields = {field.name for field in dataclasses.fields(ModelSpec)}
    shape = {name: value for name, value in chosen.items() if name in network_fields}
    rest = {name: value for name, value in chosen.items() if name not in network_fields}
    if user_model:  # the command's default shape does not apply
        return spec(model=UserModel.read(user_model), **rest)
    if file:
        model, label = read_network(file, **shape), name_of(file)
    else:
        model, label = preset(size, **shape), size.lower()
    if set(shape) & set(SHAPE):
        label = "custom"
    return spec(model=model, size=label, **rest)
