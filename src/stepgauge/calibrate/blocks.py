"""Few blocks of a network, timed whole: a BlocksSpec run, and the table that its record becomes."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from stepgauge.bench.step import LEARNING_RATE, make_batch
from stepgauge.bench.sweep import Job
from stepgauge.measure.devices import free_unused_memory
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import time_phases
from stepgauge.spec.blocks import AXES, CLOCKS, LAYERS, PHASES, BlocksSpec, TimedBlocks
from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.train.build import build_step

WARMUP, STEPS = 4, 12
NOTHING_MS = 1e-6  # on a CPU, which launches nothing
SECONDS = 0.3  # at least, of each number of layers: the clock is then that of a step


def job(spec: BlocksSpec) -> Job:
    return Job(run, spec, process=spec.kind)


def run(spec: BlocksSpec) -> Record:
    """Times the step with each number of LAYERS."""
    device, rows = torch.device(spec.device), []
    for layers in LAYERS:
        clocks = _times(spec, layers, device)
        rows += [
            [layers, PHASES.index(phase), CLOCKS.index(clock), clocks[clock][phase] * 1e3]
            for phase in PHASES
            for clock in CLOCKS
        ]
        torch.compiler.reset()
        free_unused_memory(device)
    blocks = TimedBlocks(OperationTable(AXES, tuple(map(tuple, rows))))
    return Record(
        kind=spec.kind,
        spec=dataclasses.asdict(spec),
        metrics={
            f"{phase}_{clock}_us": Sample.exact(blocks.block_us(phase, clock), "us")
            for phase in PHASES
            for clock in CLOCKS
        },
        tables={"times": [[*AXES, "us"], *rows]},
        environment=environment(device),
    )


def _times(spec: BlocksSpec, layers: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Median milliseconds by clock and phase. Few layers' launches fit into the device's queue, so
    that a phase's call returns when the host is through.
    """
    model = dataclasses.replace(spec.network, num_layers=layers)
    step = build_step(dataclasses.replace(spec, model=model), lr=LEARNING_RATE)
    phases = step.phases(make_batch(spec, device))
    host: dict[str, list[float]] = {name: [] for name in phases}

    def watched(name: str) -> Callable[[], None]:
        def call() -> None:
            begin = time.perf_counter()
            phases[name]()
            host[name].append((time.perf_counter() - begin) * 1e3)

        return call

    with step.precision.matmul_mode():
        own = time_phases(
            {name: watched(name) for name in phases}, device,
            warmup=WARMUP, steps=STEPS, seconds=SECONDS,
        )  # fmt: skip
    launched = {name: statistics.median(times[WARMUP:]) for name, times in host.items()}
    return {
        "host": dict.fromkeys(phases, NOTHING_MS) if device.type == "cpu" else launched,
        "device": {name: statistics.median(own[name]) for name in phases},
    }


def with_blocks(hardware: HardwareFile, records: Sequence[Record]) -> HardwareFile:
    """The file with the tables of the records that are of blocks and went well."""
    found = dict(hardware.operations)
    for record in records:
        if record.kind == BlocksSpec.kind and record.status == "ok":
            _, *rows = record.tables["times"]
            spec = {**record.spec, "model": ModelSpec(**record.spec["model"])}
            found[BlocksSpec(**spec).operation] = OperationTable(AXES, tuple(map(tuple, rows)))
    return dataclasses.replace(hardware, operations=found)
