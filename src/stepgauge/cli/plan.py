"""`stepgauge plan`: ranks all layouts of a training run on a machine."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import (
    Format,
    info,
    print_points,
    print_table,
    progress_heard,
)
from stepgauge.cli.option_names import with_option_names
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import DEVICE_OF_FILE, Fresh, Out, hardware_argument, with_device_of
from stepgauge.cli.validate import compare
from stepgauge.cost.planning.doubling import largest_micro_batch, longest_context, longest_of_all
from stepgauge.cost.planning.hiding import overlaps, scales
from stepgauge.cost.planning.planner import (
    Plan,
    candidate_of,
    device_bytes,
)
from stepgauge.cost.rates.estimate import SLOWER_HOST
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import DATA
from stepgauge.cost.traced.traceable import has_formulas
from stepgauge.report.numbers import number
from stepgauge.report.plan import (
    close_to_first,
    joined_notes,
    magnitudes,
    overlap_sentence,
    parts_table,
    plan_table,
    training_run,
)
from stepgauge.report.views import PREDICTED_FOR
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import command_line, options_of
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB, ceil_div
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.planned import planned_by_compile
from stepgauge.validate.rows import ValidationRow


@spec_options(
    PlanSpec,
    ModelSpec,
    sweep={"compile"},
    defaults={"size": "small", "device": DEVICE_OF_FILE},
)
def command(
    *,
    values: Values,
    hardware: Annotated[
        Path,
        Parameter(
            help="Hardware file, calibrated or with published peaks, or its name, such as dgx-h100.",
            converter=hardware_argument,
        ),
    ],
    top: Annotated[int, Parameter(help="Number of layouts to print.")] = 10,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
    verify: Annotated[
        int, Parameter(help="Run this many of the best layouts here, and print prediction errors.")
    ] = 0,
    out: Out = Path("runs/plan"),
    fresh: Fresh = False,
) -> None:
    """Rank all layouts of a training run on a machine that you need not have.

    Data, ZeRO, tensor, context and pipeline axes, micro-batches and checkpointing are screened by
    closed formulas, and the best layouts that fit are simulated. Each row predicts what bench layout
    would measure; --verify runs the best on this machine and prints how far off the predictions are.
    Several values of --compile, such as "off blocks", are ranked together.

    This needs no torch, except for networks that have no formulas. Your own network (--model
    FILE.py:factory) is such a network: torch traces it, without a GPU, for each layout into which it
    can be cut.
    """
    for name, value, least in (("top", top, 1), ("verify", verify, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    file = HardwareFile.read(hardware)
    specs = expand(PlanSpec, with_device_of(file, values))
    machine = CalibratedMachine(file.on_ranks(specs[0].gpus))
    count = max(top, verify)
    with progress_heard("layout") as hear:
        plan = planned_by_compile(specs, file, top=count, tracing=_note_trace, hear=hear)
    spec = next(spec for spec in specs if spec.compile == plan.rows[0].spec["compile"])
    if not (verify and format == "json"):  # JSON output is one document, that of `compare`
        _print_plan(spec, plan, machine, values, top=top, format=format)
    if verify:
        rows = [ValidationRow(each) for each in runnable(spec, plan.rows, verify)]
        print()
        compare(rows, hardware, out=out, fresh=fresh, format=format)


def _note_trace(spec: LayoutSpec) -> None:
    info(f"tracing {spec.layout}, batch {spec.batch}, checkpointing {spec.checkpointing}")


def _print_plan(
    spec: PlanSpec,
    plan: Plan,
    machine: CalibratedMachine,
    values: Values,
    *,
    top: int,
    format: Format,
) -> None:
    """Prints the best layouts and, as tables, their memory, explanations and the first's command."""
    rows = plan.rows[:top]
    if format == "json":
        print(json.dumps([row.to_dict() for row in rows], indent=1, allow_nan=False))
        return
    print_table(plan_table(rows, _caption(spec, plan, machine)), format)
    if format != "table":
        return
    for sentence in filter(None, (training_run(rows, spec.tokens), close_to_first(rows))):
        print(sentence)
    if spec.device != "cpu":
        print()
        print_table(parts_table(rows), complete="json")
    for heading, sentences in _explanations(spec, plan, machine, rows):
        print_points(heading, sentences)
    # On one line, so that it can be copied.
    heading, command = _run_first(command_of(plan.rows[0], values), spec, machine)
    print(f"\n{heading}", f"  {command}", sep="\n")


