"""Names of table rows: `key=value` of the spec fields that tell records apart."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgauge.spec.fields import naming_fields
from stepgauge.spec.kinds import declarations
from stepgauge.spec.options import SHAPE, written
from stepgauge.spec.record import Record
from stepgauge.spec.steps import as_layout_record
from stepgauge.spec.user_model import UserModel

# Spec fields that are columns even if all rows have the same value.
ALWAYS = ("size", "wrapper", "layout", "precision", "compile")
MAX_VALUE_CHARACTERS = 60  # a field with a longer value names rows only if no other fields do


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested specs as one flat dict. If names clash, the outer spec's value wins. The size of
    a user's network becomes `file:factory`; it has no `batch`, because its file chooses one.
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
        flat.pop("batch", None)
    return flat


def differing_fields(records: Sequence[Record]) -> list[str]:
    """Returns the spec fields whose values differ between the records.

    Leaves out the model's shape if the size implies it. Leaves out fields with long values, and the
    digest and path of users' files, if the others are enough to tell the rows apart. A field of a
    nested spec is compared only between the records that have it.
    """
    specs = [flatten(record.spec) for record in records]
    fields = dict.fromkeys(name for spec in specs for name in spec)
    nested = {name for record in records for name in _nested_fields(record)}
    differs = []
    for name in fields:
        compared = [spec for spec in specs if name in spec] if name in nested else specs
        if _num_combinations(compared, [name]) > 1:
            differs.append(name)
    if _sizes_imply_shapes(specs):
        differs = [name for name in differs if name not in SHAPE]
    long = [
        name
        for name in differs
        if max(len(str(spec.get(name, ""))) for spec in specs) > MAX_VALUE_CHARACTERS
    ]
    for unwanted in (long, ["content"], ["file"]):
        rest = [name for name in differs if name not in unwanted]
        if _num_combinations(specs, rest) == _num_combinations(specs, differs):
            differs = rest
    return differs


def _num_combinations(specs: Sequence[Mapping[str, Any]], fields: Sequence[str]) -> int:
    """Returns how many different combinations of values the fields take in the specs."""
    return len({tuple(str(spec.get(name)) for name in fields) for spec in specs})


def _sizes_imply_shapes(specs: Sequence[Mapping[str, Any]]) -> bool:
    """True if all networks with the same size name have the same shape."""
    if any(spec.get("size") == "custom" for spec in specs):
        return False
    return _num_combinations(specs, ["size", *SHAPE]) == _num_combinations(specs, ["size"])


def _nested_fields(record: Record) -> set[str]:
    parts = (part for part in record.spec.values() if isinstance(part, Mapping))
    return {name for part in parts for name in flatten(part)}


def identifying_fields(records: Sequence[Record]) -> list[str]:
    """Returns the fields that become columns: ALWAYS, a custom network's shape, and the fields that
    differ.
    """
    specs = [flatten(record.spec) for record in records]
    is_custom = any(spec.get("size") == "custom" for spec in specs)
    first = [name for name in ALWAYS if any(name in spec for spec in specs)]
    return list(dict.fromkeys([*first, *(SHAPE if is_custom else ()), *differing_fields(records)]))


def declared_fields(record: Record) -> list[Any]:
    """Returns the dataclass fields of the record's specs."""
    return [
        field
        for declared in declarations(record.kind, record.spec)
        for field in dataclasses.fields(declared)
    ]


def key_value(record: Record, field: str) -> str:
    """Returns `key=value`, the key as the command line spells it."""
    declared = {each.name: each for each in declared_fields(record)}
    spec = flatten(record.spec)
    value = spec.get(field)
    if field == "size" and spec.get("network") == UserModel.network:
        return f"model={value}"
    if field not in declared or value is None:
        return f"{field}={value}"
    return f"{declared[field].metadata.get('flag') or field}={written(declared[field], value)}"


def network_name(record: Record, records: Sequence[Record]) -> str:
    """Returns `size=nano`. A custom network has the fields of its shape that differ between the
    records; "" if none does.
    """
    if flatten(record.spec)["size"] != "custom":
        return key_value(record, "size")
    differing = differing_fields(records)
    return " ".join(key_value(record, name) for name in differing if name in SHAPE)


