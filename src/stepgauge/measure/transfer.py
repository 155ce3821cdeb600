"""Executes broadcast schedules (spec.broadcast) in one process: on GPUs with streams and peer copies,
on a CPU with one copy after another in host memory.
"""

import contextlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stepgauge.measure.devices import synchronize
from stepgauge.spec.broadcast import HOST, PINNED, STAGING, BroadcastPlan, Move, Rates
from stepgauge.spec.units import ceil_div

_PATTERN = 16_777_213  # bytes until the test pattern repeats: a prime
_REPEATS = 5  # timings of each link
# Each timing of a link moves at least this many bytes, in at most this many moves. With a single
# small move, the cost of starting it would dominate the time.
_LINK_BYTES, _MOST_MOVES = 64 << 20, 100


def host_tensor(size: int) -> Tensor:
    """Returns a known pattern in pageable host memory."""
    base = torch.randint(
        256, (min(size, _PATTERN),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    tensor = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, _PATTERN):
        piece = tensor[start : start + _PATTERN]
        piece.copy_(base[: piece.numel()])
    return tensor


def time_schedule(
    engine: "Engine", schedule: BroadcastPlan, *, warmup: int, repeats: int
) -> list[float]:
    """Returns ms from the start of the first move to the end of the last, on the host's clock."""
    times = []
    for index in range(warmup + repeats):
        engine.synchronize()
        start = time.perf_counter()
        engine.run(schedule)
        if index >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def rates(engine: "Engine", size: int, gpus: int) -> Rates:
    """Measures the rate of each kind of link separately. It takes the best of a few timings, because
    the schedules' bounds are computed from the rates.
    """
    bounds = [size * g // gpus for g in range(gpus + 1)]
    repetitions = min(_MOST_MOVES, ceil_div(_LINK_BYTES, size))

    def bytes_per_s(*moves: Move) -> float:
        plan = BroadcastPlan(repetitions * list(moves))
        times = time_schedule(engine, plan, warmup=2, repeats=_REPEATS)
        return sum(move.bytes for move in plan.moves) / min(times) * 1e3

    one_link = bytes_per_s(Move(PINNED, 0, 0, size))
    all_links = bytes_per_s(*(Move(PINNED, g, bounds[g], bounds[g + 1]) for g in range(gpus)))
    return Rates(
        host_link=one_link,
        host_links=max(one_link, all_links),  # small parts may be slower than the whole on one link
        peer_link=bytes_per_s(Move(0, 1, 0, size)) if gpus > 1 else 0.0,
        host_copy=bytes_per_s(Move(HOST, PINNED, 0, size)),
    )


class _Host:
    """The host's tensors: pageable, pinned, and two staging buffers of one block."""

    def __init__(self, size: int, block: int, *, pin: bool):
        self.memory = host_tensor(size)
        self.pinned = self.memory.pin_memory() if pin else self.memory.clone()
        self.staging = torch.empty(2, min(block, size), dtype=torch.uint8, pin_memory=pin)
        self.block = block

    def part(self, place: str | int, move: Move) -> Tensor:
        if place == STAGING:
            return self.staging[move.start // self.block % 2, : move.bytes]
        return (self.memory if place == HOST else self.pinned)[move.start : move.stop]


class Engine:
    """Holds the tensor in all places and executes schedules. On GPUs every pair of places has its own
    streams, and every move an event.
    """

    def __init__(self, size: int, devices: Sequence[torch.device], block: int):
        self.on_gpus = devices[0].type == "cuda"
        self.host = _Host(size, block, pin=self.on_gpus)
        self.devices = devices
        self.tensors = [torch.zeros(size, dtype=torch.uint8, device=each) for each in devices]
        self.streams: dict[tuple[str | int, str | int], list[torch.cuda.Stream]] = {}

    def run(self, schedule: BroadcastPlan) -> None:
        """Runs all moves and waits for their end."""
        ends: list[torch.cuda.Event | None] = []
        for move in schedule.moves:
            ends.append(self._start(move, [ends[index] for index in move.after]))
            if schedule.one_by_one:
                self.synchronize()
        self.synchronize()

    def _start(self, move: Move, after: list[torch.cuda.Event | None]) -> torch.cuda.Event | None:
        """Enqueues the move after the events and returns its own. A copy by the host runs at once and
        has no event.
        """
        source, target = (self._part(place, move) for place in (move.source, move.target))
        events = [event for event in after if event is not None]
        if not self.on_gpus or isinstance(move.target, str):
            for event in events:
                event.synchronize()
            target.copy_(source)
            return None
        streams = self._streams_of(move)
        with contextlib.ExitStack() as stack:
            for stream in streams:
                for event in events:
                    stream.wait_event(event)
                # On both devices, because torch makes a peer copy wait for both current streams.
                stack.enter_context(torch.cuda.stream(stream))
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(streams[-1])
        return event

    def _streams_of(self, move: Move) -> list[torch.cuda.Stream]:
        """Returns a stream on each GPU of the move; the target's is the last."""
        key = (move.source, move.target)
        if key not in self.streams:
            places = [place for place in key if isinstance(place, int)]
            self.streams[key] = [torch.cuda.Stream(self.devices[place]) for place in places]
        return self.streams[key]

    def _part(self, place: str | int, move: Move) -> Tensor:
        if isinstance(place, str):
            return self.host.part(place, move)
        return self.tensors[place][move.start : move.stop]

    def clear(self) -> None:
        """Zeroes the devices' tensors."""
        for tensor in self.tensors:
            tensor.zero_()
        self.synchronize()

    def wrong(self) -> int:
        """Returns the number of bytes, over all devices, that differ from the host tensor."""
        return sum(_num_different(tensor.cpu(), self.host.memory) for tensor in self.tensors)

    def synchronize(self) -> None:
        """Waits until all devices have finished their work."""
        for device in self.devices:
            synchronize(device)


def _num_different(tensor: Tensor, expected: Tensor) -> int:
    return 0 if torch.equal(tensor, expected) else int((tensor != expected).sum())
