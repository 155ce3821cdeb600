"""`stepgauge schedule show|check|simulate`: pipeline schedules, without torch and without a GPU."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.text import Text

from stepgauge.cli import console
from stepgauge.cli.console import Output, print_in, print_table, tell
from stepgauge.cost.pipeline.fill import fill_bubbles
from stepgauge.cost.pipeline.timeline import Durations, Timeline, simulate
from stepgauge.report.pipeline_steps import Step, tracks
from stepgauge.report.schedule import drawing, rank_table
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

app = App(name="schedule", help="Show, check and simulate a pipeline schedule.")

Form = Literal["text", "csv", "json"]
Which = Annotated[
    str,
    Parameter(
        help=f"One of {', '.join(SCHEDULES)}, or a file that show wrote, text, JSON or torch's CSV."
    ),
]
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
    ranks: Annotated[
        int | None, Parameter(help="Ranks; a file must be for as many. [4, or the file's]")
    ] = None
    microbatches: Annotated[
        int | None, Parameter(help="Micro-batches of a step. [8, or the file's]")
    ] = None
    per_rank: Annotated[
        int | None, Parameter(help="Stages a rank of interleaved schedules. [2]")
    ] = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


USUAL = Shape()


@app.command
def show(
    which: Which,
    *,
    shape: Shape = USUAL,
    lowered: Annotated[bool, Parameter(help="With sends, receives and reductions.")] = False,
    format: Form = "text",
) -> None:
    """Print a schedule: a line a rank, of actions such as 0F3."""
    schedule = load(which, shape)
    schedule = check(schedule).schedule if lowered else schedule
    print(WRITERS[format](schedule), end="")


@app.command(name="check")
def check_(
    which: Which,
    *,
    shape: Shape = USUAL,
    bound: Annotated[
        float | None, Parameter(help="Most micro-batches of a stage that a rank may hold.")
    ] = None,
    format: Form = "text",
) -> None:
    """Prove that a schedule can run, and say what each rank holds; else name the actions that
    prove that it cannot.
    """
    found = check(load(which, shape), bound=bound)
    durations = Durations.of_stages(found.schedule.num_stages)
    table = rank_table(simulate(found.schedule, durations), found)
    if format == "text":
        print_table(table)
        print(f"{PROVEN} {_bounded(found, bound)}")
    else:
        print_in(format, table)


PROVEN = (
    "It can run: each stage runs each micro-batch forward and backward once, everything that is read "
    "is sent before, and no action waits for itself."
)


def _bounded(found: Checked, bound: float | None) -> str:
    most = f"A rank holds {max(found.peak):g} micro-batches of a stage at most"
    return f"{most}." if bound is None else f"{most}, within the bound of {bound:g}."


@app.command(name="simulate")
def simulate_(
    which: Which,
    *,
    shape: Shape = USUAL,
    forward: Annotated[float, Parameter(help="ms of a forward of a stage.")] = 1.0,
    input: Annotated[float, Parameter(help="ms of the gradient of its input.")] = 1.0,
    weight: Annotated[float, Parameter(help="ms of the gradient of its weights.")] = 1.0,
    transfer: Annotated[float, Parameter(help="ms of a transfer.")] = 0.0,
    host: Annotated[float, Parameter(help="ms that the host needs to issue an action.")] = 0.0,
    stage_weights: Annotated[
        str,
        Parameter(help="How long each stage takes, such as 1,1,1,1.1. [1 each]"),
    ] = "",
    fill: Annotated[bool, Parameter(help="Place each W anew, where its rank would wait.")] = False,
    write: Annotated[Path | None, Parameter(help="The schedule as text, too.")] = None,
    report: Annotated[Path | None, Parameter(help="An SVG of it, too.")] = None,
    format: Form = "text",
) -> None:
    """Draw when everything runs, with the bubble of each rank."""
    schedule = load(which, shape)
    check(schedule)
    times = {"forward": forward, "input": input, "weight": weight, "transfer": transfer}
    weights = _stage_weights(stage_weights, schedule.num_stages)
    durations = Durations.of_stages(schedule.num_stages, **times, host_ms=host, weights=weights)
    schedule = fill_bubbles(schedule, durations) if fill else schedule
    found = check(schedule)
    timeline = simulate(found.schedule, durations)
    if write is not None:
        console.write(to_text(schedule), write, "schedule")
    _print_timeline(timeline, found, format)
    if report is not None:
        console.write(tracks({found.schedule.name: Step.counted(timeline)}), report, "picture")


def _print_timeline(timeline: Timeline, found: Checked, format: Form) -> None:
    if format == "json":
        print(json.dumps(_values(timeline)))
    elif format == "csv":
        print_in("csv", rank_table(timeline, found))
    else:
        _draw(timeline, found)


def load(which: str, shape: Shape) -> Schedule:
    """The schedule of that name or in that file. Raises ValueError."""
    if which in SCHEDULES:
        ranks, micro_batches = shape.ranks or 4, shape.microbatches or 8
        return build(which, ranks=ranks, micro_batches=micro_batches, per_rank=shape.per_rank or 0)
    path = Path(which)
    if not path.is_file():
        raise ValueError(
            f"schedule is {which!r}; choose one of {', '.join(SCHEDULES)}, or the path of a file"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{which} is no text in UTF-8") from None
    if text.lstrip().startswith("{"):
        read = from_json
    else:
        read = from_csv if "," in text or path.suffix == ".csv" else from_text
    schedule = read(text, path.stem)
    has = {"ranks": schedule.num_ranks, "microbatches": schedule.num_micro_batches}
    for name, count in has.items():
        if getattr(shape, name) not in (None, count):
            raise ValueError(f"{name} is {getattr(shape, name)}; {which} is for {count}")
    return schedule


def _stage_weights(text: str, stages: int) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",") if part]
    except ValueError:
        raise ValueError(
            f"stage_weights is {text!r}; it must be numbers such as 1,1,1,1.1"
        ) from None
    if len(weights) not in (0, stages):
        raise ValueError(f"stage_weights has {len(weights)} values; there are {stages} stages")
    return weights


def _draw(timeline: Timeline, found: Checked) -> None:
    """Two lines a rank: what it computes, and what it holds."""
    output = Output(highlight=False)
    peaks = [f"peak {peak:g}" for peak in found.peak]
    label_width = max(8, *(len(label) + 1 for label in peaks))
    drawn = drawing(timeline, output.width - label_width)  # 80 columns in a file
    for band in drawn.bands:
        if band.begin_ms:
            output.print(f"\nfrom {band.begin_ms:.4g}")
        for rank, ((text, kinds), held) in enumerate(zip(band.actions, band.held, strict=True)):
            line = Text(f"rank {rank}".ljust(label_width))
            for character, kind in zip(text, kinds, strict=True):
                line.append(character, COLOURS.get(kind, "") if output.is_terminal else "")
            output.print(line, soft_wrap=True)
            output.print(Text(peaks[rank].ljust(label_width) + held), soft_wrap=True)
    output.print()
    if not drawn.has_names:
        tell("micro-batches have no room in this width: --report FILE.svg names them")
    print_table(rank_table(timeline, found))


def _values(timeline: Timeline) -> dict[str, object]:
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
