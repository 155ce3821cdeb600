"""The CUDA allocator's own history, joined with the storages that were tracked.

The allocator counts its events; the tracker reads that count around every operator. An allocation
in the history is a tracked storage if it has its address within the window of the operator that
made it; any other allocation of the window is the operator's own, a temporary, or a workspace if it
is never given back.
"""

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from stepgauge.measure.memory.storage_tracker import (
    Allocation,
    Phase,
    StorageMark,
    StorageTracker,
)
from stepgauge.spec.memory import ACTIVATIONS, OTHER, TEMPORARIES

UNSEEN = "outside of operators"
EVENTS = ("alloc", "free_completed")


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """The allocator keeps its history, with Python's stacks, for PyTorch's own viewer too."""
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def event_count(device: torch.device) -> int:
    """Allocations and frees so far: where in the history we are."""
    counts = torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]
    return int(counts["allocated"]) + int(counts["freed"])


def snapshot(device: torch.device) -> dict[str, Any]:
    return torch.cuda.memory._snapshot(device)


def save(found: Mapping[str, Any], path: Path) -> None:
    """For PyTorch's viewer (pytorch.org/memory_viz), which takes the file by drag and drop."""
    with path.open("wb") as file:
        pickle.dump(found, file)


def trace_of(found: Mapping[str, Any], device: torch.device) -> list[Mapping[str, Any]]:
    """The allocations and frees of the device, in order."""
    return [
        entry for entry in found["device_traces"][device.index or 0] if entry["action"] in EVENTS
    ]


def joined(
    trace: Sequence[Mapping[str, Any]], tracker: StorageTracker, *, first: int
) -> list[Allocation]:
    """Every allocation of the history, as the storage that was tracked or as its operator's own.

    first  event count when the history began
    """
    tracked: dict[int, list[Allocation]] = {}
    for allocation in tracker.allocations:
        tracked.setdefault(allocation.address, []).append(allocation)
    windows = _WindowsAt(tracker)
    marks = iter(sorted(tracker.marks, key=lambda mark: mark.event))
    mark = next(marks, None)
    live: dict[int, Allocation] = {}
    found = []
    for event, entry in enumerate(trace, first):
        while mark is not None and mark.event <= event:
            if mark.address in live:
                _told(live[mark.address], mark)
            mark = next(marks, None)
        address = entry["addr"]
        if entry["action"] != "alloc":
            if address in live:
                live.pop(address).died = event
            continue
        allocation = _made_at(event, entry, tracked.get(address, []), windows.at(event), tracker)
        live[address] = allocation
        found.append(allocation)
    _keep_what_outlives_forward(found, tracker.phases)
    for allocation in live.values():
        if allocation.category == TEMPORARIES and allocation.operator.startswith("inside"):
            allocation.category = OTHER  # a library's workspace
    return found


def _made_at(
    event: int,
    entry: Mapping[str, Any],
    candidates: Sequence[Allocation],
    made: Any,
    tracker: StorageTracker,
) -> Allocation:
    """The allocation as the storage among the candidates that it is, or as its operator's own."""
    size, address = entry["size"], entry["addr"]
    if known := _storage(candidates, made):
        return dataclasses.replace(known, bytes=size, born=event, died=None, address=address)
    return Allocation(
        bytes=size,
        born=event,
        phase=_phase_at(tracker.phases, event),
        operator=f"inside {made.operator}" if made else UNSEEN,
        module=made.module if made else "",
        line=made.line if made else "",
        category=TEMPORARIES,
        address=address,
    )


def _told(allocation: Allocation, mark: StorageMark) -> None:
    """What compiled code keeps is an activation unless the storage is known as something else."""
    if mark.category == ACTIVATIONS and allocation.category != TEMPORARIES:
        return
    allocation.category = mark.category
    allocation.module = mark.module or allocation.module
    allocation.operator = mark.operator or allocation.operator
    allocation.line = mark.line or allocation.line


def _keep_what_outlives_forward(found: Sequence[Allocation], phases: Sequence[Phase]) -> None:
    """What compiled code made in a forward phase and lives at its end is held for backward."""
    for phase in phases:
        if phase.name != "forward":
            continue
        for allocation in found:
            unseen = allocation.category == TEMPORARIES and allocation.operator == UNSEEN
            born_within = phase.start <= allocation.born < phase.end
            if unseen and born_within and (allocation.died is None or allocation.died >= phase.end):
                allocation.category = ACTIVATIONS


def _storage(candidates: Sequence[Allocation], made: Any) -> Allocation | None:
    """The storage at the address whose birth was seen right after the operator that made it."""
    seen = [a for a in candidates if made is not None and made.start < a.born <= made.end]
    return seen[-1] if seen else None


def _phase_at(phases: Sequence[Phase], event: int) -> str:
    return next((phase.name for phase in phases if phase.start <= event < phase.end), "")


class _WindowsAt:
    """Which operator ran at an event; asked with rising events."""

    def __init__(self, tracker: StorageTracker):
        self._windows = iter(sorted(tracker.windows, key=lambda window: window.end))
        self._current = next(self._windows, None)

    def at(self, event: int) -> Any:
        while self._current is not None and self._current.end <= event:
            self._current = next(self._windows, None)
        inside = self._current is not None and self._current.start <= event
        return self._current if inside else None
