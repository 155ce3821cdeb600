"""`stepgauge plan`: every layout of a training run on a machine, ranked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from stepgauge.cli.console import print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.cost.machine import Machine
from stepgauge.cost.planner import (
    Plan,
    candidate_of,
    fastest_by,
    largest_micro_batch,
    longest_context,
    overlaps,
    plan,
    scales,
)
from stepgauge.report.plan import parts_table, plan_table
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import options_of, written
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record


@spec_options(PlanSpec, ModelSpec, defaults={"size": "small"})
def command(
    *,
    values: Values,
    hardware: Annotated[
        Path, Parameter(help="Hardware file, calibrated or of published peaks; hardware/ has some.")
    ],
    top: Annotated[int, Parameter(help="Layouts that are shown.")] = 10,
    format: Annotated[
        Literal["table", "csv", "markdown", "json"], Parameter(help="How the rows are printed.")
    ] = "table",
) -> None:
    """Rank every layout of a training run on a machine that you need not have, without torch.

    Data, ZeRO, tensor and pipeline axes, their micro-batches and checkpointing are screened by
    closed formula; the best that fit are simulated. Each row is a prediction of what bench layout
    would measure.
    """
    if top < 1:
        raise ValueError(f"top is {top}; it must be at least 1")
    (spec,) = expand(PlanSpec, values)
    machine = Machine(HardwareFile.read(hardware))
    found = plan(spec, machine, top=top)
    if format == "json":
        print(json.dumps([json.loads(row.to_json()) for row in found.rows], indent=1))
        return
    table = plan_table(found.rows, _caption(spec, found, machine))
    if format != "table":
        print(table.to(format), end="")
        return
    print_table(table)
    print()
    print_table(parts_table(found.rows))
    for heading, lines in (
        ("What hides", (o.sentence for o in overlaps(found.rows[0], machine, spec))),
        ("Orders of magnitude of a micro-batch", [_magnitudes(found.rows[0], spec)]),
        ("What else fits", _answers(spec, found, machine)),
        ("Assumed", _assumptions(machine)),
        ("Run the first", [command_of(found.rows[0], values)]),
    ):
        print(f"\n{heading}", *(f"  {line}" for line in lines), sep="\n")


def _caption(spec: PlanSpec, found: Plan, machine: Machine) -> str:
    every, fitting = found.counted
    name = machine.hardware.device or machine.hardware.name
    return (
        f"{spec.size}, {spec.model.num_parameters / 1e9:.1f} billion parameters, "
        f"{spec.global_batch} x {spec.model.context_length} tokens a step in {spec.precision} on {spec.gpus} x "
        f"{name}: {every} layouts, {fitting} fit in {found.limit_bytes / 2**30:.0f} GiB; predicted"
    )


def _magnitudes(row: Record, spec: PlanSpec) -> str:
    return ", ".join(f"{name} {value:.1e}" for name, value in scales(row, spec).items())


def _answers(spec: PlanSpec, found: Plan, machine: Machine) -> Iterator[str]:
    best = candidate_of(found.rows[0])
    yield (
        f"the largest micro-batch of the first layout is "
        f"{largest_micro_batch(spec, machine, best)}, its longest context "
        f"{longest_context(spec, machine, best)} (by doubling)"
    )
    for noun, of in (
        ("wrapper", lambda c: c.layout.wrapper),
        ("checkpointing", lambda c: c.checkpointing),
    ):
        fastest = fastest_by(found.screened, of)
        words = (f"{name} {one.step_us / 1e3:.0f} ms ({one.candidate.layout})"
                 for name, one in fastest.items())  # fmt: skip
        yield f"fastest by {noun}, by formula: {'; '.join(words)}"


def _assumptions(machine: Machine) -> Iterator[str]:
    hardware = machine.hardware
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
    slowed = machine.contention.of("matmul", "all_reduce")
    yield (
        f"computing takes {slowed.kernel:g} times as long beside a collective, the collective "
        f"{slowed.collective:g} times ({slowed.source})"
    )
    yield "ranks are equal, no host is slow, nothing fails; data arrives in time"


def command_of(row: Record, values: Values) -> str:
    """The command that measures the layout of a row."""
    network = options_of(ModelSpec)
    given = [
        f"--{(network[name].metadata['flag'] or name).replace('_', '-')} "
        f"{written(network[name], value)}"
        for name, (value, *_) in values.items()
        if name in network and name != "hf_config"
    ]
    name = "hf_config" if "hf_config" in values else "size"
    words = [f"--{name.replace('_', '-')} {values[name][0]}", *given]
    words += [f"--layout {row.spec['layout']!r}", f"--batch {row.spec['batch']}"]
    for field in ("accumulation", "precision", "compile", "optimizer", "checkpointing"):
        words.append(f"--{field} {row.spec[field]}")
    return f"stepgauge bench layout {' '.join(words)} --device cuda".replace("'", '"')
