"""A list of steps and layouts to validate: a TOML file, or options with several layouts.

In a file each [[rows]] table has options of bench step or bench layout by their names, as flags
(hf-config) or as fields (hf_config), and `layout`; a value that is a list is a row for each, and
[usual] holds what all rows share. `batch` is that of all ranks, so that layouts of one batch do the
same step. `expect` says beforehand what the row is expected to miss, and why.
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

BESIDE = ("layout", "expect")
# Of the commands that run a row; what `layout` says is no option.
OPTIONS = {
    name: option
    for spec in (LayoutSpec, DataParallelSpec, StepSpec)
    for name, option in options_of(spec, ModelSpec).items()
    if name not in ("layout", "wrapper", "ranks", "trace")
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """A step to validate, and what its prediction is expected to miss; "" where nothing."""

    spec: Any
    expect: str = ""


def read_list(path: Path, given: Values) -> list[Asked]:
    """The rows of the file; `given` are options that count more than the file's. Raises ValueError
    for what is no list, or a row that cannot be.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the list {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"cannot read the list {path}, which is no TOML: {error}") from None
    if unknown := set(value) - {"usual", "rows"}:
        raise ValueError(f"{path} has {sorted(unknown)[0]!r}; a list has [usual] and [[rows]]")
    usual, rows, found = value.get("usual", {}), value.get("rows", []), []
    if not isinstance(usual, dict):
        raise ValueError(f"{path} has usual that is no table: write [usual] above its options")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} has rows that are no tables: write each under [[rows]]")
    for number, row in enumerate(rows, start=1):
        try:
            found += _asked({**_by_field(usual), **_by_field(row)}, given)
        except ValueError as error:
            raise ValueError(f"row {number} of {path}: {error}") from None
    if not found:
        raise ValueError(f"{path} has no [[rows]]")
    return found


def _asked(row: Mapping[str, Any], given: Values) -> list[Asked]:
    """A row's steps."""
    layouts = _values("layout", row.get("layout", "none"))
    options = {n: _read(n, _values(n, v)) for n, v in row.items() if n not in BESIDE}
    specs = specs_of({**options, **given}, [str(layout) for layout in layouts])
    return [Asked(spec, str(row.get("expect", ""))) for spec in specs]


def _by_field(table: Mapping[str, Any]) -> dict[str, Any]:
    """By the fields that the names give, which may be flags. Raises ValueError for another name."""
    known = {name: name for name in (*BESIDE, *OPTIONS)}
    known |= {flag_of(option): name for name, option in OPTIONS.items()}
    for name in table:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            every = ", ".join([*BESIDE, *map(flag_of, OPTIONS.values())])
            hint = f"did you mean {near[0]!r}?" if near else f"it may have {every}"
            raise ValueError(f"a row has no {name!r}; {hint}")
    return {known[name]: value for name, value in table.items()}


def _values(name: str, value: Any) -> tuple[Any, ...]:
    """Of one value or a list of them. Raises ValueError for an empty list, whose row would vanish."""
    if value == []:
        raise ValueError(f"{name} has no value; give at least one")
    return tuple(value) if isinstance(value, list) else (value,)


def _read(name: str, values: Sequence[Any]) -> tuple[Any, ...]:
    """The option's values. Raises ValueError for one that it does not take."""
    read_values = tuple(read(OPTIONS[name], str(value)) for value in values)
    for value in read_values:
        check_value(OPTIONS[name], value)
    return read_values


def specs_of(values: Mapping[str, tuple[Any, ...]], layouts: Sequence[str]) -> list[Any]:
    """The steps of all values under each layout: of bench step, bench data-parallel or bench
    layout. Raises ValueError for a batch that data ranks cannot share, and for what a layout's
    command does not have.
    """
    found = []
    for layout in map(Layout.parse, layouts):
        kind = kind_for(layout, values)
        options = options_of(kind, ModelSpec)
        own: Values = {"device": ("auto",)}
        for name, given in values.items():
            if name in options:
                own[name] = given
            elif name not in ("seconds", "phases"):
                raise ValueError(f"{name} is no option of a step over {layout.ranks} ranks")
        if kind is DataParallelSpec:
            own = {"batch": (StepSpec.batch,), **own}
        found += [spec.canonical() for spec in expand(kind, under(layout, kind, own))]
    return list(dict.fromkeys(found))


def usual_rows(gpus: int) -> list[Asked]:
    """What is validated without a list: steps of one process, and layouts of as many ranks as there
    are GPUs, on a CPU of two.
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
    return [Asked(spec) for spec in specs_of(on_gpu if gpus else on_cpu, layouts)]
