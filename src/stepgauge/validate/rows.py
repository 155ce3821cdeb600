"""Reads lists of steps and layouts to validate: a TOML file, or options with several layouts.

In a file, each [[rows]] table has `layout` and options of bench step or bench layout, named as flags
(hf-config) or as fields (hf_config). A list of values makes a row for each. [usual] has options of all
rows. `batch` counts the sequences of all ranks, so that layouts with the same batch do the same step.
`expect` says in advance how far the prediction may be off, and why.
"""

import dataclasses
import difflib
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import check_value
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import Values, expand, flag_of, options_of, read
from stepgauge.spec.step import StepSpec
from stepgauge.spec.steps import kind_for, under

OTHER_KEYS = ("layout", "expect")
# Options of the commands that run a row, except those that `layout` determines.
OPTIONS = {
    name: option
    for spec in (LayoutSpec, DataParallelSpec, StepSpec)
    for name, option in options_of(spec, ModelSpec).items()
    if name not in ("layout", "wrapper", "ranks", "trace")
}


@dataclasses.dataclass(frozen=True)
class ValidationRow:
    """A step to validate, and how far its prediction is expected to be off ("" if unknown)."""

    spec: Any
    expect: str = ""


def read_list(path: Path, given: Values) -> list[ValidationRow]:
    """Returns the rows of a file. Options in `given` override the file's.

    Raises ValueError if the file is not such a list, or has an invalid row.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the list {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read the list {path}, which is not TOML: {error}") from None
    if unknown := set(value) - {"usual", "rows"}:
        raise ValueError(f"{path} has {sorted(unknown)[0]!r}; a list has [usual] and [[rows]]")
    usual, tables = value.get("usual", {}), value.get("rows", [])
    if not isinstance(usual, dict):
        raise ValueError(f"{path} has usual, but not as a table: write [usual] above its options")
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ValueError(f"{path} has rows that are not tables: write each under [[rows]]")
    rows = []
    for number, table in enumerate(tables, start=1):
        try:
            rows += _rows_of({**_by_field(usual), **_by_field(table)}, given)
        except ValueError as error:
            raise ValueError(f"row {number} of {path}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no [[rows]]")
    return rows


def _rows_of(table: Mapping[str, Any], given: Values) -> list[ValidationRow]:
    """Returns the rows of one [[rows]] table, one per combination of its values."""
    layouts = _values("layout", table.get("layout", "none"))
    options = {n: _read(n, _values(n, v)) for n, v in table.items() if n not in OTHER_KEYS}
    specs = specs_of({**options, **given}, [str(layout) for layout in layouts])
    return [ValidationRow(spec, str(table.get("expect", ""))) for spec in specs]


def _by_field(table: Mapping[str, Any]) -> dict[str, Any]:
    """Renames keys that are flags to their fields. Raises ValueError for an unknown key."""
    known = {name: name for name in (*OTHER_KEYS, *OPTIONS)}
    known |= {flag_of(option): name for name, option in OPTIONS.items()}
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            every = ", ".join([*OTHER_KEYS, *map(flag_of, OPTIONS.values())])
            hint = f"did you mean {near[0]!r}?" if near else f"it may have {every}"
            raise ValueError(f"a row has no {name!r}; {hint}")
    return {known[name]: value for name, value in table.items()}


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """Returns one value or a list as a tuple. Raises ValueError for an empty list, which has no row."""
    if value == []:
        raise ValueError(f"{name} has no value; give at least one")
    return tuple(value) if isinstance(value, list) else (value,)


def _read(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the values of an option, checked. Raises ValueError for an invalid one."""
    read_values = tuple(read(OPTIONS[name], str(value)) for value in values)
    for value in read_values:
        check_value(OPTIONS[name], value)
    return read_values


def specs_of(values: Mapping[str, tuple[Any, ...]], layouts: Sequence[str]) -> list[Any]:
    """Returns the steps of all values under each layout.

    They are specs of bench step, bench data-parallel or bench layout. Without a batch all have that of
    bench step, so that they do the same step. Raises ValueError for a batch that the data ranks cannot
    share, and for an option that a layout's command does not have.
    """
    specs = []
    for layout in map(Layout.parse, layouts):
        kind = kind_for(layout, values)
        options = options_of(kind, ModelSpec)
        of_kind: Values = {"device": ("auto",)}
        if "model" not in values:  # a user's model brings its batch
            of_kind["batch"] = (StepSpec.batch,)
        for name, given in values.items():
            if name in options:
                of_kind[name] = given
            elif name not in ("seconds", "phases"):
                raise ValueError(f"{name} is no option of a step over {layout.ranks} ranks")
        specs += [spec.canonical() for spec in expand(kind, under(layout, kind, of_kind))]
    return list(dict.fromkeys(specs))


def default_rows(gpus: int) -> list[ValidationRow]:
    """Returns the rows that are validated without a list.

    They are steps of one process, and data parallel layouts over all GPUs or, on a CPU, over two ranks.
    """
    layouts, ranks = ["none"], gpus or 2
    if ranks > 1:
        layouts += [f"dp{ranks} bucketed", f"dp{ranks} zero1"]
    on_gpu: Values = {
        "size": ("small", "medium"),
        "context_length": (512,),
        "precision": ("bf16",),
        "batch": (8,),
    }
    on_cpu: Values = {
        "size": ("nano", "tiny"),
        "context_length": (128,),
        "precision": ("fp32",),
        "batch": (4,),
    }
    return [ValidationRow(spec) for spec in specs_of(on_gpu if gpus else on_cpu, layouts)]