def _explanations(
    spec: PlanSpec, plan: Plan, machine: CalibratedMachine, shown: Sequence[Record]
) -> Iterator[tuple[str, Iterable[str]]]:
    """Yields headings with sentences. A network without formulas has only the assumptions."""
    best = plan.rows[0]
    if has_formulas(spec):
        layout = LayoutSpec(**{**best.spec, "model": spec.model})
        ratios = [overlap_sentence(ratio) for ratio in overlaps(layout, machine)]
        yield "Communication compared with computation, by formula", [*ratios, *_exposed(best)]
        yield "Orders of magnitude of a micro-batch", [magnitudes(scales(layout))]
        yield "What else fits", _alternatives(spec, plan, machine)
    if plan.refused:
        reasons = [f"{axis}: {with_option_names(why)}" for axis, why in plan.refused.items()]
        yield "Axes left out", reasons
    yield "Assumptions", [*joined_notes(shown), *_assumptions(spec, machine)]


def _run_first(command: str, spec: PlanSpec, machine: CalibratedMachine) -> tuple[str, str]:
    """Returns a heading and the command, which on several nodes is started by torchrun on each of them."""
    fewest = ceil_div(spec.gpus, machine.network.gpus_per_node)
    if fewest == 1:
        return "Run the first layout", command
    nodes = next(n for n in range(fewest, spec.gpus + 1) if spec.gpus % n == 0)
    return (
        "Run the first layout (on each node: N counts nodes from 0, HOST is the first node's address)",
        f"torchrun --nnodes {nodes} --nproc-per-node {spec.gpus // nodes} --node-rank N "
        f"--master-addr HOST -m {command}",
    )


def _exposed(row: Record) -> Iterator[str]:
    """Yields what the formulas leave out: how much communication the simulated step exposes."""
    axes = (metric.removesuffix("_exposed_ms") for metric in row.metrics)
    step = row.metrics["step_ms"].median
    exposed = [
        f"{axis} {number(ms)} ms ({number(100 * ms / step)} %)"
        for axis in axes
        if (ms := row.median(f"{axis}_exposed_ms") or 0.0) > 0
    ]
    if exposed:
        bubbles = "bubbles, " if row.median("bubble") else ""
        yield (
            f"exposed in the simulated step: {', '.join(exposed)}. This includes {bubbles}the first "
            "gather and the last reduction, which nothing overlaps, and kernels slowed by communication"
        )
    if row.median("bubble"):
        yield (
            "a pipeline's exposed time is that of the rank that computes longest; the column bubble is "
            "the idle time of the rank that waits longest"
        )


def runnable(spec: PlanSpec, rows: Sequence[Record], count: int) -> list[LayoutSpec]:
    """Returns the first `count` planned layouts that this machine can run, and prints why others are
    skipped. Raises ValueError if it can run none.
    """
    from stepgauge.validate.runnable import why_not_here

    specs, reasons = [], []
    for row in rows:
        layout = LayoutSpec(**{**row.spec, "model": spec.model})
        if reason := why_not_here(layout, device_bytes(row)):
            reasons.append(reason)
            continue
        specs.append(layout)
        if len(specs) == count:
            break
    if not specs:
        raise ValueError(f"this machine can run no layout of the plan: {reasons[0]}")
    for reason in reasons:
        info(f"not run: {reason}")
    return specs


def _caption(spec: PlanSpec, plan: Plan, machine: CalibratedMachine) -> str:
    total, fitting = plan.counted
    limit = plan.limit_bytes / GIB
    fit = f", {fitting} fit in {limit:.0f} GiB" if spec.device != "cpu" else ""
    device = machine.hardware.device or machine.hardware.name
    if isinstance(spec.model, UserModel):
        step = f"{spec.model.factory} of {spec.model.file}, {spec.global_batch} of its batches"
    else:
        step = (
            f"{spec.size}, {spec.model.num_parameters:,} parameters, "
            f"{spec.global_batch} x {spec.model.context_length} tokens"
        )
    return (
        f"{step} a step in {spec.precision} on {spec.gpus} x {device}: {total} layouts{fit}; "
        f"{PREDICTED_FOR} {machine.hardware.name}"
    )


