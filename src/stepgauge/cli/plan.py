"""`stepgauge plan`: every layout of a training run on a machine, ranked."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_points, print_table, tell
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cli.rows import Fresh, Out, existing_hardware
from stepgauge.cli.validate import compare
from stepgauge.cost.planning.hiding import overlaps, scales
from stepgauge.cost.planning.planner import (
    Plan,
    candidate_of,
    device_bytes,
    largest_micro_batch,
    longest_context,
    longest_of_all,
)
from stepgauge.cost.rates.estimate import SLOWER_HOST
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.program import DATA
from stepgauge.cost.traced.asked import has_formulas
from stepgauge.report.numbers import number
from stepgauge.report.plan import magnitudes, parts_table, plan_table
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import command_line, options_of
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB, ceil_div
from stepgauge.spec.user_model import UserModel
from stepgauge.validate.planned import planned
from stepgauge.validate.rows import Asked


@spec_options(PlanSpec, ModelSpec, defaults={"size": "small"})
def command(
    *,
    values: Values,
    hardware: Annotated[
        Path,
        Parameter(
            help="Hardware file, calibrated or of published peaks, or its name: dgx-h100.",
            converter=existing_hardware,
        ),
    ],
    top: Annotated[int, Parameter(help="Layouts that are shown.")] = 10,
    format: Annotated[Format, Parameter(help="How the rows are printed.")] = "table",
    verify: Annotated[
        int, Parameter(help="Layouts that are run here, the best first, beside their predictions.")
    ] = 0,
    out: Out = Path("runs/plan"),
    fresh: Fresh = False,
) -> None:
    """Rank every layout of a training run on a machine that you need not have, without torch.

    Your own network (--model FILE.py:factory) takes data axes; torch traces it, without a GPU.

    Data, ZeRO, tensor, context and pipeline axes, their micro-batches and checkpointing are screened
    by closed formula; the best that fit are simulated. Each row is a prediction of what bench layout
    would measure; --verify runs the best on this machine and shows how far they are off.
    """
    for name, value, least in (("top", top, 1), ("verify", verify, 0)):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    file = HardwareFile.read(hardware)
    (spec,) = expand(PlanSpec, {"device": (file.device_kind,), **values})
    found = planned(spec, file, top=max(top, verify), tracing=_tell_of_trace)
    machine = CalibratedMachine(file.on_ranks(spec.gpus))
    if not (verify and format == "json"):  # one document
        _show(spec, found, machine, values, top=top, format=format)
    if verify:
        asked = runnable(spec, found.rows, verify)
        print()
        compare([Asked(row) for row in asked], hardware, out=out, fresh=fresh, format=format)


def _tell_of_trace(asked: LayoutSpec) -> None:
    tell(f"traces {asked.layout}, batch {asked.batch}, checkpointing {asked.checkpointing}")


def _show(
    spec: PlanSpec,
    found: Plan,
    machine: CalibratedMachine,
    values: Values,
    *,
    top: int,
    format: Format,
) -> None:
    """The plan's best layouts, and as tables for eyes what follows from them."""
    rows = found.rows[:top]
    if format == "json":
        print(json.dumps([row.to_dict() for row in rows], indent=1, allow_nan=False))
        return
    table = plan_table(rows, _caption(spec, found, machine))
    if format != "table":
        print(table.to(format), end="")
        return
    print_table(table)
    if spec.device != "cpu":
        print()
        print_table(parts_table(rows))
    for heading, lines in _headed(spec, found, machine, rows):
        print_points(heading, lines)
    # in one piece, to be copied
    command = command_of(found.rows[0], values)
    print("\nRun the first", f"  {_started(command, spec, machine)}", sep="\n")


def _headed(
    spec: PlanSpec, found: Plan, machine: CalibratedMachine, shown: Sequence[Record]
) -> Iterator[tuple[str, Iterable[str]]]:
    """Headings with their sentences; of a network without formulas what rests on none."""
    best = found.rows[0]
    if has_formulas(spec):
        asked = LayoutSpec(**{**best.spec, "model": spec.model})
        hides = [each.sentence for each in overlaps(asked, machine)]
        yield "Communication beside computing, by formula", [*hides, *_exposed(best)]
        yield "Orders of magnitude of a micro-batch", [magnitudes(scales(asked))]
        yield "What else fits", _answers(spec, found, machine)
    notes = dict.fromkeys(row.note for row in shown if row.note)
    yield "Assumed", [*notes, *_assumptions(spec, machine)]


def _started(command: str, spec: PlanSpec, machine: CalibratedMachine) -> str:
    """The command as it is started, on several nodes by torchrun on each."""
    fewest = ceil_div(spec.gpus, machine.network.gpus_per_node)
    if fewest == 1:
        return command
    nodes = next(n for n in range(fewest, spec.gpus + 1) if spec.gpus % n == 0)
    return (
        f"torchrun --nnodes {nodes} --nproc-per-node {spec.gpus // nodes} --node-rank N "
        f"--master-addr HOST -m {command} (on each node; N is its number from 0, HOST the first one's address)"
    )


