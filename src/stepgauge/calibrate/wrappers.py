"""Times the host's work for a wrapper, with networks so narrow that the GPU always waits.

Each rank runs a step with the wrapper and without it, in few messages and in many.
"""

import collections
import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.bench import data_parallel
from stepgauge.calibrate.host import LAYERS, narrow_network
from stepgauge.measure.devices import free_unused_memory
from stepgauge.measure.timing import time_phases
from stepgauge.spec.calibration import (
    CALIBRATED_WRAPPERS,
    WRAPPER_PHASES,
    CalibrationSpec,
    OperationTable,
    wrapper_operation,
)
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.layout import WRAPPERS
from stepgauge.train.step import TrainingStep

AXES = ("parameters", "messages", "phase")
ONE_MESSAGE_MB, MANY_MESSAGES_MB = 1e3, 1e-3
STEPS_PER_MILLISECOND = 20  # of the spec's milliseconds, in all turns together; usually 60 steps
ROUNDS = 5


def names() -> list[str]:
    return [wrapper_operation(wrapper) for wrapper in CALIBRATED_WRAPPERS]


def measure(spec: CalibrationSpec, device: torch.device) -> OperationTable:
    """Returns by how many microseconds the wrapper lengthens each phase. All ranks must call it."""
    wrapper = spec.operation.split()[-1]
    rows: list[tuple[float, ...]] = []
    for layers in LAYERS:
        for bucket_mb in _bucket_sizes(wrapper, layers):
            rows += _added_us(wrapper, layers, bucket_mb, spec, device)
    return OperationTable(AXES, tuple(rows))


def _bucket_sizes(wrapper: str, layers: int) -> list[float]:
    is_split = WRAPPERS[wrapper].buckets and layers == max(LAYERS)
    return [ONE_MESSAGE_MB, MANY_MESSAGES_MB] if is_split else [ONE_MESSAGE_MB]


def _added_us(
    wrapper: str, layers: int, bucket_mb: float, spec: CalibrationSpec, device: torch.device
) -> list[tuple[float, ...]]:
    """Returns the table's rows of one network, from steps with the wrapper and without it."""
    built = {name: _build(name, layers, bucket_mb, spec, device) for name in ("none", wrapper)}
    us = _medians_us(built, spec, device)
    wrapped: Any = built[wrapper][0].parallel.module
    parameters = sum(1 for _ in wrapped.parameters())
    # ZeRO 3 has one unit per block, and one for embedding and head
    messages = len(getattr(wrapped, "buckets", range(layers + 1)))
    del built, wrapped
    free_unused_memory(device)
    return [
        (parameters, messages, number, us[wrapper, phase] - us["none", phase])
        for phase, number in WRAPPER_PHASES.items()
    ]


def _medians_us(
    built: Mapping[str, tuple[TrainingStep, Any]], spec: CalibrationSpec, device: torch.device
) -> dict[tuple[str, str], float]:
    """Returns the time of each step's phases, by the step's name and the phase. The steps take turns,
    because a host's speed changes from second to second.
    """
    steps = max(2, round(STEPS_PER_MILLISECOND * spec.milliseconds / ROUNDS))
    times: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for number in range(ROUNDS):
        for name, (step, batch) in built.items():
            with step.precision.matmul_mode():
                dist.barrier()
                warmup = 1 if number else min(5, steps)
                found = time_phases(step.phases(batch), device, warmup=warmup, steps=steps)
            for phase in WRAPPER_PHASES:
                times[name, phase] += found[phase]
    return {key: statistics.median(values) * 1e3 for key, values in times.items()}


def _build(
    wrapper: str, layers: int, bucket_mb: float, spec: CalibrationSpec, device: torch.device
) -> tuple[TrainingStep, Any]:
    """Returns this rank's step and its batch."""
    data_parallel_spec = DataParallelSpec(
        model=narrow_network(layers),
        wrapper=wrapper,
        bucket_mb=bucket_mb,
        ranks=spec.ranks,
        batch=1,
        precision="bf16",
        device=device.type,
    )
    return data_parallel.build_on_rank(data_parallel_spec, device, dist.get_rank())
