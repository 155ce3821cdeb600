"""Tracks the storages of a small step with known sizes, and joins them with an allocator's history."""

from pathlib import Path

import torch
from torch import nn

import stepgauge
from stepgauge.measure.memory.history import joined
from stepgauge.measure.memory.storage_tracker import (
    Allocation,
    Phase,
    StorageTracker,
    program_line,
)
from stepgauge.measure.memory.timeline import block_of, by_block, general, memory_timeline, savers
from stepgauge.spec.memory import ACTIVATIONS, GRADIENTS, OTHER, PARAMETERS, STATE

CPU = torch.device("cpu")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x.sum()


def tracked_steps(tracker, model, x, optimizer, steps=2):
    tracker.label(model.parameters(), PARAMETERS)
    tracker.label([x], OTHER)
    with tracker.watching(model):
        for _ in range(steps):
            with tracker.phase("forward"):
                loss = model(x)
            with tracker.phase("backward"):
                loss.backward()
            with tracker.phase("optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                del loss
            tracker.label([t for state in optimizer.state.values() for t in state.values()], STATE)


def small_step(tracker):
    with tracker:
        model, x = Small(), torch.ones(32, 64)
        tracked_steps(tracker, model, x, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return model


def test_bytes_by_category_follow_from_the_shapes():
    tracker = StorageTracker(CPU)
    model = small_step(tracker)
    timeline = memory_timeline(tracker.allocations, tracker.phases[-3:], caching=False)
    weights = 3 * 64 * 64 * 4
    backward = [m for m in timeline.moments if m.event < timeline.phases[2].start]
    held = backward[-1].held
    assert held[PARAMETERS] == held[STATE] == held[GRADIENTS] == weights
    assert held[OTHER] == 32 * 64 * 4
    # Each relu's result is kept for its own gradient and for the next layer's. The loss is held, too.
    assert sum(timeline.bytes_of[a] for a in timeline.saved_for_backward()) == 3 * 32 * 64 * 4 + 4
    assert timeline.moments[-1].held[GRADIENTS] == 0
    assert model is not None


def test_tensors_kept_for_backward_have_their_block_and_line():
    tracker = StorageTracker(CPU)
    model = small_step(tracker)
    timeline = memory_timeline(tracker.allocations, tracker.phases[-3:], caching=False)
    saved = timeline.saved_for_backward()
    (first, *_) = savers(saved, timeline.bytes_of)
    kept_by, made_by, line, tensors, size = first
    assert (made_by, size) == ("relu", tensors * 32 * 64 * 4)
    assert line.startswith("measure/test_memory.py:")
    assert set(by_block(saved, timeline.bytes_of)) <= {"", "blocks.0", "blocks.1", "blocks.2"}
    assert kept_by in ("", "blocks.*")
    gradients = [a for a in tracker.allocations if a.category == GRADIENTS]
    assert {a.module for a in gradients} == {"blocks.0", "blocks.1", "blocks.2"}
    assert model is not None


def test_tracking_does_not_change_gradients():
    torch.manual_seed(0)
    model, x = Small(), torch.randn(8, 64)
    model(x).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with StorageTracker(CPU) as tracker, tracker.watching(model):
        model(x).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_every_tracked_storage_is_released():
    tracker = StorageTracker(CPU)
    small_step(tracker)
    assert all(allocation.died is not None for allocation in tracker.allocations)


def test_history_labels_tracked_storages_and_assigns_the_rest_to_their_operator():
    tracker = StorageTracker(CPU, events=lambda: 0)
    windows = [(0, 2, "mm"), (3, 4, "add")]
    from stepgauge.measure.memory.storage_tracker import StorageMark, Window

    tracker.windows = [
        Window(start, end, name, "blocks.0", "model.py:1") for start, end, name in windows
    ]
    tracker.phases = [Phase("forward", 0, 9)]
    tracker.allocations = [
        Allocation(1000, 2, "forward", "mm", "blocks.0", "model.py:1", ACTIVATIONS, address=16),
        Allocation(2000, 4, "forward", "add", "blocks.0", "model.py:1", PARAMETERS, address=32),
    ]
    tracker.marks = [
        StorageMark(6, 64, GRADIENTS, "blocks.0.weight"),
        StorageMark(6, 64, ACTIVATIONS, "blocks.0", "relu", "model.py:2"),  # it stays a gradient
        StorageMark(8, 16, ACTIVATIONS, "blocks.1", "mm", "model.py:3"),
    ]
    trace = [
        {"action": "alloc", "addr": 48, "size": 7},  # 0: mm's workspace, never freed
        {"action": "alloc", "addr": 16, "size": 1000},  # 1: mm's result
        {"action": "free_completed", "addr": 16, "size": 1000},  # 2
        {"action": "alloc", "addr": 32, "size": 2000},  # 3: add's result
        {"action": "free_completed", "addr": 32, "size": 2000},  # 4
        # 5: made outside of operators, later labelled as a gradient
        {"action": "alloc", "addr": 64, "size": 5},
        {"action": "free_completed", "addr": 64, "size": 5},  # 6
        {"action": "alloc", "addr": 16, "size": 1000},  # 7: another allocation at the same address
        {"action": "free_completed", "addr": 16, "size": 1000},  # 8
    ]
    allocations = joined(trace, tracker, first=0)
    assert [(a.category, a.operator, a.born, a.died) for a in allocations] == [
        (OTHER, "inside mm", 0, None),
        (ACTIVATIONS, "mm", 1, 2),
        (PARAMETERS, "add", 3, 4),
        (GRADIENTS, "outside of operators", 5, 6),
        (ACTIVATIONS, "mm", 7, 8),
    ]
    assert [a.module for a in allocations[3:]] == ["blocks.0.weight", "blocks.1"]


def test_the_history_of_a_real_step_keeps_the_categories_of_its_storages():
    """The tracker's own events serve as the allocator's history."""
    tracker = StorageTracker(CPU)
    events = []
    tracker._events = lambda: tracker._count
    model = small_step(tracker)
    for allocation in tracker.allocations:
        events.append((allocation.born, "alloc", allocation))
        if allocation.died is not None:
            events.append((allocation.died, "free_completed", allocation))
    trace = [
        {"action": action, "addr": a.address, "size": a.bytes}
        for _, action, a in sorted(events, key=lambda event: event[0])
    ]
    for allocation in tracker.allocations:
        allocation.born += 1  # on CUDA the count is read after the allocation
    allocations = joined(trace, tracker, first=0)
    assert [a.category for a in allocations] == [a.category for a in tracker.allocations]
    assert model is not None


def test_block_of_a_path_and_path_without_numbers():
    assert [block_of(path) for path in ("blocks.3.attention", "head", "0.linear", "a.b.12")] == [
        "blocks.3", "", "0", "a.b.12",
    ]  # fmt: skip
    assert general("blocks.3.experts.11.up") == "blocks.*.experts.*.up"
    assert general("3.experts.up") == "*.experts.up" and general("2.weight") == "2.weight"


def test_the_line_of_a_storage_is_not_one_of_the_training_step(tmp_path):
    caller = Path(stepgauge.__file__).parent / "train" / "user_model.py"
    lines = [
        eval(compile("program_line()", str(file), "eval"), {"program_line": program_line})
        for file in (caller, tmp_path / "mine.py")
    ]
    assert lines[0] == "" and lines[1].endswith("/mine.py:1")
