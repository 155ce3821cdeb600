"""`stepgauge predict`: predicts the rows that a bench command would measure on another machine."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stepgauge.cli.console import Format, counted, info, print_points, print_records, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import DEVICE_OF_FILE, RunFailedError, hardware_argument, with_device_of
from stepgauge.cost.rates.estimate import with_spread
from stepgauge.cost.traced.traceable import TracedSpec, has_formulas
from stepgauge.spec.bert import BERT_SIZES, BertSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.kinds import COMMANDS
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import combinations, flag_of, options_of, written
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline.schedules import DEFAULT_PER_RANK
from stepgauge.spec.step import StepSpec
from stepgauge.spec.steps import AnyStep, as_layout_step, kind_for, under
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.predicted import predicted

OPTIONS = options_of(LayoutSpec, StepSpec, ModelSpec)


@spec_options(
    LayoutSpec,
    StepSpec,
    ModelSpec,
    BertSpec,
    sweep=True,
    defaults={"size": "small", "device": DEVICE_OF_FILE, "batch": StepSpec.batch},
)
def predict(
    *,
    values: Values,
    hardware: Annotated[
        Path,
        Parameter(
            help="Hardware file of a calibrated machine, or its name, such as dgx-h100.",
            converter=hardware_argument,
        ),
    ],
    terms: Annotated[
        bool, Parameter(help="Also print all terms of each row's time and memory.")
    ] = False,
    hides: Annotated[
        bool,
        Parameter(
            help="Also print, by closed formula, whether each axis's communication is hidden."
        ),
    ] = False,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Predict training steps on a calibrated machine that you need not have.

    This needs no torch, except for networks that have no formulas, such as your own (--model
    FILE.py:factory).

    The batch is the global batch of all ranks, whatever the layout. Each prediction is a sum of
    named terms, measured at calibrated shapes or interpolated between them; nothing is scaled to fit.
    Rows that cannot be predicted are listed with the reason; the others are shown.

    Rows have the columns of the command that would measure them. That is bench step; for a --layout
    with only a data axis bench data-parallel, which shows the batch of one rank; for any other layout
    or --accumulation bench layout; and for a lone pipeline axis with --phases backward bench pipeline.
    A table of whole steps of several commands has the columns of bench layout; JSON does not.
    """
    file = HardwareFile.read(hardware)
    refused: dict[str, str] = {}
    requested = _requested(with_device_of(file, values))
    specs = _accepted(spec_of, requested, refused)
    if format != "json":
        specs = dict(zip(specs, in_one_table([*specs.values()]), strict=True))
    _announce_traces([*specs.values()])
    predictions = _accepted(lambda spec: with_spread(predicted(spec, file)), specs, refused)
    _report_refused(refused, len(requested))
    records = [*predictions.values()]
    print_records(records, format)
    if terms and format != "json":  # the records printed as JSON contain them
        from stepgauge.report.names import labels
        from stepgauge.report.predict import memory_table, terms_table

        for label, record in zip(labels(records), records, strict=True):
            print_table(terms_table(record, label), format)
            if "memory" in record.tables:
                print_table(memory_table(record, label), format)
    if hides and format == "table":
        for name in predictions:
            _print_hiding(_whole_step(specs[name]), file)
    if refused:
        raise RunFailedError(f"{len(refused)} of {len(requested)} rows were not predicted")


def _requested(values: Values) -> dict[str, Values]:
    """Returns the options of each row, one value each, by the row's name: what tells it from others."""
    rest = {name: given for name, given in values.items() if name != "layout"}
    several = {n: OPTIONS[n] for n, given in rest.items() if len(given) > 1}
    rows = {}
    for layout, chosen in itertools.product(values.get("layout", ("none",)), combinations(rest)):
        named = (f"{flag_of(each)}={written(each, chosen[n])}" for n, each in several.items())
        name = " ".join([layout, *named])
        rows[name] = {"layout": (layout,), **{each: (value,) for each, value in chosen.items()}}
    return rows


