"""Times networks of few blocks as a whole: runs a BlocksSpec on its ranks, and makes its table."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.bench.ranks import OnRanks
from stepgauge.bench.sweep import Job
from stepgauge.calibrate.host import host_times
from stepgauge.measure.devices import free_unused_memory
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.runtime.world import this_world
from stepgauge.spec.blocks import (
    AXES,
    CLOCKS,
    LAYERS,
    WORK_FIELDS,
    BlocksSpec,
    TimedBlocks,
)
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.train.build import batch_for, build_step
from stepgauge.train.layout import build_layout_step
from stepgauge.train.step import TrainingStep

WARMUP, STEPS = 4, 12
# Copies that take 30 ms on an H200. The host launches a step of five blocks in 10 to 25 ms.
COPIES, COPIED_BYTES = 60, 2**29
NOTHING_MS = 1e-6  # time of launches on a CPU, which has none
Times = Mapping[tuple[int, str, str], float]  # milliseconds by layers, phase and clock


def job(spec: BlocksSpec) -> Job:
    if spec.ranks == 1:
        return Job(run, spec, process=spec.kind)
    return Job(ON_RANKS, spec)


def run(spec: BlocksSpec) -> Record:
    return record(spec, [_times(spec, torch.device(spec.device))])


def measure(spec: BlocksSpec) -> Times:
    """Runs on every rank."""
    return _times(spec, this_world().device(spec.device))


def record(spec: BlocksSpec, ranks: Sequence[Times]) -> Record:
    """Returns the record with each time of the slowest rank."""
    rows = tuple(
        (
            layers,
            TRAINING_PHASES.index(phase),
            CLOCKS.index(clock),
            1e3 * max(t[key] for t in ranks),
        )
        for key in ranks[0]
        for layers, phase, clock in [key]
    )
    blocks = TimedBlocks(OperationTable(AXES, rows))
    return Record.of(
        spec,
        metrics={
            f"{phase}_{clock}_us": Sample.exact(blocks.block_us(phase, clock), "us")
            for phase in TRAINING_PHASES
            for clock in CLOCKS
        },
        tables={"times": [[*AXES, "us"], *map(list, rows)]},
        environment=environment(torch.device(spec.device)),
    )


ON_RANKS = OnRanks(measure, record)


def _times(spec: BlocksSpec, device: torch.device) -> Times:
    """Returns the medians.

    The device is timed after other work, during which the host gets ahead. Without it, few blocks would
    wait for the host, although many blocks do not.
    """
    lead = {} if device.type == "cpu" else {"lead": _busy(device)}
    times = {}
    for layers in LAYERS:
        step, phases = _build(spec, layers, device)
        launched = host_times(step, phases, device, warmup=WARMUP, steps=STEPS)
        with step.precision.matmul_mode():
            taken = time_phases({**lead, **phases}, device, warmup=1, steps=STEPS)
        for phase in TRAINING_PHASES:
            host = NOTHING_MS if device.type == "cpu" else statistics.median(launched[phase])
            times[layers, phase, "host"] = host
            times[layers, phase, "device"] = statistics.median(taken[phase])
        del step, phases
        torch.compiler.reset()
        free_unused_memory(device)
    return times


def _busy(device: torch.device) -> Callable[[], None]:
    """Returns a call of copies that take longer than the host needs to launch a step of few blocks."""
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in "ab")

    def call() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    return call


def _build(spec: BlocksSpec, layers: int, device: torch.device) -> tuple[TrainingStep, Phases]:
    """Builds a step with this many blocks: this rank's part of them, or all if ranks do not share them."""
    model = dataclasses.replace(spec.network, num_layers=layers)
    if spec.cut == "none":
        step = build_step(
            dataclasses.replace(spec, model=model, device=str(device)), lr=LEARNING_RATE
        )
    else:
        settings = {name: getattr(spec, name) for name in WORK_FIELDS}
        layout_spec = LayoutSpec(model=model, layout=spec.cut, device=spec.device,
                                 batch=spec.batch * Layout.parse(spec.cut).data, **settings)  # fmt: skip
        step = build_layout_step(
            layout_spec, layout=layout_spec.parsed_layout, device=device, recording=False,
            stages=[range(layers)], lr=LEARNING_RATE,
        )  # fmt: skip
    batch = batch_for(model, spec.batch, spec.seed)
    return step, step.phases([part.to(device) for part in batch])


def with_blocks(hardware: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """Returns the file with the tables of all successful block records."""
    tables = dict(hardware.operations)
    for record in records:
        if record.kind == BlocksSpec.kind and record.status == "ok":
            _, *rows = record.tables["times"]
            spec = {**record.spec, "model": ModelSpec(**record.spec["model"])}
            tables[BlocksSpec(**spec).operation] = OperationTable(AXES, tuple(map(tuple, rows)))
    return dataclasses.replace(hardware, operations=tables)
