"""Rows that many ranks measure together.

A Job whose `run` is an OnRanks has a spec with `ranks` (and `device`). Its function `measure` runs
on every rank, in a process group; `record` makes one record of what they gave. On one machine the
ranks are started here; in a process of torchrun they are there already, every rank walks the same
list of jobs, and rank 0 alone has the store.
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
from stepgauge.runtime.world import TIMEOUT_S, gathered_objects, joined_world
from stepgauge.spec.fallbacks import NATIVE
from stepgauge.spec.record import Record
from stepgauge.train.precision import unavailable


@dataclasses.dataclass(frozen=True)
class OnRanks:
    """What a Job runs for a spec with `ranks`.

    measure    called with the spec on every rank; its value must be picklable
    record     makes the record from the spec and the values in the order of ranks; runs on rank 0
    shared     rows one after another may be measured by the same processes, which spares starting
               them
    timeout_s  of a collective: a rank that hangs longer ends the row
    """

    measure: Callable[[Any], Any]
    record: Callable[[Any, list[Any]], Record]
    shared: bool = False
    timeout_s: float = TIMEOUT_S

    def __call__(self, spec: Any) -> Record:
        """The row, on a rank between its peers: rank 0's record, the same on all."""
        return _measure_on_this_rank(self, spec)

    def settings(self, spec: Any) -> dict[str, Any]:
        """Which processes measure the row, as runtime.workers takes it."""
        return {
            "ranks": spec.ranks,
            "device": spec.device,
            "backend": getattr(spec, "group_backend", None),
            "timeout_s": self.timeout_s,
            "share": "ranks" if self.shared else "",
        }


def require_ranks(spec: Any) -> None:
    """Raises ValueError for what the spec asks but the machine has not, before ranks are started."""
    if reason := unavailable(spec.precision, torch.device(spec.device)):
        raise ValueError(reason)
    gpus = torch.cuda.device_count()
    if spec.device.startswith("cuda") and joined_world() is None and spec.ranks > gpus:
        raise ValueError(f"ranks is {spec.ranks}; this machine has {gpus} GPUs, one a rank")


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """Of each repetition, the rank that took longest: the job goes on when the last has finished.

    times  one list a rank, of equal length
    """
    return [max(step) for step in zip(*times, strict=True)]


def _measure_on_this_rank(run: OnRanks, spec: Any) -> Record:
    value = _value(run.measure, spec)
    given = gathered_objects((value, platform.node(), _device_name(spec.device)))
    values, hosts, devices = (list(part) for part in zip(*given, strict=True))
    found = [with_launchers(run.record(spec, values)) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    record = found[0]
    assert record is not None
    where = {"hosts": hosts, "devices": devices, "threads_per_rank": torch.get_num_threads()}
    return dataclasses.replace(record, environment={**record.environment, **where})


def _value(measure: Callable[[Any], Any], spec: Any) -> Any:
    """What the row compiled ends with it: the next row's sizes would be taken for ones that change
    from call to call, and compiled slower.
    """
    try:
        return run_here(measure, spec)
    finally:
        if getattr(spec, "compile", "off") != "off":
            torch.compiler.reset()
        free_unused_memory(torch.device(spec.device))


def _device_name(device: str) -> str:
    return device_name(torch.device("cuda") if device.startswith("cuda") else torch.device(device))


def run_here(run: Callable[[Any], Any], spec: Any) -> Any:
    """What the function gives of the spec. Raises MemoryError, with the reason, where memory ran
    out.
    """
    libraries.calls.clear()  # what `with_launchers` names is what ran from here on
    if spec.device == "cpu":
        limit_host_memory()
    try:
        return run(spec)
    except Exception as error:
        if (reason := out_of_memory_reason(error)) is None:
            raise
        raise MemoryError(reason) from error


def with_launchers(record: Record) -> Record:
    """The record of a run in this process with what launched its kernels."""
    if not libraries.calls:
        return record
    by_pass = libraries.titles_by_pass()
    paths = {f"attention's {passes}": titles for passes, titles in by_pass.items()}
    return dataclasses.replace(record, environment={**record.environment, NATIVE: paths})
