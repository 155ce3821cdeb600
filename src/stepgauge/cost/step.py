"""A training step on one device, predicted: the record that `bench step` would give.

The host launches the operations, the device runs them in order; a phase ends when both are
through. Times of operations come from a hardware file, and nothing is scaled to fit.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from stepgauge.cost.host import launching
from stepgauge.cost.memory.peak import Memory, step_memory
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.rates.estimate import ASSUMED, INTERVAL, SLOWER_HOST, TIMED_WHOLE
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.outcome import Outcome, outcome
from stepgauge.cost.streams.program import DataParallelCost, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec, WorkSpec
from stepgauge.spec.throughput import throughput

HEADINGS = ["phase", "term", "operation", "sizes", "count", "us", "source"]


def predict(spec: StepSpec, machine: CalibratedMachine) -> Record:
    """The modelled record of the step, its terms in a table. Raises ValueError for a step that the
    cost model or the hardware file does not know.
    """
    priced = StepOperations(spec)
    prices = Prices(machine).paced_by(priced)
    operations = as_timed(priced, prices)
    host = launching(spec, machine)
    program = RankStep(operations, prices, host).program(DataParallelCost(), phases=spec.phases)
    found = outcome(program, prices.contention)
    phases = operations.phases()
    host_ms = sum(host[phase].us(len(operations.blocks)) for phase in phases) / 1e3
    metrics = {
        **{f"{name}_ms": _ms(found.phases[name]) for name in phases},
        "step_ms": _ms(found.step_ms),
        **throughput([found.step_ms], tokens=operations.tokens),
        "host_ms": _ms(host_ms),
        "device_ms": _ms(found.device_ms),
        **rates(spec, operations.model, machine, found.step_ms, ranks=1, batch=spec.batch),
    }
    rows = [*term_rows(phases, prices), *host_rows(phases, prices, found)]
    memory = step_memory(operations, Layout()) if spec.phases == "step" else None
    return modelled(spec, machine, metrics, rows, memory, late_us=found.late_us)


def modelled(
    spec: Any,
    machine: CalibratedMachine,
    metrics: Mapping[str, Sample],
    rows: list[list[object]],
    memory: Memory | None,
    *,
    late_us: float = 0.0,
    note: str = "",
) -> Record:
    """The record of what is predicted of a spec, with the rows of its terms and of its memory, and
    what is missing in it; `late_us` is by how much a slower host would delay it. On a CPU the peak
    of tensors is not measured, and not predicted.
    """
    tables: dict[str, list[list[object]]] = {"terms": [[*HEADINGS], *rows]}
    if late_us:
        cause = f"a host that takes {SLOWER_HOST:g} times as long"
        tables[INTERVAL] = [["may be longer by", "us"], [cause, late_us]]
    if memory is not None and not spec.device.startswith("cpu"):
        metrics = {**metrics, "peak_bytes": Sample.exact(round(memory.peak_bytes), "bytes")}
        tables["memory"] = memory.rows()
        note = "; ".join(filter(None, [lacking(memory, machine), note]))
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics=metrics,
        tables=tables,
        environment={"device": machine.hardware.device, "hardware": machine.hardware.name},
        provenance="modelled",
        note="; ".join(filter(None, [note, machine.disturbance])),
    )


def lacking(memory: Memory, machine: CalibratedMachine) -> str:
    """That a rank needs more than its device has, a clause; "" where it fits or nobody knows."""
    peaks = machine.hardware.peaks
    has = peaks.program_bytes if peaks else 0
    if not has or memory.device_bytes <= has:
        return ""
    needs = memory.device_bytes / 2**30
    return f"does not fit: a rank needs {needs:.1f} GiB, its device has {has / 2**30:.1f}"


def rates(
    spec: WorkSpec,
    model: ModelSpec,
    machine: CalibratedMachine,
    step_ms: float,
    *,
    ranks: int,
    batch: int,
) -> dict[str, Sample]:
    """Model FLOPs a second of one of the ranks, and their part of its peak, where that is known."""
    count = model.forward_flops if spec.phases == "forward" else model.step_flops
    flops = count(batch=batch, sequence=model.context_length) / ranks
    known = machine.hardware.peaks
    peak = known.of(spec.precision) if known else None
    return throughput([step_ms], flops=flops, peak=peak)


def term_rows(
    phases: Mapping[str, Iterable[Term]], prices: Prices, *, times: int = 1
) -> list[list[object]]:
    """A row a term of each phase, which runs so many times."""
    return [
        [
            phase,
            term.name,
            TRAFFIC if prices.is_plain_pass(term) else term.operation,
            f"{term.nbytes:g}"
            if prices.is_plain_pass(term)
            else " × ".join(f"{size:g}" for size in term.sizes),
            term.count * times,
            prices.us(term) * times,
            prices.of(term).source if term.pace == 1.0 else TIMED_WHOLE,
        ]
        for phase, terms in phases.items()
        for term in terms
    ]


def host_rows(
    phases: Mapping[str, Iterable[Term]], prices: Prices, found: Outcome
) -> list[list[object]]:
    """What each phase takes longer than its terms: the device waits for the host."""
    waits = {
        phase: found.phases[phase] * 1e3 - prices.total_us(terms) for phase, terms in phases.items()
    }
    return [
        [phase, "host", "launches", "", 1, us, ASSUMED] for phase, us in waits.items() if us > 1.0
    ]


def _ms(value: float) -> Sample:
    return Sample.exact(value, "ms")
