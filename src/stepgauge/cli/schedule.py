"""`stepgauge schedule show|check|simulate`: pipeline schedules. Needs neither torch nor a GPU."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.text import Text

from stepgauge.cli.console import Output, info, print_table, write_file
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.report.pipeline_steps import COUNTED, Step, wide_tracks
from stepgauge.report.schedule import drawing, legend, rank_table
from stepgauge.report.standalone import standalone
from stepgauge.spec.pipeline import TORCH_SCHEDULES
from stepgauge.spec.plan.pipeline import (
    SCHEDULES,
    Checked,
    Schedule,
    build,
    check,
    from_csv,
    from_json,
    from_text,
    to_csv,
    to_json,
    to_text,
)
from stepgauge.spec.plan.pipeline.text import without_comments

app = App(name="schedule", help="Show, check and simulate a pipeline schedule.")

Form = Annotated[Literal["text", "csv", "json"], Parameter(help="Output format.")]
Which = Annotated[
    str,
    Parameter(
        help=f"{', '.join(SCHEDULES)}, or a file as `schedule show` prints it: text, JSON or CSV in "
        "torch's format."
    ),
]
PER_RANK = "[default: 1 / stages per rank]"
# Background of an action: forward, whole backward, gradient of the input, gradient of the weights.
COLOURS = {
    "F": "black on blue",
    "B": "black on green",
    "I": "black on cyan",
    "W": "black on yellow",
}
WRITERS = {"text": to_text, "csv": to_csv, "json": to_json}


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Shape:
    """The size of a schedule; None means the default."""

    ranks: Annotated[
        int | None,
        Parameter(help="Pipeline ranks; must match a file's. [default: 4, or the file's]"),
    ] = None
    microbatches: Annotated[
        int | None,
        Parameter(help="Micro-batches per step; must match a file's. [default: 8, or the file's]"),
    ] = None
    per_rank: Annotated[
        int | None, Parameter(help="Stages per rank of interleaved and izb. [default: 2]")
    ] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


DEFAULT_SHAPE = Shape()


@app.command
def show(
    which: Which,
    *,
    shape: Shape = DEFAULT_SHAPE,
    lowered: Annotated[
        bool, Parameter(help="Also print sends, receives and gradient reductions.")
    ] = False,
    format: Form = "text",
) -> None:
    """Print a schedule, one line per rank.

    An action such as 0F3 is the stage, what it computes, and the micro-batch: F forward, B backward,
    or its two halves I (gradient of the input) and W (gradient of the weights).
    """
    schedule = load(which, shape)
    schedule = check(schedule).schedule if lowered else schedule
    print(WRITERS[format](schedule), end="")


@app.command(name="check")
def check_(
    which: Which,
    *,
    shape: Shape = DEFAULT_SHAPE,
    bound: Annotated[
        float | None,
        Parameter(
            help="Fail if a rank holds more activations than this, in pairs of micro-batch and stage."
        ),
    ] = None,
    format: Form = "text",
) -> None:
    """Prove that a schedule can run, and print how many activations each rank holds.

    If it cannot run, the error names the actions that block each other. most held is the most pairs of
    micro-batch and stage that a rank holds at once, from F to B or W; in flight counts those from F to
    B or I, W pending those from I to W.
    """
    checked = check(load(which, shape), bound=bound)
    durations = _durations(checked.schedule)
    table = rank_table(simulate(checked.schedule, durations), checked)
    if format == "text":
        print_table(table)
        within = "" if bound is None else f", within the bound of {bound:g}"
        print(
            f"{PROVEN} A rank holds the activations of at most {max(checked.peak):g} {COUNTED}{within}."
        )
    else:
        print_table(table, format)


PROVEN = (
    "The schedule can run: each stage runs each micro-batch forward and backward once, everything is "
    "sent before it is needed, and there is no deadlock."
)


@app.command(name="simulate")
def simulate_(
    which: Which,
    *,
    shape: Shape = DEFAULT_SHAPE,
    forward: Annotated[
        float | None, Parameter(help=f"ms of a stage's forward pass. {PER_RANK}")
    ] = None,
    input: Annotated[
        float | None, Parameter(help=f"ms of the gradient of its input. {PER_RANK}")
    ] = None,
    weight: Annotated[
        float | None, Parameter(help=f"ms of the gradient of its weights. {PER_RANK}")
    ] = None,
    transfer: Annotated[float, Parameter(help="ms of a transfer between ranks.")] = 0.0,
    host: Annotated[float, Parameter(help="ms that the host needs to launch an action.")] = 0.0,
    stage_weights: Annotated[
        str,
        Parameter(help="Relative durations of the stages, such as 1,1,1,1.1. [default: 1 each]"),
    ] = "",
    fill: Annotated[
        bool, Parameter(help="Move each W action to where its rank would be idle.")
    ] = False,
    write: Annotated[
        Path | None,
        Parameter(help="Also write the schedule to a file: .csv, .json, or text."),
    ] = None,
    report: Annotated[Path | None, Parameter(help="Also write an SVG of the timeline.")] = None,
    format: Form = "text",
) -> None:
    """Simulate a schedule: draw its timeline and print each rank's bubble.

    By default all schedules do the same work: 1 ms of forward, input and weight per rank and
    micro-batch, divided among the stages of the rank.

    peak, or most held, is the most pairs of micro-batch and stage that a rank holds at once, from F to
    B or W; in flight counts those from F to B or I, W pending those from I to W. busy is the time in
    which a rank computes, and × ideal the step divided by the ranks' mean of it.
    """
    schedule = load(which, shape)
    check(schedule)
    durations = _durations(
        schedule,
        forward=forward,
        input=input,
        weight=weight,
        transfer=transfer,
        host_ms=host,
        weights=_stage_weights(stage_weights, schedule.num_stages),
    )
    schedule = fill_bubbles(schedule, durations) if fill else schedule
    checked = check(schedule)
    timeline = simulate(checked.schedule, durations)
    if write is not None:
        writer = WRITERS.get(write.suffix.removeprefix("."), to_text)
        write_file(writer(schedule), write, "schedule")
    if format == "json":
        print(json.dumps(_as_json(timeline)))
    elif format == "csv":
        print_table(rank_table(timeline, checked), "csv")
    else:
        _draw(timeline, checked)
    if report is not None:
        drawn = wide_tracks({checked.schedule.name: Step.counted(timeline)})
        write_file(standalone(drawn), report, "picture")


def load(which: str, shape: Shape) -> Schedule:
    """Returns the schedule of that name or in that file. Raises ValueError for an unknown schedule, a
    file that cannot be read, or a shape other than the file's.
    """
    if which in SCHEDULES:
        ranks, micro_batches = shape.ranks or 4, shape.microbatches or 8
        return build(which, ranks=ranks, micro_batches=micro_batches, per_rank=shape.per_rank or 0)
    if which in TORCH_SCHEDULES:
        raise ValueError(
            f"schedule is {which!r}, torch's own, which only bench pipeline runs; choose "
            f"{TORCH_SCHEDULES[which]}, the same schedule here"
        )
    path = Path(which)
    if path.is_dir():
        raise ValueError(f"schedule is {which!r}, which is a folder; name a file in it")
    if not path.is_file():
        if path.suffix or len(path.parts) > 1:
            raise ValueError(f"schedule is {which!r}; there is no such file")
        raise ValueError(
            f"schedule is {which!r}; choose one of {', '.join(SCHEDULES)}, or the path of a file"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{which} is not UTF-8 text") from None
    if text.lstrip().startswith("{"):
        read = from_json
    else:
        is_csv = path.suffix == ".csv" or "," in without_comments(text)
        read = from_csv if is_csv else from_text
    schedule = read(text, path.stem)
    counts = {"ranks": schedule.num_ranks, "microbatches": schedule.num_micro_batches}
    for name, count in counts.items():
        if getattr(shape, name) not in (None, count):
            raise ValueError(f"{name} is {getattr(shape, name)}; {which} is for {count}")
    return schedule


def _durations(
    schedule: Schedule,
    *,
    forward: float | None = None,
    input: float | None = None,
    weight: float | None = None,
    **settings: Any,
) -> Durations:
    """Returns the durations of a schedule's stages. A time that is not given is 1 ms divided by the
    stages per rank, so that all schedules do the same work and can be compared.
    """
    share = schedule.num_ranks / schedule.num_stages
    return Durations.of_stages(
        schedule.num_stages,
        forward=share if forward is None else forward,
        input=share if input is None else input,
        weight=share if weight is None else weight,
        **settings,
    )


def _stage_weights(text: str, stages: int) -> list[float]:
    """Reads --stage-weights; empty if it is not given."""
    try:
        weights = [float(part) for part in text.split(",") if part]
    except ValueError:
        weights = [math.nan]
    if not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"stage_weights is {text!r}; it must be numbers above 0, such as 1,1,1,1.1"
        )
    if len(weights) not in (0, stages):
        raise ValueError(f"stage_weights has {len(weights)} values; there are {stages} stages")
    return weights


def _draw(timeline: Timeline, checked: Checked) -> None:
    """Prints two lines per rank: the actions that it runs, and how many activations it holds."""
    output = Output(highlight=False)
    peaks = [f"peak {peak:g}" for peak in checked.peak]
    label_width = max(8, *(len(label) + 1 for label in peaks))
    drawn = drawing(timeline, output.width - label_width)  # a file has 80 columns
    for band in drawn.bands:
        if band.begin_ms:
            output.print(f"\nfrom {band.begin_ms:.4g} ms")
        for rank, ((text, kinds), held) in enumerate(zip(band.actions, band.held, strict=True)):
            line = Text(f"rank {rank}".ljust(label_width))
            for character, kind in zip(text, kinds, strict=True):
                line.append(character, COLOURS.get(kind, "") if output.is_terminal else "")
            output.print(line, soft_wrap=True)
            output.print(Text(peaks[rank].ljust(label_width) + held), soft_wrap=True)
    explained = legend(checked.schedule, has_names=drawn.has_names)
    output.print(f"\n{explained}\n", soft_wrap=True)
    if not drawn.has_names:
        info("there is no room for the numbers of the micro-batches; --report FILE.svg shows them")
    print_table(rank_table(timeline, checked))


def _as_json(timeline: Timeline) -> dict[str, object]:
    spans = [
        {"rank": rank, "action": str(span.action), "start": span.start, "end": span.end}
        for rank, row in enumerate(timeline.ranks)
        for span in row
    ]
    return {
        "step": timeline.step_ms,
        "over_ideal": timeline.over_ideal,
        "bubbles": timeline.bubbles,
        "spans": spans,
    }