def _alternatives(spec: PlanSpec, plan: Plan, machine: CalibratedMachine) -> Iterator[str]:
    """Yields the largest micro-batch and context that fit, and the fastest layout of each kind."""
    if spec.device == "cpu":
        yield "memory of a CPU is not predicted: every layout is assumed to fit"
    else:
        best = candidate_of(plan.rows[0])
        yield (
            f"the largest micro-batch of the first layout is "
            f"{largest_micro_batch(spec, machine, best)}, its longest context "
            f"{longest_context(spec, machine, best)} (found by doubling)"
        )
        longest, layout = longest_of_all(spec, machine, best)
        yield (
            f"the longest context of all layouts is {longest} ({layout.layout}, checkpointing "
            f"{layout.checkpointing})"
        )
    for noun, fastest in plan.fastest.items():
        items = (f"{name} {number(row.median('step_ms'))} ms ({row.spec['layout']})"
                 for name, row in fastest.items())  # fmt: skip
        yield f"fastest by {noun}: {'; '.join(items)}"


def _assumptions(spec: PlanSpec, machine: CalibratedMachine) -> Iterator[str]:
    """Yields what the predictions assume of the machine and the network."""
    hardware = machine.hardware
    yield from _faster_precision(spec, hardware)
    yield (
        "± is the possible error of a step: that of each term, by how it was obtained, and a host up "
        f"to {SLOWER_HOST:g} times as slow, which dominates where steps are short"
    )
    if isinstance(spec.model, ModelSpec) and not has_formulas(spec):
        yield (
            "layouts were screened as those of a dense network with causal attention and equal FLOPs "
            "per token; the best were traced"
        )
    if isinstance(spec.model, ModelSpec) and spec.model.attention != "triton":
        yield (
            "context axes split attention by heads only, because a ring of keys and values needs "
            "--attention triton"
        )
    if hardware.base and hardware.base.device != hardware.device:
        yield (
            f"operation times are those of {hardware.base.device}, scaled by the ratio of published "
            f"peaks ({hardware.peaks.source if hardware.peaks else ''})"
        )
    fabric = machine.network.fabric
    if fabric:
        for where, wire in (("within a node", fabric.within), ("between nodes", fabric.between)):
            yield (
                f"{where} {wire.bytes_per_s / 1e9:g} GB/s per GPU and direction, of which "
                f"{wire.efficiency:.0%} is reached: {wire.source}"
            )
    slowed = Prices(machine).contention.of("matmul", "all_reduce", DATA)
    yield (
        f"while both run, computation takes {slowed.kernel:.3g} times as long and a collective "
        f"{slowed.collective:.3g} times as long ({slowed.source})"
    )
    yield "all ranks are equally fast, no host is slow, nothing fails, and data arrives in time"


def _faster_precision(spec: PlanSpec, hardware: HardwareFile) -> Iterator[str]:
    fp32, bf16 = (hardware.peaks.of(name) if hardware.peaks else None for name in ("fp32", "bf16"))
    if spec.precision == "fp32" and fp32 and bf16 and bf16 > fp32:
        yield (
            f"the step is in fp32, which is the default: --precision bf16 has {bf16 / fp32:.0f} times the "
            f"peak FLOP/s"
        )


def command_of(row: Record, values: Values) -> str:
    """Returns the command that measures a row's layout."""
    network = next((name for name in ("model", "hf_config") if name in values), "size")
    shape = [name for name in values if name in options_of(ModelSpec) and name != "hf_config"]
    fields = ["layout", "accumulation", "precision", "compile", "optimizer", "device"]
    if network != "model":  # a user's factory brings the batch
        fields += ["batch", "checkpointing"]
    chosen = {name: values[name][0] for name in (network, *shape)}
    chosen |= {name: row.spec[name] for name in fields}
    known = options_of(LayoutSpec, ModelSpec)
    return command_line("bench layout", [(known[name], value) for name, value in chosen.items()])
