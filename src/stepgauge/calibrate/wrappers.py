"""Times the host's work for a wrapper, with networks so narrow that the GPU always waits.

Each rank runs a step with the wrapper and without it, in few messages and in many.
"""

import statistics
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

AXES = ("parameters", "messages", "phase")
ONE_MESSAGE_MB, MANY_MESSAGES_MB = 1e3, 1e-3
STEPS_PER_MILLISECOND = 5  # of the spec's milliseconds; usually 20 steps


def names() -> list[str]:
    return [wrapper_operation(wrapper) for wrapper in CALIBRATED_WRAPPERS]


def measure(spec: CalibrationSpec, device: torch.device) -> OperationTable:
    """Returns by how many microseconds the wrapper lengthens each phase. All ranks must call it."""
    wrapper = spec.operation.split()[-1]
    rows: list[tuple[float, ...]] = []
    for layers in LAYERS:
        for bucket_mb in _bucket_sizes(wrapper, layers):
            bare, *_ = _phases_us("none", layers, bucket_mb, spec, device)
            phases, parameters, messages = _phases_us(wrapper, layers, bucket_mb, spec, device)
            rows += [
                (parameters, messages, number, phases[phase] - bare[phase])
                for phase, number in WRAPPER_PHASES.items()
            ]
    return OperationTable(AXES, tuple(rows))


def _bucket_sizes(wrapper: str, layers: int) -> list[float]:
    is_split = WRAPPERS[wrapper].buckets and layers == max(LAYERS)
    return [ONE_MESSAGE_MB, MANY_MESSAGES_MB] if is_split else [ONE_MESSAGE_MB]


def _phases_us(
    wrapper: str, layers: int, bucket_mb: float, spec: CalibrationSpec, device: torch.device
) -> tuple[dict[str, float], int, int]:
    """Returns the medians of the phases, and the step's numbers of parameters and messages."""
    data_parallel_spec = DataParallelSpec(
        model=narrow_network(layers),
        wrapper=wrapper,
        bucket_mb=bucket_mb,
        ranks=spec.ranks,
        batch=1,
        precision="bf16",
        device=device.type,
    )
    step, batch = data_parallel.build_on_rank(data_parallel_spec, device, dist.get_rank())
    steps = max(2, round(STEPS_PER_MILLISECOND * spec.milliseconds))
    with step.precision.matmul_mode():
        dist.barrier()
        times = time_phases(step.phases(batch), device, warmup=min(5, steps), steps=steps)
    wrapped: Any = step.parallel.module
    parameters = sum(1 for _ in wrapped.parameters())
    # ZeRO 3 has one unit per block, and one for embedding and head
    messages = len(getattr(wrapped, "buckets", range(layers + 1)))
    del step, wrapped
    free_unused_memory(device)
    medians = {phase: statistics.median(times[phase]) * 1e3 for phase in WRAPPER_PHASES}
    return medians, parameters, messages
