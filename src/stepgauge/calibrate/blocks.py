"""Few blocks of a network, timed whole: a BlocksSpec run on its ranks, and the table that its record
becomes.
"""

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
COPIES, COPIED_BYTES = 60, 2**29  # 30 ms on an H200; a step of five blocks is launched in 10 to 25
NOTHING_MS = 1e-6  # on a CPU, which launches nothing
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
    """Of each time the slowest rank's."""
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


ON_RANKS = OnRanks(measure, record, shared=True)


def _times(spec: BlocksSpec, device: torch.device) -> Times:
    """Medians. The device is timed behind other work, for whose length the host is ahead:
    few blocks behind nothing would wait for the host, where many do not.
    """
    lead = {} if device.type == "cpu" else {"lead": _busy(device)}
    found = {}
    for layers in LAYERS:
        step, phases = _build(spec, layers, device)
        launched = host_times(step, phases, device, warmup=WARMUP, steps=STEPS)
        with step.precision.matmul_mode():
            taken = time_phases({**lead, **phases}, device, warmup=1, steps=STEPS)
        for phase in TRAINING_PHASES:
            host = NOTHING_MS if device.type == "cpu" else statistics.median(launched[phase])
            found[layers, phase, "host"] = host
            found[layers, phase, "device"] = statistics.median(taken[phase])
        del step, phases
        torch.compiler.reset()
        free_unused_memory(device)
    return found


def _busy(device: torch.device) -> Callable[[], None]:
    """Copies for longer than the host takes to launch a step of few blocks."""
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device) for _ in "ab")

    def call() -> None:
        for _ in range(COPIES):
            target.copy_(source)

    return call


def _build(spec: BlocksSpec, layers: int, device: torch.device) -> tuple[TrainingStep, Phases]:
    """A step with so many blocks: of ranks that share them this rank's part, else each rank's own."""
    model = dataclasses.replace(spec.network, num_layers=layers)
    if spec.cut == "none":
        alone = dataclasses.replace(spec, model=model, device=str(device))
        step = build_step(alone, lr=LEARNING_RATE)
    else:
        how = {name: getattr(spec, name) for name in WORK_FIELDS}
        asked = LayoutSpec(model=model, layout=spec.cut, device=spec.device,
                           batch=spec.batch * Layout.parse(spec.cut).data, **how)  # fmt: skip
        step = build_layout_step(
            asked, layout=asked.parsed_layout, device=device, recording=False,
            stages=[range(layers)], lr=LEARNING_RATE,
        )  # fmt: skip
    batch = batch_for(model, spec.batch, spec.seed)
    return step, step.phases([part.to(device) for part in batch])


def with_blocks(hardware: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """The file with the tables of the records that are of blocks and went well."""
    found = dict(hardware.operations)
    for record in records:
        if record.kind == BlocksSpec.kind and record.status == "ok":
            _, *rows = record.tables["times"]
            spec = {**record.spec, "model": ModelSpec(**record.spec["model"])}
            found[BlocksSpec(**spec).operation] = OperationTable(AXES, tuple(map(tuple, rows)))
    return dataclasses.replace(hardware, operations=found)
