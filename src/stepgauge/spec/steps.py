"""Converts between the specs of a training step: one device, data parallel, or any layout."""

import dataclasses
from collections.abc import Collection

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import as_kind
from stepgauge.spec.layout import Layout, require_data_axis
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.options import Values
from stepgauge.spec.pipeline import PipelineSpec
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
