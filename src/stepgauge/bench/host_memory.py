"""Refuses a step that cannot fit into the host's memory, before it is built."""

import dataclasses
from typing import Any

from stepgauge.bench.build import least_bytes
from stepgauge.cost.memory.host import least_held
from stepgauge.measure import devices
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec
from stepgauge.spec.units import GIB
from stepgauge.train.precision import PRECISIONS

# A step is advised if its lower bound is at most this share of the free memory: its peak is higher.
ADVISED = 0.75


def require_memory(spec: WorkSpec) -> None:
    """Raises MemoryError for a step on a CPU that surely needs more memory than is free.

    The message names options with which it should fit.
    """
    if spec.device.startswith("cpu"):
        devices.require_host_memory(needed_bytes(spec), advise=lambda free: _advice(spec, free))


def needed_bytes(spec: WorkSpec) -> int:
    """Returns a lower bound of the step's memory in bytes. Without formulas for the network, it has no
    activations.
    """
    least = least_bytes(spec)
    try:
        held = least_held(spec)
    except ValueError:
        return least
    gradients = 0
    if spec.phases != "forward":
        gradients = PRECISIONS[spec.precision].parameters.itemsize * spec.network.num_parameters
    return max(least, int(held) + least - gradients)  # there are none yet when backward starts


def _advice(spec: WorkSpec, free_bytes: int) -> str:
    """Returns options, each of which alone should make the step fit, with what it needs then; "" if none
    does.
    """
    if not isinstance(spec.model, ModelSpec):
        return ""
    changes: dict[str, dict[str, Any]] = {
        "--loss fused": {"model": dataclasses.replace(spec.model, loss="fused")},
        "--checkpointing blocks": {"checkpointing": "blocks"},
    }
    halves = [spec.batch >> n for n in range(1, spec.batch.bit_length())]
    changes |= {f"--batch {batch}": {"batch": batch} for batch in halves}
    helpful = []
    for options, change in changes.items():
        needed = needed_bytes(dataclasses.replace(spec, **change))
        if needed <= ADVISED * free_bytes:
            helpful.append(f"{needed / GIB:.1f} GiB with {options}")
            if "batch" in change:  # the largest that fits
                break
    return f"at least {', '.join(helpful)}" if helpful else ""
