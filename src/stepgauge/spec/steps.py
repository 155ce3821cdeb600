"""Converts between the specs of a training step: one device, data parallel, or any layout."""

import dataclasses
from collections.abc import Collection
from typing import Any

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import as_kind, naming_fields
from stepgauge.spec.layout import Layout, require_data_axis
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.options import Values
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec, WorkSpec

AnyStep = StepSpec | DataParallelSpec | LayoutSpec


def work_of(spec: AnyStep | PipelineSpec) -> WorkSpec:
    """Returns the work of one rank as that of a single process; in a pipeline, of a micro-batch."""
    work = as_kind(WorkSpec, spec, batch=spec.micro_batch)
    return dataclasses.replace(work, phases="backward") if isinstance(spec, PipelineSpec) else work


def as_layout_step(spec: AnyStep) -> LayoutSpec:
    """Returns the same step as a spec of `bench layout`."""
    if isinstance(spec, LayoutSpec):
        return spec
    layout = spec.parsed_layout
    return as_kind(LayoutSpec, spec, layout=str(layout), batch=spec.batch * layout.data)


def as_layout_record(record: Record) -> Record:
    """Returns the record of a step as one of `bench layout`: its layout replaces wrapper and ranks, and
    its batch is that of all ranks.

    Options that such steps do not have, such as `phases`, stay if they name a row and are not the
    default. Other records, and ranks that do not communicate, are returned as they are.
    """
    spec = record.spec
    kinds: dict[str, type[AnyStep]] = {kind.kind: kind for kind in (StepSpec, DataParallelSpec)}
    if record.kind not in kinds or spec.get("wrapper") == "none":
        return record
    layout = Layout(data=spec.get("ranks", 1), wrapper=spec.get("wrapper", "none"))
    shared = {field.name for field in dataclasses.fields(LayoutSpec)}

    def tells_rows_apart(field: dataclasses.Field[Any]) -> bool:
        return bool(naming_fields(field)) and spec.get(field.name, field.default) != field.default

    fields = dataclasses.fields(kinds[record.kind])
    others = {f.name for f in fields if f.name not in shared and not tells_rows_apart(f)}
    left_out = {"wrapper", "ranks", *others}
    rest = {name: value for name, value in spec.items() if name not in left_out}
    changed = {"layout": str(layout), "batch": spec["batch"] * layout.data}
    return dataclasses.replace(record, kind=LayoutSpec.kind, spec={**rest, **changed})


def kind_for(layout: Layout, options: Collection[str] = ()) -> type[AnyStep]:
    """Returns the simplest spec that can express the layout and has these options."""
    if not set(layout.sizes) <= {"data"}:
        return LayoutSpec
    simplest: type[AnyStep] = DataParallelSpec if layout.ranks > 1 else StepSpec
    simple_fields, layout_fields = (
        {field.name for field in dataclasses.fields(kind)} for kind in (simplest, LayoutSpec)
    )
    return LayoutSpec if set(options) & (layout_fields - simple_fields) else simplest


def under(layout: Layout, kind: type[AnyStep], values: Values) -> Values:
    """Converts the option values of a layout step to those of `kind`, for this layout.

    The values' `batch` is that of all ranks. Raises ValueError if the data ranks do not divide it,
    and for a wrapper without a data axis.
    """
    if kind is LayoutSpec:
        return {**values, "layout": (str(layout),)}
    if kind is StepSpec:
        require_data_axis(layout)
        return values
    batches = tuple(_rank_batch(batch, layout) for batch in values.get("batch", ()))
    shared = {"batch": batches} if batches else {}
    return {**values, **shared, "ranks": (layout.data,), "wrapper": (layout.wrapper,)}


def _rank_batch(batch: int, layout: Layout) -> int:
    if batch % layout.data:
        raise ValueError(
            f"batch is {batch}, which {layout.data} data ranks do not divide; choose a multiple of "
            f"{layout.data}"
        )
    return batch // layout.data
