"""Rows that several ranks measure together.

The spec of a Job whose `run` is an OnRanks has the fields `ranks` and `device`. `measure` runs on
every rank of a process group, and `record` turns the results of all ranks into one record. Without
torchrun the ranks are started here. Under torchrun they already run: every rank goes through the
same list of jobs, and only rank 0 writes to the store.
"""

import dataclasses
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.kernels.attention import libraries
from stepgauge.measure.devices import free_unused_memory, limit_host_memory, out_of_memory_reason
from stepgauge.measure.environment import device_name
from stepgauge.runtime.world import gathered_objects, joined_world
from stepgauge.spec.fallbacks import NATIVE
from stepgauge.spec.record import Record
from stepgauge.train.precision import unavailable


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """The function of a Job that several ranks run.

    measure  called with the spec on every rank; its result must be picklable
    record   called on rank 0 with the spec and the results in rank order; returns the record
    """

    measure: Callable[[Any], Any]
    record: Callable[[Any, list[Any]], Record]

    def __call__(self, spec: Any) -> Record:
        """Measures the row on this rank and returns rank 0's record, on every rank."""
        result = _run_and_free(self.measure, spec)
        # "cuda" is the device that this rank has set, whatever number the spec has.
        device = torch.device("cuda" if spec.device.startswith("cuda") else spec.device)
        gathered = gathered_objects((result, platform.node(), device_name(device)))
        results, hosts, devices = (list(part) for part in zip(*gathered, strict=True))
        is_first = dist.get_rank() == 0
        shared = [with_launchers(self.record(spec, results)) if is_first else None]
        dist.broadcast_object_list(shared)
        record = shared[0]
        assert record is not None
        where = {"hosts": hosts, "devices": devices, "threads_per_rank": torch.get_num_threads()}
        return dataclasses.replace(record, environment={**record.environment, **where})

    def settings(self, spec: Any) -> dict[str, Any]:
        """Returns the arguments of `Workers.call` (runtime.workers) that choose the processes."""
        return {
            "ranks": spec.ranks,
            "device": spec.device,
            "backend": getattr(spec, "group_backend", None),
            "share": "ranks",
        }


def require_ranks(spec: Any) -> None:
    """Raises ValueError if the machine lacks the spec's precision or GPUs; starts no ranks."""
    if reason := unavailable(spec.precision, torch.device(spec.device)):
        raise ValueError(reason)
    gpus = torch.cuda.device_count()
    if spec.device.startswith("cuda") and joined_world() is None and spec.ranks > gpus:
        raise ValueError(f"ranks is {spec.ranks}; this machine has {gpus} GPUs, one a rank")


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Returns the longest time of each repetition: a step ends when its slowest rank has finished.

    times  one list per rank, of equal length
    """
    return [max(step) for step in zip(*times, strict=True)]


def _run_and_free(measure: Callable[[Any], Any], spec: Any) -> Any:
    """Measures the row, then frees its memory and compiled code.

    If the compiled code stayed, torch.compile would take the next row's sizes for dynamic shapes and
    generate slower code.
    """
    try:
        return run_here(measure, spec)
    finally:
        if getattr(spec, "compile", "off") != "off":
            torch.compiler.reset()
        free_unused_memory(torch.device(spec.device))


def run_here(run: Callable[[Any], Any], spec: Any) -> Any:
    """Returns run(spec). Raises MemoryError with the reason if memory ran out."""
    libraries.calls.clear()  # `with_launchers` then names only the kernels of this run
    if spec.device == "cpu":
        limit_host_memory()
    try:
        return run(spec)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        raise MemoryError(reason) from error


def with_launchers(record: Record) -> Record:
    """Returns the record of a run in this process with the libraries that launched its attention
    kernels.
    """
    if not libraries.calls:
        return record
    launchers = {f"attention's {p}": titles for p, titles in libraries.titles_by_pass().items()}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: launchers})
