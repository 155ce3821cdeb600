"""Predicts a training step on one device: the record that `bench step` would measure.

The host launches the operations and the device runs them in order; a phase ends when both are done.
Times of operations come from a hardware file, and no factor is fitted to measured steps.
"""

from collections.abc import Mapping
from typing import Any

from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.rank import peak_of, phases_of, rank_step_of
from stepgauge.cost.rates.estimate import INTERVAL, SLOWER_HOST
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.streams.ledger import total_us
from stepgauge.cost.streams.outcome import run_program
from stepgauge.cost.streams.program import DataParallelCost
from stepgauge.cost.term_table import HEADINGS, host_rows, notes_on, term_rows
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.throughput import StepWork, throughput
from stepgauge.spec.units import GIB

NOTED_DELAY = 0.2  # of a step: a delay by a slower host that a note explains


def predict(
    spec: StepSpec, machine: CalibratedMachine, traced: TracedNetwork | None = None
) -> Record:
    """Returns the modelled record of a step, with its terms in a table.

    `traced` is the network if it has no formulas. Raises ValueError for a step that the cost model or
    the hardware file does not cover.
    """
    share, layout = NetworkPart(batch=spec.batch), Layout()
    step = rank_step_of(spec, share, machine, layout=layout, traced=traced)
    operations, prices = step.operations, step.prices
    program = step.program(DataParallelCost(), phases=spec.phases)
    simulated = run_program(program, prices.contention)
    phases = phases_of(operations, spec.phases)
    host_us = sum(step.host[phase].us(operations.launched(phase)) for phase in phases)
    milliseconds = {
        **{f"{name}_ms": simulated.phases[name] for name in phases},
        "step_ms": simulated.step_ms,
        "host_ms": host_us / 1e3,
        "device_ms": simulated.device_ms,
    }
    metrics = {name: Sample.exact(ms, "ms") for name, ms in milliseconds.items()}
    metrics |= rates(spec, machine, simulated.step_ms, sequences=spec.batch)
    rows = [*term_rows(phases, prices), *host_rows(phases, prices, simulated)]
    memory = peak_of(operations, layout) if spec.phases == "step" else None
    return modelled(spec, machine, metrics, rows, memory, late_us=simulated.late_us)


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
    """Returns the record of a prediction, with notes on what limits it.

    rows     of the table of terms
    memory   is left out on a CPU, where no peak of tensors is measured
    late_us  the delay by a slower host
    """
    tables: dict[str, list[list[object]]] = {"terms": [[*HEADINGS], *rows]}
    if late_us:
        cause = f"a host that takes {SLOWER_HOST:g} times as long"
        tables[INTERVAL] = [["possible delay", "us"], [cause, late_us]]
    limit = _host_limit(late_us, total_us(rows), is_compiled=spec.compile != "off")
    notes = [note, limit, *notes_on(rows, machine), machine.disturbance]
    if memory is not None and not spec.device.startswith("cpu"):
        metrics = {**metrics, "peak_bytes": Sample.exact(round(memory.peak_bytes), "bytes")}
        tables["memory"] = memory.rows()
        notes.insert(0, _too_large(memory, machine))
    return Record.of(
        spec,
        metrics=metrics,
        tables=tables,
        environment={"device": machine.hardware.device, "hardware": machine.hardware.name},
        provenance="modelled",
        note="; ".join(filter(None, notes)),
    )


def _host_limit(late_us: float, step_us: float, *, is_compiled: bool) -> str:
    """Returns a note if a slower host would lengthen the step much; otherwise ""."""
    if late_us <= NOTED_DELAY * step_us:
        return ""
    limit = (
        f"the host limits this step, or nearly: if it launches {SLOWER_HOST:g} times as slowly, the step "
        f"takes {late_us / 1e3:,.0f} ms longer, which ± includes"
    )
    return limit if is_compiled else f"{limit} (compiled blocks need fewer launches)"


def _too_large(memory: Memory, machine: CalibratedMachine) -> str:
    """Returns a note if a rank needs more memory than its device has; "" if it fits or is unknown."""
    peaks = machine.hardware.peaks
    available = peaks.program_bytes if peaks else 0
    if not available or memory.device_bytes <= available:
        return ""
    needed = memory.device_bytes / GIB
    return f"does not fit: a rank needs {needed:.1f} GiB, its device has {available / GIB:.1f}"


def rates(
    spec: Any, machine: CalibratedMachine, step_ms: float, *, sequences: int, ranks: int = 1
) -> dict[str, Sample]:
    """Returns tokens per second, and each rank's model FLOP/s and MFU if the peak is known.

    `sequences` are those of the whole step. Returns {} for a user's model, whose shape is unknown.
    """
    work = StepWork.of(spec.model, sequences=sequences, phases=getattr(spec, "phases", "step"))
    peaks = machine.hardware.peaks
    peak = peaks.of(spec.precision) if peaks else None
    return throughput([step_ms], tokens=work.tokens, flops=work.flops / ranks, peak=peak)
