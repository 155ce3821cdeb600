"""What the stages of a rank take when nothing else runs: from it a row's step and its peaks are
simulated before it runs.
"""

import dataclasses
import statistics
import time
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.bench.pipeline_bytes import between, in_step, travelling_bytes
from stepgauge.bench.stage_calls import stage_calls
from stepgauge.cost.pipeline.timeline import Durations, transfers_of
from stepgauge.measure import devices
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.step import Batch
from stepgauge.runtime.progress import tell
from stepgauge.spec.plan.pipeline.check import Held

PROBED = 4  # micro-batches that a stage is timed over, one after another
ISSUED = 2  # of them, whose issue is timed: later ones may wait for room in the launch queue
REPEATS, MOST_REPEATS = 3, 20
PROBED_S = 0.4  # in 0.1 s the host's time for a computation was off by 20 %, either way
COPIED, COPY_S = 2**28, 1e-4  # bytes, and about the seconds of a GPU that copies them
MOST_COPIES = 128  # a GPU takes about a thousand launches before the host has to wait
# What a stage takes alone, by what that depends on: schedules of a sweep share stages.
KNOWN: dict[Hashable, "_Alone"] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probed:
    """What the stages of one rank take alone: ms by (stage, kind), and of a transfer; bytes that a
    micro-batch of a stage holds, beside those that the rank always has (weights and gradients) and
    those that an action needs for itself; the parts of each stage. Without a GPU no bytes are known.
    """

    actions: dict[tuple[int, str], float]
    transfer_ms: float
    host_ms: float
    held: dict[int, Held]
    parts: list[range]
    base_bytes: int = 0
    within_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Alone:
    """A stage alone: ms a micro-batch by kind, and of the host to issue one; bytes as in Probed."""

    ms: dict[str, float]
    issue_ms: float
    held: Held
    within_bytes: int


