"""Ranks all layouts of a training run: screens them by closed formula and simulates the best."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from stepgauge.cost.layout import predict_layout
from stepgauge.cost.operations.supported import require_priced
from stepgauge.cost.planning.dense import nearest_with_formulas, needed_bytes
from stepgauge.cost.planning.screen import Candidate, Screen, Screened, candidates
from stepgauge.cost.rates.estimate import with_spread
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.planning import PlanSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.units import GIB

# Layouts that are simulated per requested row, and at least. The minimum keeps the first row independent
# of the number of rows.
FINALISTS, LEAST_FINALISTS = 3, 30
LEAST_TRACED = 8  # for a network without formulas, whose traces take seconds each
DAY_S = 86_400.0
Trace = Callable[[LayoutSpec], Sequence[TracedNetwork]]
Hear = Callable[
    [str, int, int], None
]  # what is being done, with how many so far, and with how many in all


@dataclasses.dataclass(frozen=True)
class Plan:
    """Ranked layouts.

    rows         modelled records of the best layouts, fastest first
    fastest      by "wrapper" and "checkpointing": the fastest layout for each value
    counted      the number of layouts that were screened, and of those that fit
    limit_bytes  memory of a device; infinite on a CPU, whose memory is not predicted
    refused      by axis: why it was left out
    """

    rows: Sequence[Record]
    fastest: Mapping[str, Mapping[str, Record]]
    counted: tuple[int, int]
    limit_bytes: float
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)


def plan(
    spec: PlanSpec,
    machine: CalibratedMachine,
    *,
    top: int = 10,
    trace: Trace | None = None,
    hear: Hear = lambda doing, done, total: None,
) -> Plan:
    """Ranks the layouts of a training run.

    `trace` returns the traced stages of a layout of a network without formulas; such a network is
    screened like the nearest one with formulas. `hear` is called with the progress. Memory on a CPU
    is not predicted, so that everything fits there. Raises ValueError for a GPU of unknown memory,
    and if nothing fits.
    """
    limit = limit_of(spec, machine)
    num_layouts, fitting = _screened(spec, machine, limit, hear, is_traced=trace is not None)
    refused: list[str] = []
    simulate = functools.partial(
        _simulated, spec=spec, machine=machine, refused=refused,
        trace=functools.cache(trace) if trace else None,
    )  # fmt: skip
    finalists = max(FINALISTS * top, LEAST_FINALISTS) if trace is None else max(top, LEAST_TRACED)
    rows = _finalists(fitting, finalists, simulate, hear)
    if not rows:
        raise ValueError(
            f"none of the {len(fitting)} layouts that fit can be predicted; the first: {refused[0]}"
        )
    # Screening estimates memory by closed formula; the simulated peak may be larger.
    within_limit = [row for row in rows if device_bytes(row) <= limit]
    if not within_limit:
        raise ValueError(f"nothing fits: {rows[0].spec['layout']} {rows[0].note}")
    rows = sorted(within_limit, key=_step_ms)
    rows = [*_with_exposed(rows[:top], simulate, refused, hear), *rows[top:]]
    others = fitting if trace is None else ()  # tracing them would take too long
    fastest = {
        "wrapper": _fastest_by(lambda c: c.layout.wrapper, rows, others, simulate),
        "checkpointing": _fastest_by(lambda c: c.checkpointing, rows, others, simulate),
    }
    return Plan(rows[:top], fastest, (num_layouts, len(fitting)), limit)


def _screened(
    spec: PlanSpec, machine: CalibratedMachine, limit: float, hear: Hear, *, is_traced: bool
) -> tuple[int, list[Screened]]:
    """Returns the number of layouts, and those that fit by formula, the fastest first."""
    screened_spec = nearest_with_formulas(spec) if is_traced else spec
    require_priced(_work(screened_spec))
    screen = Screen(screened_spec, machine)
    every = list(candidates(screened_spec, machine.network.gpus_per_node))
    if not every:
        raise ValueError(
            f"no layout divides {spec.global_batch} sequences among {spec.gpus} GPUs; choose a "
            f"global batch that has more common divisors with them"
        )
    layouts: list[Screened] = []
    for candidate in every:
        hear("screening", len(layouts), len(every))
        layouts.append(screen.of(candidate))
    times = spec.network.num_parameters / screened_spec.network.num_parameters
    needs = [needed_bytes(layout.memory, times=times) for layout in layouts]
    if min(needs) > limit:
        raise ValueError(
            f"nothing fits: every layout needs at least {min(needs) / GIB:.1f} GiB per GPU, which has "
            f"{limit / GIB:.1f}; add GPUs, or shorten the context"
        )
    fitting = [layout for layout, needed in zip(layouts, needs, strict=True) if needed <= limit]
    return len(layouts), sorted(fitting, key=lambda layout: layout.step_us)


def _finalists(
    fitting: Sequence[Screened],
    count: int,
    simulate: Callable[[Candidate], Record | None],
    hear: Hear,
) -> list[Record]:
    """Returns the records of the first `count` layouts that can be predicted."""
    rows: list[Record] = []
    for layout in fitting:
        hear("simulating", len(rows), min(count, len(fitting)))
        if row := simulate(layout.candidate):
            rows.append(row)
        if len(rows) == count:
            break
    return rows


def _with_exposed(
    rows: Sequence[Record],
    simulate: Callable[..., Record | None],
    refused: Sequence[str],
    hear: Hear,
) -> Iterator[Record]:
    """Yields the rows with exposed communication, which only rows that are shown need.

    A row stays without it if the hardware file lacks the host's times of the step without an axis.
    """
    for number, row in enumerate(rows):
        hear("finding exposed communication of", number, len(rows))
        if complete := simulate(candidate_of(row), exposed=True):
            yield complete
        else:
            notes = row.note, f"exposed communication is not known: {refused[-1]}"
            yield dataclasses.replace(row, note="; ".join(filter(None, notes)))


def limit_of(spec: PlanSpec, machine: CalibratedMachine) -> float:
    """Returns the bytes that a rank may need; infinite on a CPU, whose memory is not predicted."""
    return memory_limit(machine) if spec.device != "cpu" else math.inf


def memory_limit(machine: CalibratedMachine) -> int:
    """Returns a device's bytes for a process and its CUDA context. Raises ValueError if unknown."""
    peaks = machine.hardware.peaks
    if peaks is None or not peaks.memory_gb:
        raise ValueError(
            f"the hardware file {machine.hardware.name}: peaks.memory_gb is {peaks and peaks.memory_gb}; "
            f"write the memory, in GB, of {machine.hardware.device!r}"
        )
    return peaks.program_bytes


