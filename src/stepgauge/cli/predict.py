"""`stepgauge predict`: the rows that a bench command would give on a calibrated machine."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_in, print_points, print_records
from stepgauge.cli.options import Networks, Values, expand, spec_options
from stepgauge.cli.rows import existing_hardware
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline.schedules import DEFAULT_PER_RANK
from stepgauge.spec.step import StepSpec
from stepgauge.spec.steps import AnyStep, as_layout_step, kind_for, under
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import predicted

Hardware = Annotated[
    Path,
    Parameter(
        help="Hardware file of a calibrated machine, or its name: dgx-h100.",
        converter=existing_hardware,
    ),
]


THAT_OF_THE_FILE = "that of the file"


@spec_options(
    LayoutSpec,
    StepSpec,
    Networks,
    sweep=True,
    defaults={"size": "small", "device": THAT_OF_THE_FILE, "batch": StepSpec.batch},
)
def predict(
    *,
    values: Values,
    hardware: Hardware,
    terms: Annotated[bool, Parameter(help="Print every term of every row, too.")] = False,
    hides: Annotated[
        bool,
        Parameter(help="Print by closed formula whether what each axis sends hides, too."),
    ] = False,
    format: Annotated[Format, Parameter(help="How the rows are printed.")] = "table",
) -> None:
    """Predict training steps on a machine that was calibrated, without it and without torch.

    The batch is that of all ranks, whatever the layout. The rows have the columns of the command
    that measures them, and are marked as modelled: of bench step; with --layout of a data axis alone
    of bench data-parallel, which shows a rank's part of the batch; with any other, or --accumulation, of
    bench layout; of
    a pipeline alone with --phases backward of bench pipeline. Each is a sum of named terms, from calibrated shapes or
    interpolated between them; nothing is scaled to fit.
    """
    file = HardwareFile.read(hardware)
    texts = values.get("layout", ("none",))
    rest = {name: value for name, value in values.items() if name != "layout"}
    if rest["device"] == (THAT_OF_THE_FILE,):
        rest["device"] = (file.device_kind,)
    specs = [spec for text in texts for spec in specs_of(Layout.parse(text), rest)]
    records = [predicted(spec, file) for spec in specs]
    print_records(records, format)
    if terms and format != "json":  # whose records have them
        from stepgauge.report.names import labels
        from stepgauge.report.predict import memory_table, terms_table

        for label, record in zip(labels(records), records, strict=True):
            print_in(format, terms_table(record, label))
            if "memory" in record.tables:
                print_in(format, memory_table(record, label))
    if hides and format == "table":
        for spec in specs:
            _print_what_hides(_whole_step(spec), file)


def _print_what_hides(spec: LayoutSpec, file: HardwareFile) -> None:
    from stepgauge.cost.planning.hiding import overlaps, scales
    from stepgauge.cost.rates.machine import CalibratedMachine
    from stepgauge.report.plan import magnitudes

    sentences = [o.sentence for o in overlaps(spec, CalibratedMachine(file.on_ranks(spec.ranks)))]
    points = [magnitudes(scales(spec)), *(sentences or ["nothing is sent"])]
    print_points(f"{spec.layout}, {spec.size}", points)


def _whole_step(spec: AnyStep | PipelineSpec) -> LayoutSpec:
    """Raises ValueError for a step of a user's model, whose shape is not known, and for a pipeline
    alone.
    """
    if isinstance(spec.model, UserModel) or isinstance(spec, PipelineSpec):
        raise ValueError("--hides takes whole steps of a preset: leave --model and --phases out")
    return as_layout_step(spec)


def specs_of(layout: Layout, values: Values) -> list[Any]:
    """The rows of the command that measures a layout. Raises ValueError for options that it does
    not have, and for a batch that data ranks cannot share.
    """
    if "model" in values:  # which brings the batch of a rank
        values = {name: value for name, value in values.items() if name != "batch"}
    is_bert = bool(set(values.get("size", ())) & set(BertSpec.preset_names()))
    kind: type = LayoutSpec if is_bert else kind_for(layout, values)
    if set(layout.sizes) == {"pipeline"} and values.get("phases") == ("backward",) and not is_bert:
        kind = PipelineSpec
        values = {name: value for name, value in values.items() if name != "phases"}
    known = {field.name for each in (kind, ModelSpec) for field in fields(each)}
    for name in values:
        if name not in known and name not in ("size", "hf_config"):
            raise ValueError(f"{name} is no option of a row of {COMMANDS[kind]}")
    if kind is not PipelineSpec:
        return expand(kind, under(layout, kind, values), network=Networks)
    of_layout: Values = {
        "ranks": (layout.pipeline,),
        "schedule": (layout.schedule,),
        "micro_batches": (layout.microbatches,),
        "per_rank": (layout.per_rank or DEFAULT_PER_RANK,),
    }
    return expand(kind, {**values, **of_layout}, network=Networks)


COMMANDS = {
    StepSpec: "bench step",
    DataParallelSpec: "bench data-parallel",
    PipelineSpec: "bench pipeline",
    LayoutSpec: "bench layout",
}
