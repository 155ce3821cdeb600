"""What tells records apart, and how a row is named: `key=value` of the fields that vary."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgauge.spec.fields import naming_fields
from stepgauge.spec.kinds import declarations
from stepgauge.spec.options import SHAPE, written
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel

# Spec fields that are columns even where all rows share them.
ALWAYS = ("size", "wrapper", "layout", "precision", "compile")
MOST_LETTERS = 60  # of a value that names a row


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Nested specs as one level of fields; the outer one wins where names meet. The size of a
    user's network is its file and factory.
    """
    inner: dict[str, Any] = {}
    outer: dict[str, Any] = {}
    for name, value in spec.items():
        if isinstance(value, Mapping):
            inner |= flatten(value)
        else:
            outer[name] = value
    flat = inner | outer
    if flat.get("network") == UserModel.network and flat["file"] and "size" in flat:
        flat["size"] = f"{Path(flat['file']).name}:{flat.pop('factory')}"
    return flat


def differing(records: Sequence[Record]) -> list[str]:
    """Spec fields whose values differ, without the shape where the size names it, and without long texts
    where the others tell rows apart.

    A field that only networks of one kind have is compared between those.
    """
    specs = [flatten(record.spec) for record in records]
    fields = dict.fromkeys(name for spec in specs for name in spec)
    nested = {name for record in records for name in _nested_fields(record)}
    differs = []
    for name in fields:
        having = [spec for spec in specs if name in spec] if name in nested else specs
        if _num_values(having, [name]) > 1:
            differs.append(name)
    if _sizes_name_shapes(specs):
        differs = [name for name in differs if name not in SHAPE]
    short = [name for name in differs if _longest(specs, name) <= MOST_LETTERS]
    return short if _num_values(specs, short) == _num_values(specs, differs) else differs


def _longest(specs: Sequence[Mapping[str, Any]], field: str) -> int:
    return max(len(str(spec.get(field, ""))) for spec in specs)


