"""Joins the CUDA allocator's history with the tracked storages.

The allocator counts its events, and the tracker reads the count before and after every operator, which
gives the operator's window. An allocation is a tracked storage if it has the storage's address and is
within the window of the operator that made it. Other allocations in a window are the operator's
temporaries, or workspaces if they are never freed.
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
    Window,
)
from stepgauge.spec.memory import ACTIVATIONS, OTHER, TEMPORARIES

UNSEEN = "outside of operators"
EVENTS = ("alloc", "free_completed")


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Records the allocator's history, with Python stacks for PyTorch's viewer."""
    torch.cuda.memory._record_memory_history("all", context="all", stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def event_count(device: torch.device) -> int:
    """Returns the number of allocations and frees so far: the current position in the history."""
    counts = torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]
    return int(counts["allocated"]) + int(counts["freed"])


def snapshot(device: torch.device) -> dict[str, Any]:
    return torch.cuda.memory._snapshot(device)


def save(snapshot: Mapping[str, Any], path: Path) -> None:
    """Writes the snapshot for PyTorch's viewer (pytorch.org/memory_viz)."""
    with path.open("wb") as file:
        pickle.dump(snapshot, file)


def trace_of(snapshot: Mapping[str, Any], device: torch.device) -> list[Mapping[str, Any]]:
    """Returns the allocations and frees of the device, in order."""
    trace = snapshot["device_traces"][device.index or 0]
    return [entry for entry in trace if entry["action"] in EVENTS]


def joined(
    trace: Sequence[Mapping[str, Any]], tracker: StorageTracker, *, first: int
) -> list[Allocation]:
    """Returns every allocation of the history, as a tracked storage or as an operator's temporary.

    first  event count at the start of the history
    """
    tracked: dict[int, list[Allocation]] = {}
    for allocation in tracker.allocations:
        tracked.setdefault(allocation.address, []).append(allocation)
    windows = _WindowFinder(tracker)
    marks = iter(sorted(tracker.marks, key=lambda mark: mark.event))
    mark = next(marks, None)
    live: dict[int, Allocation] = {}
    allocations = []
    for event, entry in enumerate(trace, first):
        while mark is not None and mark.event <= event:
            if mark.address in live:
                _apply(mark, live[mark.address])
            mark = next(marks, None)
        address = entry["addr"]
        if entry["action"] != "alloc":
            if address in live:
                live.pop(address).died = event
            continue
        allocation = _allocation(
            event, entry, tracked.get(address, []), windows.at(event), tracker.phases
        )
        live[address] = allocation
        allocations.append(allocation)
    _label_kept_by_forward(allocations, tracker.phases)
    for allocation in live.values():
        if allocation.category == TEMPORARIES and allocation.operator.startswith("inside"):
            allocation.category = OTHER  # a library's workspace
    return allocations


def _allocation(
    event: int,
    entry: Mapping[str, Any],
    candidates: Sequence[Allocation],
    window: Window | None,
    phases: Sequence[Phase],
) -> Allocation:
    """Returns the allocation as one of the tracked candidates, or as a temporary of the operator.

    candidates  tracked storages at the same address
    window      of the operator that ran, or None
    """
    size, address = entry["size"], entry["addr"]
    if window is not None:
        # A storage is seen right after the operator that made it.
        tracked = [a for a in candidates if window.start < a.born <= window.end]
        if tracked:
            return dataclasses.replace(
                tracked[-1], bytes=size, born=event, died=None, address=address
            )
    return Allocation(
        bytes=size,
        born=event,
        phase=next((phase.name for phase in phases if phase.start <= event < phase.end), ""),
        operator=f"inside {window.operator}" if window else UNSEEN,
        module=window.module if window else "",
        line=window.line if window else "",
        category=TEMPORARIES,
        address=address,
    )


def _apply(mark: StorageMark, allocation: Allocation) -> None:
    """Labels the allocation. A tensor that compiled code keeps is an activation, unless it already has
    another label.
    """
    if mark.category == ACTIVATIONS and allocation.category != TEMPORARIES:
        return
    allocation.category = mark.category
    allocation.module = mark.module or allocation.module
    allocation.operator = mark.operator or allocation.operator
    allocation.line = mark.line or allocation.line


def _label_kept_by_forward(allocations: Sequence[Allocation], phases: Sequence[Phase]) -> None:
    """Labels as activations what compiled code allocated in a forward phase and kept until its end."""
    for phase in phases:
        if phase.name != "forward":
            continue
        for allocation in allocations:
            is_unseen = allocation.category == TEMPORARIES and allocation.operator == UNSEEN
            is_born_within = phase.start <= allocation.born < phase.end
            is_kept = allocation.died is None or allocation.died >= phase.end
            if is_unseen and is_born_within and is_kept:
                allocation.category = ACTIVATIONS


class _WindowFinder:
    """Finds the operator that ran at an event. Events must be queried in rising order."""

    def __init__(self, tracker: StorageTracker):
        self._windows = iter(sorted(tracker.windows, key=lambda window: window.end))
        self._current = next(self._windows, None)

    def at(self, event: int) -> Window | None:
        while self._current is not None and self._current.end <= event:
            self._current = next(self._windows, None)
        inside = self._current is not None and self._current.start <= event
        return self._current if inside else None