def _exposed(row: Record) -> Iterator[str]:
    """What formulas leave out: how much of the simulated step sending takes all the same."""
    axes = (metric.removesuffix("_exposed_ms") for metric in row.metrics)
    step = row.metrics["step_ms"].median
    told = [
        f"{axis} {number(ms)} ms ({ms / step:.0%})"
        for axis in axes
        if (ms := row.median(f"{axis}_exposed_ms") or 0.0) > 0
    ]
    if told:
        yield (
            f"simulated, of its step are exposed: {', '.join(told)}: the first gather and the last "
            "sum, which nothing runs beside, bubbles, and kernels that sending slows"
        )
    if row.median("bubble"):
        yield (
            "what a pipeline exposes counts from the rank that computes longest, the column bubble "
            "is what the rank waits that waits longest"
        )


def runnable(spec: PlanSpec, rows: Sequence[Record], count: int) -> list[LayoutSpec]:
    """The first of the planned layouts that this machine can run; says why it cannot run others.

    Raises ValueError where it can run none.
    """
    from stepgauge.validate.runnable import why_not_here

    specs, reasons = [], []
    for row in rows:
        asked = LayoutSpec(**{**row.spec, "model": spec.model})
        if reason := why_not_here(asked, device_bytes(row)):
            reasons.append(reason)
            continue
        specs.append(asked)
        if len(specs) == count:
            break
    if not specs:
        raise ValueError(f"nothing of the plan can be run here: {reasons[0]}")
    for reason in reasons:
        tell(f"not run: {reason}")
    return specs


def _caption(spec: PlanSpec, found: Plan, machine: CalibratedMachine) -> str:
    every, fitting = found.counted
    limit = found.limit_bytes / GIB
    fit = f", {fitting} fit in {limit:.0f} GiB" if spec.device != "cpu" else ""
    name = machine.hardware.device or machine.hardware.name
    if isinstance(spec.model, UserModel):
        what = f"{spec.model.factory} of {spec.model.file}, {spec.global_batch} of its batches"
    else:
        what = (
            f"{spec.size}, {spec.model.num_parameters / 1e9:.1f} billion parameters, "
            f"{spec.global_batch} x {spec.model.context_length} tokens"
        )
    return f"{what} a step in {spec.precision} on {spec.gpus} x {name}: {every} layouts{fit}; predicted"


def _answers(spec: PlanSpec, found: Plan, machine: CalibratedMachine) -> Iterator[str]:
    best = candidate_of(found.rows[0])
    if spec.device == "cpu":
        yield "memory of a CPU is not predicted: everything is taken to fit"
    else:
        yield (
            f"the largest micro-batch of the first layout is "
            f"{largest_micro_batch(spec, machine, best)}, its longest context "
            f"{longest_context(spec, machine, best)} (by doubling)"
        )
        longest, layout = longest_of_all(spec, machine)
        yield (
            f"the longest context of all layouts is {longest} ({layout.layout}, checkpointing "
            f"{layout.checkpointing})"
        )
    for noun, fastest in found.fastest.items():
        words = (f"{name} {number(row.median('step_ms'))} ms ({row.spec['layout']})"
                 for name, row in fastest.items())  # fmt: skip
        yield f"fastest by {noun}: {'; '.join(words)}"


def _assumptions(spec: PlanSpec, machine: CalibratedMachine) -> Iterator[str]:
    hardware = machine.hardware
    yield (
        "± is what a step may be off by: each of its terms by how it was found, and a host that takes "
        f"{SLOWER_HOST:g} times as long, which is most of it where steps are short"
    )
    if isinstance(spec.model, ModelSpec) and not has_formulas(spec):
        yield (
            "layouts were screened as those of a dense network with causal attention that computes as "
            "much for a token; the best were traced"
        )
    if isinstance(spec.model, ModelSpec) and spec.model.attention != "triton":
        yield "ranks share a sequence by heads alone: a ring of keys needs --attention triton"
    if hardware.base and hardware.base.device != hardware.device:
        yield (
            f"operations of {hardware.base.device}, by the ratio of published peaks "
            f"({hardware.peaks.source if hardware.peaks else ''})"
        )
    fabric = machine.network.fabric
    if fabric:
        for where, wire in (("within a node", fabric.within), ("between nodes", fabric.between)):
            yield (
                f"{wire.bytes_per_s / 1e9:g} GB/s a GPU and direction {where}, of which "
                f"{wire.efficiency:.0%} are reached: {wire.source}"
            )
    slowed = Prices(machine).contention.of("matmul", "all_reduce", DATA)
    yield (
        f"computing takes {slowed.kernel:g} times as long beside a collective, the collective "
        f"{slowed.collective:g} times ({slowed.source})"
    )
    yield "ranks are equal, no host is slow, nothing fails; data arrives in time"


def command_of(row: Record, values: Values) -> str:
    """The command that measures the layout of a row."""
    network = next((name for name in ("model", "hf_config") if name in values), "size")
    of_shape = [name for name in values if name in options_of(ModelSpec) and name != "hf_config"]
    fields = ["layout", "accumulation", "precision", "compile", "optimizer", "device"]
    if network != "model":  # which brings its batch
        fields += ["batch", "checkpointing"]
    chosen = {name: values[name][0] for name in (network, *of_shape)}
    chosen |= {name: row.spec[name] for name in fields}
    known = options_of(LayoutSpec, ModelSpec)
    return command_line("bench layout", [(known[name], value) for name, value in chosen.items()])