def _num_values(specs: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> int:
    """How many combinations of values these fields have in the specs."""
    return len({tuple(str(spec.get(name)) for name in fields) for spec in specs})


def _sizes_name_shapes(specs: Sequence[Mapping[str, Any]]) -> bool:
    """Whether networks of one size have one shape."""
    if any(spec.get("size") == "custom" for spec in specs):
        return False
    return _num_values(specs, ["size", *SHAPE]) == _num_values(specs, ["size"])


def _nested_fields(record: Record) -> set[str]:
    """The fields of the nested specs."""
    parts = (part for part in record.spec.values() if isinstance(part, Mapping))
    return {name for part in parts for name in flatten(part)}


def varying(records: Sequence[Record]) -> list[str]:
    """The columns that name rows: ALWAYS, a custom network's shape, and the fields that differ."""
    fields = {name for record in records for name in flatten(record.spec)}
    is_custom = any(flatten(record.spec).get("size") == "custom" for record in records)
    first = [name for name in ALWAYS if name in fields]
    return list(dict.fromkeys([*first, *(SHAPE if is_custom else ()), *differing(records)]))


def declared_fields(record: Record) -> list[Any]:
    """The fields of the record's specs, as they are declared."""
    return [
        field
        for declared in declarations(record.kind, record.spec)
        for field in dataclasses.fields(declared)
    ]


def pair(record: Record, field: str) -> str:
    """`key=value`, the key as the command line spells it."""
    known = {each.name: each for each in declared_fields(record)}
    spec = flatten(record.spec)
    value = spec.get(field)
    if field == "size" and spec.get("network") == UserModel.network:
        return f"model={value}"
    if field not in known or value is None:
        return f"{field}={value}"
    return f"{known[field].metadata.get('flag') or field}={written(known[field], value)}"


def naming(record: Record) -> tuple[list[str], list[str]]:
    """The fields that name the record, and those that would but are at their default. A custom
    network is named by its shape.
    """
    spec = flatten(record.spec)
    implied = SHAPE if spec.get("size") != "custom" else ()  # by a preset
    first = declarations(record.kind, record.spec)[:1]
    shown = [name for declared in first for name in getattr(declared, "shape", ())]
    default: list[str] = []
    for field in declared_fields(record):
        names = naming_fields(field)
        if field.name in implied or not spec.keys() >= {field.name, *names}:
            continue
        value = spec[field.name]
        is_hidden = field.metadata.get("label") == "changed" and value == field.default
        is_hidden |= (field.name, value) == ("size", "custom")
        has_no_bytes = field.name.endswith("_bytes") and value == 0  # such as a barrier
        if is_hidden or has_no_bytes:
            default += names
        else:
            shown += names
    return list(dict.fromkeys(shown)), default


def describe(record: Record) -> str:
    """Kind and `key=value` of the fields that name the record."""
    return " ".join([record.kind, *(pair(record, field) for field in naming(record)[0])])


def labels(records: Sequence[Record]) -> list[str]:
    """Each row by `key=value` of the fields in which rows of its kind vary, after its kind where
    kinds differ.

    Fields that are labels only where changed are left out at their default, if the rest still tells
    the rows apart. A row that nothing tells from the others is named by `describe`.
    """
    kinds = dict.fromkeys(record.kind for record in records)
    of_kind = {kind: [r for r in records if r.kind == kind] for kind in kinds}
    named = {kind: iter(_pairs(group)) for kind, group in of_kind.items()}
    found = []
    for record in records:
        pairs = next(named[record.kind])
        prefix = [record.kind] if len(kinds) > 1 else []
        found.append(" ".join([*prefix, *pairs]) if pairs else describe(record))
    return found


def _pairs(records: Sequence[Record]) -> list[list[str]]:
    """The pairs that name each of these records of one kind."""
    fields = _telling(records)
    whole, brief = [], []
    for record in records:
        spec, default = flatten(record.spec), naming(record)[1]
        own = [field for field in fields if field in spec]
        whole.append([pair(record, field) for field in own])
        brief.append([pair(record, field) for field in own if field not in default])
    if len(set(map(tuple, brief))) == len(set(map(tuple, whole))):  # as much is told
        shown = [some or every for some, every in zip(brief, whole, strict=True)]
    else:
        shown = whole
    if len({record.provenance for record in records}) > 1:
        shown = [[*pairs, r.provenance] for pairs, r in zip(shown, records, strict=True)]
    return shown


def _telling(records: Sequence[Record]) -> list[str]:
    """The fields that tell rows apart, ALWAYS first; how a row is measured only where it must."""
    differs = differing(records)
    first = [name for name in ALWAYS if name in differs]
    ordered = list(dict.fromkeys([*first, *differs]))
    names = {name for record in records for fields in naming(record) for name in fields}
    named = [name for name in ordered if name in names]
    specs = [flatten(record.spec) for record in records]
    is_enough = _num_values(specs, named) == _num_values(specs, ordered)
    return named if is_enough else ordered


@dataclasses.dataclass(frozen=True)
class Shared:
    """What is the same for all records of one kind.

    text    `key=value` of the fields that name a row
    fields  those fields
    default naming fields that have their hidden default in all records
    """

    text: str
    fields: Sequence[str]
    default: Sequence[str]

    def columns(self) -> frozenset[str]:
        """The columns that the text makes superfluous for people."""
        return frozenset(name.replace("_", " ") for name in (*self.fields, *self.default))


def shared(records: Sequence[Record]) -> Shared:
    if not records:
        return Shared("", (), ())
    first, *others = (flatten(record.spec) for record in records)
    same = {
        name for name, value in first.items() if all(spec.get(name) == value for spec in others)
    }
    names, defaults = naming(records[0])
    shown = [name for name in names if name in same]
    text = ", ".join(pair(records[0], name) for name in shown)
    return Shared(text, shown, [name for name in defaults if name in same])
