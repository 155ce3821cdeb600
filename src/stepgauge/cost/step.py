"""A training step on one device, predicted: the record that `bench step` would give.

The host launches the operations, the device runs them in order; a phase ends when both are
through. Times of operations come from a hardware file, and nothing is scaled to fit.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepgauge.cost.memory.peak import Memory
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.terms import TRAFFIC, Term
from stepgauge.cost.rank import peak_of, phases_of, rank_step_of
from stepgauge.cost.rates.estimate import ASSUMED, INTERVAL, SLOWER_HOST, TIMED_WHOLE, UNTIMED
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices
from stepgauge.cost.streams.outcome import Outcome, outcome
from stepgauge.cost.streams.program import DataParallelCost
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.throughput import throughput
from stepgauge.spec.units import GIB
from stepgauge.spec.user_model import UserModel

HEADINGS = ["phase", "term", "operation", "sizes", "count", "us", "source"]
TOLD_SHARE = 0.02  # of a step


def predict(
    spec: StepSpec, machine: CalibratedMachine, traced: TracedNetwork | None = None
) -> Record:
    """The modelled record of the step, its terms in a table. `traced`: of a network without formulas.
    Raises ValueError for a step that the cost model or the hardware file does not know.
    """
    share, layout = NetworkPart(batch=spec.batch), Layout()
    step = rank_step_of(spec, share, machine, layout=layout, traced=traced)
    operations, prices = step.operations, step.prices
    found = outcome(step.program(DataParallelCost(), phases=spec.phases), prices.contention)
    phases = phases_of(operations, spec.phases)
    host_us = sum(step.host[phase].us(operations.launched(phase)) for phase in phases)
    metrics = {
        **{f"{name}_ms": _ms(found.phases[name]) for name in phases},
        "step_ms": _ms(found.step_ms),
        "host_ms": _ms(host_us / 1e3),
        "device_ms": _ms(found.device_ms),
        **rates(spec, machine, found.step_ms, sequences=spec.batch),
    }
    rows = [*term_rows(phases, prices), *host_rows(phases, prices, found)]
    memory = peak_of(operations, layout) if spec.phases == "step" else None
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
    note = "; ".join(filter(None, [note, _untimed(rows), machine.disturbance]))
    return Record.of(
        spec,
        metrics=metrics,
        tables=tables,
        environment={"device": machine.hardware.device, "hardware": machine.hardware.name},
        provenance="modelled",
        note=note,
    )


def _untimed(rows: Sequence[Sequence[Any]]) -> str:
    """What of the step is known by its bytes or operations alone, a clause; "" where it is little."""
    us: dict[str, float] = {}
    for _, name, *_, time, source in rows:
        if source == UNTIMED:
            us[name] = us.get(name, 0.0) + time
    whole = sum(us.values())
    if whole <= TOLD_SHARE * sum(row[-2] for row in rows):
        return ""
    longest = ", ".join(sorted(us, key=lambda name: -us[name])[:3])
    return (
        f"untimed: {whole / 1e3:.2g} ms of it go by the bytes or operations of {longest}; stepgauge "
        f"validate --now times their calls"
    )


def lacking(memory: Memory, machine: CalibratedMachine) -> str:
    """That a rank needs more than its device has, a clause; "" where it fits or nobody knows."""
    peaks = machine.hardware.peaks
    has = peaks.program_bytes if peaks else 0
    if not has or memory.device_bytes <= has:
        return ""
    needs = memory.device_bytes / GIB
    return f"does not fit: a rank needs {needs:.1f} GiB, its device has {has / GIB:.1f}"


def rates(
    spec: Any, machine: CalibratedMachine, step_ms: float, *, sequences: int, ranks: int = 1
) -> dict[str, Sample]:
    """Tokens of a step of so many sequences a second, model FLOPs of one of its ranks, and their part
    of its peak, where that is known; nothing of a user's model, whose shape is not.
    """
    if isinstance(spec.model, UserModel):
        return {}
    model, phases = spec.network, getattr(spec, "phases", "step")
    count = model.forward_flops if phases == "forward" else model.step_flops
    flops = count(batch=sequences, sequence=model.context_length) / ranks
    known = machine.hardware.peaks
    peak = known.of(spec.precision) if known else None
    tokens = sequences * model.context_length
    return throughput([step_ms], tokens=tokens, flops=flops, peak=peak)


def term_rows(
    phases: Mapping[str, Iterable[Term]], prices: Prices, *, times: int = 1
) -> list[list[object]]:
    """A row a term of each phase, which runs so many times."""
    rows: list[list[object]] = []
    for phase, terms in phases.items():
        for term in terms:
            operation, sizes = term.operation, " × ".join(f"{size:g}" for size in term.sizes)
            if prices.is_plain_pass(term):
                operation, sizes = TRAFFIC, f"{term.nbytes:g}"
            count, us = term.count * times, prices.us(term) * times
            source = prices.of(term).source if term.pace == 1.0 else TIMED_WHOLE
            rows.append([phase, term.name, operation, sizes, count, us, source])
    return rows


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