def _accepted(
    function: Callable[[Any], Any], rows: Mapping[str, Any], refused: dict[str, str]
) -> dict[str, Any]:
    """Returns the function's result for each row. Adds to `refused` why the other rows have none."""
    results = {}
    for name, row in rows.items():
        try:
            results[name] = function(row)
        except ValueError as error:
            refused[name] = str(error)
    return results


def _announce_traces(specs: Sequence[object]) -> None:
    """Prints how many rows are about to be traced, because large networks take up to a minute each."""
    if count := sum(isinstance(s, TracedSpec) and not has_formulas(s) for s in specs):
        info(f"tracing the step of {counted(count, 'row')}: seconds to a minute each")


def _report_refused(refused: Mapping[str, str], num_rows: int) -> None:
    """Prints why rows are not predicted. Raises ValueError if one reason refuses all of them."""
    if len(refused) == num_rows and len(set(refused.values())) == 1:
        raise ValueError(*set(refused.values()))
    for name, reason in refused.items():
        info(f"{name}: not predicted, {reason}")


def _print_hiding(spec: LayoutSpec, file: HardwareFile) -> None:
    """Prints whether each axis's communication hides behind computation."""
    from stepgauge.cost.planning.hiding import overlaps, scales
    from stepgauge.cost.rates.machine import CalibratedMachine
    from stepgauge.report.plan import magnitudes, overlap_sentence

    machine = CalibratedMachine(file.on_ranks(spec.ranks))
    sentences = [overlap_sentence(each) for each in overlaps(spec, machine)]
    points = [magnitudes(scales(spec)), *(sentences or ["nothing is sent"])]
    print_points(f"{spec.layout}, {spec.size}", points)


def _whole_step(spec: AnyStep | PipelineSpec) -> LayoutSpec:
    """Returns the spec as a layout's. Raises ValueError for a step of a user's model, whose shape is
    not known, and for bench pipeline's rows, which are no whole steps.
    """
    if isinstance(spec.model, UserModel) or isinstance(spec, PipelineSpec):
        raise ValueError("--hides needs whole steps of a preset: leave --model and --phases out")
    return as_layout_step(spec)


def spec_of(row: Values) -> Any:
    """Returns the spec of the command that measures the row's layout. Raises ValueError for options
    that the command does not have, and for a batch that the data ranks cannot share.
    """
    layout = Layout.parse(row["layout"][0])
    values = {name: value for name, value in row.items() if name != "layout"}
    if "model" in values:  # its factory brings the batch
        values = {name: value for name, value in values.items() if name != "batch"}
    is_bert = bool(set(values.get("size", ())) & set(BERT_SIZES))
    kind: type[Any] = LayoutSpec if is_bert else kind_for(layout, values)
    if set(layout.sizes) == {"pipeline"} and values.get("phases") == ("backward",) and not is_bert:
        kind = PipelineSpec
        values = {name: value for name, value in values.items() if name != "phases"}
    known = {field.name for each in (kind, ModelSpec) for field in fields(each)}
    for name in values:
        if name not in known and name not in ("size", "hf_config"):
            raise ValueError(
                f"{name} is not an option of {COMMANDS[kind.kind]}, which measures such rows"
            )
    if kind is not PipelineSpec:
        return expand(kind, under(layout, kind, values))[0]
    layout_values: Values = {
        "ranks": (layout.pipeline,),
        "schedule": (layout.schedule,),
        "micro_batches": (layout.microbatches,),
        "per_rank": (layout.per_rank or DEFAULT_PER_RANK,),
    }
    return expand(kind, {**values, **layout_values})[0]


def in_one_table(specs: list[Any]) -> list[Any]:
    """Returns the specs of whole steps as those of bench layout, if several commands measure them and it
    can express them; otherwise there is a table for each command.
    """
    is_one_kind = len({type(spec) for spec in specs}) == 1
    if is_one_kind or any(isinstance(spec, PipelineSpec) for spec in specs):
        return specs
    try:
        return [as_layout_step(spec) for spec in specs]
    except ValueError:  # only bench data-parallel records a step of a data axis as a CUDA graph
        return specs
