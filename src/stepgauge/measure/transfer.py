"""Executes schedules of moves (spec.broadcast) in one process: on GPUs with streams and peer copies;
on a CPU, whose memory stands for each device, one copy after another.
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
_REPEATS = 5  # of a link alone
# What goes over a link in one timing, at least, in so many moves at most: of a small tensor the cost
# of beginning would be taken for the link's.
_LINK_BYTES, _MOST_MOVES = 64 << 20, 100


def host_tensor(size: int) -> Tensor:
    """Known bytes in memory as it comes."""
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
    """Milliseconds from the first move's begin to the last one's end, on the host's clock."""
    times = []
    for index in range(warmup + repeats):
        engine.meet()
        start = time.perf_counter()
        engine.run(schedule)
        if index >= warmup:
            times.append((time.perf_counter() - start) * 1e3)
    return times


def rates(engine: "Engine", size: int, gpus: int) -> Rates:
    """Each kind of link alone, on the same engine: the best of a few runs, since bounds rest on it."""
    bounds = [size * g // gpus for g in range(gpus + 1)]
    again = min(_MOST_MOVES, ceil_div(_LINK_BYTES, size))

    def bytes_per_s(*moves: Move) -> float:
        plan = BroadcastPlan(again * list(moves))
        times = time_schedule(engine, plan, warmup=2, repeats=_REPEATS)
        return sum(move.bytes for move in plan.moves) / min(times) * 1e3

    one = bytes_per_s(Move(PINNED, 0, 0, size))
    parts = bytes_per_s(*(Move(PINNED, g, bounds[g], bounds[g + 1]) for g in range(gpus)))
    return Rates(
        host_link=one,
        host_links=max(one, parts),  # small parts may be slower than the whole over one link
        peer_link=bytes_per_s(Move(0, 1, 0, size)) if gpus > 1 else 0.0,
        host_copy=bytes_per_s(Move(HOST, PINNED, 0, size)),
    )


class _Host:
    """The places on the host."""

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
    """Holds the tensor in all places. Of GPUs a pair of streams for each two places, an event for
    each move.
    """

    def __init__(self, size: int, devices: Sequence[torch.device], block: int):
        self.on_gpus = devices[0].type == "cuda"
        self.host = _Host(size, block, pin=self.on_gpus)
        self.devices = devices
        self.tensors = [torch.zeros(size, dtype=torch.uint8, device=each) for each in devices]
        self.streams: dict[tuple[str | int, str | int], list[torch.cuda.Stream]] = {}

    def run(self, schedule: BroadcastPlan) -> None:
        """All moves, begun and ended."""
        ended: list[torch.cuda.Event | None] = []
        for move in schedule.moves:
            ended.append(self._start(move, [ended[index] for index in move.after]))
            if schedule.one_by_one:
                self.meet()
        self.meet()

    def _start(self, move: Move, after: list[torch.cuda.Event | None]) -> torch.cuda.Event | None:
        """Enqueues the move behind the events; a copy by the host is done now, and has no event."""
        source, target = (self._part(place, move) for place in (move.source, move.target))
        waited = [event for event in after if event is not None]
        if not self.on_gpus or isinstance(move.target, str):
            for event in waited:
                event.synchronize()
            target.copy_(source)
            return None
        streams = self._streams_of(move)
        with contextlib.ExitStack() as stack:
            for stream in streams:
                for event in waited:
                    stream.wait_event(event)
                # Of both devices: torch makes a peer copy wait for the current stream of either.
                stack.enter_context(torch.cuda.stream(stream))
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(streams[-1])
        return event

    def _streams_of(self, move: Move) -> list[torch.cuda.Stream]:
        """A stream on each GPU that takes part, the target's last."""
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
        """As before a run: nothing has arrived."""
        for tensor in self.tensors:
            tensor.zero_()
        self.meet()

    def wrong(self) -> int:
        """Bytes, over all devices, that are not the host tensor's."""
        return sum(_differing(tensor.cpu(), self.host.memory) for tensor in self.tensors)

    def meet(self) -> None:
        """Waits until all devices have done all before."""
        for device in self.devices:
            synchronize(device)


def _differing(tensor: Tensor, expected: Tensor) -> int:
    return 0 if torch.equal(tensor, expected) else int((tensor != expected).sum())
