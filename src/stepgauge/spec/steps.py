"""A training step whichever command measures it: on one device, over a data axis, under a layout."""

import dataclasses
from collections.abc import Collection

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.fields import as_kind
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.options import Values
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.step import StepSpec, WorkSpec

AnyStep = StepSpec | DataParallelSpec | LayoutSpec


def work_of(spec: AnyStep | PipelineSpec) -> WorkSpec:
    """What a rank computes, as one process would be asked for it: of a pipeline a micro-batch."""
    work = as_kind(WorkSpec, spec, batch=spec.micro_batch)
    return dataclasses.replace(work, phases="backward") if isinstance(spec, PipelineSpec) else work


def as_layout_step(spec: AnyStep) -> LayoutSpec:
    """The same step as `bench layout` has it."""
    if isinstance(spec, LayoutSpec):
        return spec
    layout = spec.parsed_layout
    return as_kind(LayoutSpec, spec, layout=str(layout), batch=spec.batch * layout.data)


def kind_for(layout: Layout, options: Collection[str] = ()) -> type[AnyStep]:
    """Which of them has the columns of a layout; of whatever layout, with options that `bench layout`
    alone has, LayoutSpec.
    """
    if not set(layout.sizes) <= {"data"}:
        return LayoutSpec
    usual: type[AnyStep] = DataParallelSpec if layout.ranks > 1 else StepSpec
    own, of_layouts = (
        {field.name for field in dataclasses.fields(kind)} for kind in (usual, LayoutSpec)
    )
    return LayoutSpec if set(options) & (of_layouts - own) else usual


def under(layout: Layout, kind: type[AnyStep], values: Values) -> Values:
    """Options of that kind for steps under the layout; `batch` is that of all ranks. Raises
    ValueError for one that data ranks cannot share.
    """
    if kind is LayoutSpec:
        return {**values, "layout": (str(layout),)}
    if kind is StepSpec:
        return values
    batches = tuple(_rank_batch(batch, layout) for batch in values.get("batch", ()))
    shared = {"batch": batches} if batches else {}
    return {**values, **shared, "ranks": (layout.data,), "wrapper": (layout.wrapper,)}


def _rank_batch(batch: int, layout: Layout) -> int:
    if batch % layout.data:
        raise ValueError(f"batch is {batch}; {layout.data} data ranks cannot share it")
    return batch // layout.data