def device_bytes(row: Record) -> float:
    """Returns the bytes that a predicted layout needs of a device; 0 on a CPU."""
    return sum(float(nbytes) for _, nbytes, _ in row.tables.get("memory", [])[1:])


def layout_spec(candidate: Candidate, spec: PlanSpec) -> LayoutSpec:
    """Returns the spec with which `bench layout` runs a candidate. Raises ValueError if it cannot."""
    batch = candidate.micro_batch * candidate.layout.data * candidate.layout.microbatches
    return LayoutSpec(
        model=spec.model, size=spec.size, layout=str(candidate.layout), batch=batch,
        accumulation=candidate.accumulation, precision=spec.precision, compile=spec.compile,
        optimizer=spec.optimizer, checkpointing=candidate.checkpointing, device=spec.device,
    )  # fmt: skip


def _simulated(
    candidate: Candidate,
    spec: PlanSpec,
    machine: CalibratedMachine,
    refused: list[str],
    trace: Trace | None,
    exposed: bool = False,
) -> Record | None:
    """Returns the modelled record, with the cost of the whole training run and, if `exposed`, with
    exposed communication.

    Returns None for what the runtime refuses or what is not calibrated, and adds the reason to `refused`.
    """
    try:
        step = layout_spec(candidate, spec)
        traced = trace(step) if trace else ()
        record = predict_layout(step, machine, traced, shortened=True, exposed=exposed)
    except ValueError as error:
        refused.append(str(error))
        return None
    step_ms = record.metrics["step_ms"].median
    metrics = dict(with_spread(record).metrics)
    if spec.num_tokens:
        seconds = spec.num_tokens / step.tokens_per_step * step_ms / 1e3
        metrics["days"] = Sample.exact(seconds / DAY_S, "days")
        metrics["gpu_hours"] = Sample.exact(seconds / 3600 * spec.gpus, "GPU-hours")
    return dataclasses.replace(record, metrics=metrics)


def _fastest_by(
    name_of: Callable[[Candidate], str],
    rows: Sequence[Record],
    screened: Sequence[Screened],
    simulate: Callable[[Candidate], Record | None],
) -> dict[str, Record]:
    """Returns the fastest layout for each name, the fastest of all first.

    A name that has no simulated row is represented by its fastest screened layout, which is simulated.
    """
    fastest: dict[str, Record] = {}
    for row in rows:
        fastest.setdefault(name_of(candidate_of(row)), row)
    for layout in screened:
        name = name_of(layout.candidate)
        if name not in fastest and (simulated := simulate(layout.candidate)) is not None:
            fastest[name] = simulated
    return dict(sorted(fastest.items(), key=lambda item: _step_ms(item[1])))


def _step_ms(row: Record) -> float:
    return row.metrics["step_ms"].median


def candidate_of(row: Record) -> Candidate:
    """Returns the candidate of a predicted layout."""
    layout = Layout.parse(row.spec["layout"])
    sequences = row.spec["batch"] // layout.data // layout.microbatches
    return Candidate(layout, sequences, row.spec["accumulation"], row.spec["checkpointing"])


def _work(spec: PlanSpec) -> WorkSpec:
    return WorkSpec(
        model=spec.model, precision=spec.precision, compile=spec.compile, optimizer=spec.optimizer
    )