@dataclasses.dataclass(frozen=True)
class StagesAlone:
    """The stages of a pipeline that has run a step, with its batch.

    parts     of each stage
    how       what the times depend on, beside a stage's parts and how its backward is run
    recorded  its stages are replayed from CUDA graphs
    idle      the share of the step in which the rank waits for others
    """

    pipeline: Pipeline
    batch: tuple[Batch, Batch]
    parts: list[range]
    how: Hashable
    recorded: bool
    idle: float

    @property
    def device(self) -> torch.device:
        return self.pipeline.device

    def probed(self) -> Probed:
        """All ranks must call it."""
        pipeline = self.pipeline
        base = self._allocated()
        base += devices.kept_by_graphs(self.device) if self.recorded else 0
        if base:  # where memory is counted
            base += travelling_bytes(pipeline, dist.get_rank())
        stages = {number: self._stage(number) for number in pipeline.modules}
        actions: dict[tuple[int, str], float] = {}
        held = {}
        for number, alone in stages.items():
            actions |= {(number, kind): ms for kind, ms in alone.ms.items()}
            held[number] = alone.held if self.recorded else in_step(alone.held, pipeline, number)
        issue_ms = statistics.fmean(alone.issue_ms for alone in stages.values())
        return Probed(
            actions=actions,
            host_ms=0.0 if self.device.type == "cpu" else issue_ms,  # there the host is the device
            held=held,
            parts=self.parts,
            base_bytes=base,
            within_bytes=max(alone.within_bytes for alone in stages.values()),
            transfer_ms=self._transfer_ms(),
        )

    def _stage(self, number: int) -> "_Alone":
        splits, room = self.pipeline.schedule.splits(number), self._room(number)
        run = (self.how, self.parts[number], splits, room, self.idle)
        if run not in KNOWN:
            KNOWN[run] = self._timed(number)
        return KNOWN[run]

    def _timed(self, number: int) -> "_Alone":
        """Of a few rounds after a first one: the medians of the device, and the mean of the host,
        whose slow moments add up in a step too.
        """
        first = self._round(number, lead_s=0.0)
        lead_s = 2 * PROBED * first.issue_ms / 1e3  # some kinds take the host longer than others
        rounds: list[_Alone] = []
        tell(f"times stage {number} alone")
        end = time.perf_counter() + (PROBED_S if self.device.type == "cuda" else 0.0)
        while len(rounds) < REPEATS or (time.perf_counter() < end and len(rounds) < MOST_REPEATS):
            rounds.append(self._round(number, lead_s))
        last = rounds[-1]
        return dataclasses.replace(
            last,
            ms={kind: statistics.median(one.ms[kind] for one in rounds) for kind in last.ms},
            issue_ms=statistics.fmean(one.issue_ms for one in rounds),
        )

    def _round(self, number: int, lead_s: float) -> "_Alone":
        """Each kind of action for micro-batches one after another, without waiting for the device
        in between. The device is timed behind work of `lead_s`, for which the host is ahead of it.
        """
        calls = stage_calls(self.pipeline, number, *self.batch)
        probed = min(PROBED, self._room(number) or PROBED)
        timed = min(ISSUED, probed)
        ms, issued = {}, 0.0
        levels, within = [self._allocated()], 0.0
        for kind, call in calls.items():
            devices.synchronize(self.device)
            self._lead(lead_s)
            if self.device.type == "cuda":  # but the allocator keeps its blocks
                torch.cuda.reset_peak_memory_stats(self.device)
            begin, start = self._mark(), time.perf_counter()
            for micro_batch in range(probed):
                call(micro_batch)
                if micro_batch + 1 == timed:
                    issued += (time.perf_counter() - start) / timed
            end = self._mark()
            devices.synchronize(self.device)
            took_ms = end - begin if isinstance(begin, float) else begin.elapsed_time(end)
            ms[kind] = took_ms / probed
            peak = devices.peak_memory(self.device).get("peak_bytes", 0)
            levels.append(self._allocated())
            within = max(within, peak - max(levels[-2:]))
            self._rest(took_ms / 1e3)
        held = [max(0.0, level - levels[0]) / probed for level in levels[1:]]
        return _Alone(
            ms=ms,
            issue_ms=issued * 1e3 / len(calls),
            held=Held(held[0], held[1] if len(held) > 2 else 0.0),
            within_bytes=round(within),
        )

    def _room(self, number: int) -> int | None:
        """For how many micro-batches between forward and backward; None: any."""
        return self.pipeline.stages[number].num_slots

    def _mark(self) -> Any:
        """Now, in ms on the host or as an event on the device."""
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _lead(self, seconds: float) -> None:
        """Copies that take a GPU so long, more or less, and leave room in its queue of launches;
        nothing on a CPU. What runs behind them on their stream may have their memory.
        """
        copies = min(MOST_COPIES, round(seconds / COPY_S)) if self.device.type == "cuda" else 0
        if copies:
            source, target = (
                torch.empty(COPIED, dtype=torch.uint8, device=self.device) for _ in range(2)
            )
            for _ in range(copies):
                target.copy_(source)

    def _rest(self, busy_s: float) -> None:
        """As long as a rank waits for others after so much work: a GPU at its power limit then goes
        on faster, by up to a tenth.
        """
        if self.device.type == "cuda":
            time.sleep(busy_s * self.idle / (1 - self.idle))

    def _allocated(self) -> int:
        return devices.allocated_memory(self.device) or 0

    def _transfer_ms(self) -> float:
        """Of the largest tensor between two stages, between ranks 0 and 1; nothing on one rank."""
        rank = dist.get_rank()
        if dist.get_world_size() == 1:
            return 0.0
        tensor = max(
            (meta.empty(self.device) for metas in between(self.pipeline) for meta in metas),
            key=lambda t: t.nbytes,
        )
        times = []
        for _ in range(REPEATS + 2 if rank < 2 else 0):
            devices.synchronize(self.device)
            start = time.perf_counter()
            for place in (0, 1):
                if rank == place:
                    dist.send(tensor, 1 - rank)
                else:
                    dist.recv(tensor, 1 - rank)
            devices.synchronize(self.device)
            times.append((time.perf_counter() - start) * 1e3 / 2)
        return statistics.median(times[2:]) if times else 0.0


def durations(ranks: list[Probed], num_stages: int) -> Durations:
    """What the simulator takes, from what the ranks have measured."""
    actions: dict[tuple[int, str], float] = {}
    for rank in ranks:
        actions |= rank.actions
    return Durations(
        actions=actions,
        transfers=transfers_of(num_stages, max(rank.transfer_ms for rank in ranks)),
        host_ms=max(rank.host_ms for rank in ranks),
    )