def label_fields(record: Record) -> tuple[list[str], list[str]]:
    """Returns the fields that name the record, and those that are left out because they have their
    default value. A custom network is named by its shape.
    """
    spec = flatten(record.spec)
    implied = SHAPE if spec.get("size") != "custom" else ()
    first = declarations(record.kind, record.spec)[:1]
    shown = [name for declared in first for name in getattr(declared, "shape", ())]
    default: list[str] = []
    declared = declared_fields(record)
    for field in declared:
        names = naming_fields(field)
        if field.name in implied or not spec.keys() >= {field.name, *names}:
            continue
        value = spec[field.name]
        is_hidden = field.metadata.get("label") == "changed" and value == field.default
        is_hidden |= (field.name, value) == ("size", "custom")
        has_no_bytes = field.name.endswith("_bytes") and value == 0  # a barrier, for example
        if is_hidden or has_no_bytes:
            default += names
        else:
            shown += names
    if declared:  # `as_layout_record` keeps an undeclared field only if it tells the row apart
        known = {field.name for field in declared}
        shown += [name for name in spec if name not in known]
    return list(dict.fromkeys(shown)), default


def describe(record: Record) -> str:
    """Returns the record's kind and `key=value` of every field that names it."""
    parts = (key_value(record, field) for field in label_fields(record)[0])
    return " ".join([record.kind, *parts])


def labels(records: Sequence[Record]) -> list[str]:
    """Returns a label for each record: `key=value` of the fields that differ within its kind. If there
    are several kinds, the kind comes first, unless the label begins with it: "layout=dp2 zero1".

    Leaves out values that are defaults if the rest still tells the rows apart. If nothing differs,
    the label is that of `describe`.
    """
    kinds = dict.fromkeys(record.kind for record in records)
    of_kind = {kind: [r for r in records if r.kind == kind] for kind in kinds}
    parts_of = {kind: iter(_label_parts(group)) for kind, group in of_kind.items()}
    result = []
    for record in records:
        label = " ".join(next(parts_of[record.kind]))
        if label and len(kinds) > 1 and not label.startswith(f"{record.kind}="):
            label = f"{record.kind} {label}"
        result.append(label or describe(record))
    return result


def layout_labels(records: Sequence[Record]) -> list[str]:
    """Returns labels that name every training step by its layout, whichever command it is of, so that
    steps of one process, data parallel steps and others can be told apart by what a user typed:
    "layout=dp2 zero1". The batch is that of all ranks.
    """
    return labels([as_layout_record(record) for record in records])


def _label_parts(records: Sequence[Record]) -> list[list[str]]:
    """Returns the `key=value` parts of each record's label. All records have the same kind."""
    fields = _distinguishing_fields(records)
    complete, brief = [], []
    for record in records:
        spec, default = flatten(record.spec), label_fields(record)[1]
        own = [field for field in fields if field in spec]
        complete.append([key_value(record, field) for field in own])
        brief.append([key_value(record, field) for field in own if field not in default])
    if len(set(map(tuple, brief))) == len(set(map(tuple, complete))):
        shown = [some or every for some, every in zip(brief, complete, strict=True)]
    else:
        shown = complete
    if len({record.provenance for record in records}) > 1:
        shown = [[*parts, r.provenance] for parts, r in zip(shown, records, strict=True)]
    return shown


def _distinguishing_fields(records: Sequence[Record]) -> list[str]:
    """Returns the fields that tell the records apart, those of ALWAYS first. Fields that say how a row
    is measured, not what, are included only if the others are not enough.
    """
    differs = differing_fields(records)
    first = [name for name in ALWAYS if name in differs]
    ordered = list(dict.fromkeys([*first, *differs]))
    names = {name for record in records for fields in label_fields(record) for name in fields}
    named = [name for name in ordered if name in names]
    specs = [flatten(record.spec) for record in records]
    is_enough = _num_combinations(specs, named) == _num_combinations(specs, ordered)
    return named if is_enough else ordered


@dataclasses.dataclass(frozen=True)
class Shared:
    """The values that all records of one kind have in common.

    text    `key=value` of the shared fields that name a row
    fields  those fields
    default fields with their default value in all records, which the text leaves out
    """

    text: str
    fields: Sequence[str]
    default: Sequence[str]

    def columns(self) -> frozenset[str]:
        """Returns the columns that a reader does not need next to the text."""
        return frozenset(name.replace("_", " ") for name in (*self.fields, *self.default))


def shared_values(records: Sequence[Record]) -> Shared:
    if not records:
        return Shared("", (), ())
    first, *others = (flatten(record.spec) for record in records)
    same = {
        name for name, value in first.items() if all(spec.get(name) == value for spec in others)
    }
    names, defaults = label_fields(records[0])
    shown = [name for name in names if name in same]
    text = ", ".join(key_value(records[0], name) for name in shown)
    return Shared(text, shown, [name for name in defaults if name in same])
