"""Times the stages of a rank one by one and measures their memory. From these figures, and from times
in the order of the schedule (pipeline_rehearsal.py), a row's step
and its peaks are simulated before it runs.
"""

import dataclasses
import statistics
import time
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist

from stepgauge.bench.busy import keep_busy
from stepgauge.bench.pipeline_bytes import boundaries, held_in_step, message_bytes
from stepgauge.bench.stage_calls import stage_calls
from stepgauge.cost.pipeline.timeline import Durations, equal_launches, transfers_of
from stepgauge.measure import devices
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.step import Batch
from stepgauge.runtime.progress import report_progress
from stepgauge.spec.plan.pipeline.check import Held

MICRO_BATCHES = 4  # micro-batches per timing of a stage
# Of these, the host's launch time is measured for the first ones only: later ones may wait for room
# in the launch queue.
TIMED_LAUNCHES = 2
REPEATS, MOST_REPEATS = 4, 20
PROBE_S = 0.5  # in 0.1 s the host's time for a computation was off by 20 %, either way
# Figures of stages by everything that they depend on: schedules of a sweep share stages.
CACHE: dict[Hashable, "_StageProbe"] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankProbe:
    """The figures of one rank's stages, without other ranks. Without a GPU all bytes are 0.

    actions      ms by (stage, action kind)
    transfer_ms  ms of a transfer between two ranks
    host_ms      ms in which the host launches an action; 0 on a CPU
    held         bytes that a micro-batch of each stage holds
    parts        the network parts of each stage
    base_bytes   bytes that the rank always holds: weights, gradients, messages
    """

    actions: dict[tuple[int, str], float]
    transfer_ms: float
    host_ms: float
    held: dict[int, Held]
    parts: list[range]
    base_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StageProbe:
    """The figures of one stage: ms of a micro-batch by action kind, ms of the host to launch one, and
    bytes as in RankProbe.
    """

    ms: dict[str, float]
    launch_ms: float
    held: Held


@dataclasses.dataclass(frozen=True)
class StageProber:
    """Probes the stages of a pipeline that has run a step with the batch.

    parts        the network parts of each stage
    key          values that the times depend on, except for the stage's own
    uses_graphs  True if the stages are replayed from CUDA graphs
    """

    pipeline: Pipeline
    batch: tuple[Batch, Batch]
    parts: list[range]
    key: Hashable
    uses_graphs: bool

    @property
    def device(self) -> torch.device:
        return self.pipeline.device

    def run(self) -> RankProbe:
        """Probes all stages of this rank. All ranks must call it."""
        pipeline = self.pipeline
        base = self._allocated()
        base += devices.kept_by_graphs(self.device) if self.uses_graphs else 0
        if base:  # memory is counted on this device
            base += message_bytes(pipeline, dist.get_rank())
        stages = {number: self._probe_stage(number) for number in pipeline.modules}
        actions: dict[tuple[int, str], float] = {}
        held = {}
        for number, stage in stages.items():
            actions |= {(number, kind): ms for kind, ms in stage.ms.items()}
            held[number] = (
                stage.held if self.uses_graphs else held_in_step(stage.held, pipeline, number)
            )
        launch_ms = statistics.fmean(stage.launch_ms for stage in stages.values())
        return RankProbe(
            actions=actions,
            host_ms=0.0 if self.device.type == "cpu" else launch_ms,  # there the host is the device
            held=held,
            parts=self.parts,
            base_bytes=base,
            transfer_ms=self._transfer_ms(),
        )

    def _probe_stage(self, number: int) -> "_StageProbe":
        splits, slots = self.pipeline.schedule.splits(number), self._num_slots(number)
        key = (self.key, self.parts[number], splits, slots)
        if key not in CACHE:
            CACHE[key] = self._repeated_rounds(number)
        return CACHE[key]

    def _repeated_rounds(self, number: int) -> "_StageProbe":
        """Returns the medians of the device's times over the second half of some rounds, when a GPU is
        as warm as in a step, and the mean of the host's launch times, whose slow moments add up in a
        step too.
        """
        first = self._round(number, lead_s=0.0)
        lead_s = _lead_s(first)
        rounds: list[_StageProbe] = []
        report_progress(f"times stage {number} alone")
        end = time.perf_counter() + (PROBE_S if self.device.type == "cuda" else 0.0)
        while len(rounds) < REPEATS or (time.perf_counter() < end and len(rounds) < MOST_REPEATS):
            rounds.append(self._round(number, lead_s))
        last, later = rounds[-1], rounds[len(rounds) // 2 :]
        return dataclasses.replace(
            last,
            ms={kind: statistics.median(one.ms[kind] for one in later) for kind in last.ms},
            launch_ms=statistics.fmean(one.launch_ms for one in rounds),
        )

    def _round(self, number: int, lead_s: float) -> "_StageProbe":
        """Runs each kind of action for several micro-batches, without waiting for the device in
        between. Before each kind the device gets products for `lead_s` seconds, so that the host
        stays ahead and the device is never idle while it is timed.
        """
        calls = stage_calls(self.pipeline, number, *self.batch)
        num_calls = min(MICRO_BATCHES, self._num_slots(number) or MICRO_BATCHES)
        timed_launches = min(TIMED_LAUNCHES, num_calls)
        ms, temporary, launch_s = {}, {}, 0.0
        levels = [self._allocated()]
        for kind, call in calls.items():
            devices.synchronize(self.device)
            keep_busy(self.device, lead_s)
            if self.device.type == "cuda":  # resets the peak, but keeps the allocator's blocks
                torch.cuda.reset_peak_memory_stats(self.device)
            begin, start = self._timestamp(), time.perf_counter()
            for micro_batch in range(num_calls):
                call(micro_batch)
                if micro_batch + 1 == timed_launches:
                    launch_s += (time.perf_counter() - start) / timed_launches
            end = self._timestamp()
            devices.synchronize(self.device)
            took_ms = end - begin if isinstance(begin, float) else begin.elapsed_time(end)
            ms[kind] = took_ms / num_calls
            peak = devices.peak_memory(self.device).get("peak_bytes", 0)
            levels.append(self._allocated())
            temporary[kind] = max(0.0, peak - max(levels[-2:]))
        held = [max(0.0, level - levels[0]) / num_calls for level in levels[1:]]
        return _StageProbe(
            ms=ms,
            launch_ms=launch_s * 1e3 / len(calls),
            held=Held(held[0], held[1] if len(held) > 2 else 0.0, temporary),
        )

    def _num_slots(self, number: int) -> int | None:
        """Returns how many micro-batches the stage can hold between forward and backward; None: any."""
        return self.pipeline.stages[number].num_slots

    def _timestamp(self) -> Any:
        """Returns the current time: ms on the host, or an event on the device."""
        if self.device.type != "cuda":
            return time.perf_counter() * 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _allocated(self) -> int:
        return devices.allocated_memory(self.device) or 0

    def _transfer_ms(self) -> float:
        """Times sending the largest tensor between two stages from rank 0 to 1 and back. Returns 0 on
        a single rank and on the other ranks.
        """
        rank = dist.get_rank()
        if dist.get_world_size() == 1:
            return 0.0
        tensor = max(
            (meta.empty(self.device) for metas in boundaries(self.pipeline) for meta in metas),
            key=lambda t: t.nbytes,
        )
        times = []
        for _ in range(REPEATS + 2 if rank < 2 else 0):
            devices.synchronize(self.device)
            start = time.perf_counter()
            for sender in (0, 1):
                if rank == sender:
                    dist.send(tensor, 1 - rank)
                else:
                    dist.recv(tensor, 1 - rank)
            devices.synchronize(self.device)
            times.append((time.perf_counter() - start) * 1e3 / 2)
        return statistics.median(times[2:]) if times else 0.0


def _lead_s(stage: _StageProbe) -> float:
    """Returns for how long the device must be busy before the calls of one kind, so that the host stays
    ahead of it: until the first call is launched, and for each later call as much as launching it takes
    longer than running it.
    """
    launch_ms = 2 * stage.launch_ms  # the host takes longer for some kinds than for others
    behind_ms = max(0.0, launch_ms - min(stage.ms.values()))
    return (launch_ms + (MICRO_BATCHES - 1) * behind_ms) / 1e3


def durations(ranks: list[RankProbe], num_stages: int) -> Durations:
    """Returns the simulator's durations from the figures of all ranks."""
    actions: dict[tuple[int, str], float] = {}
    for rank in ranks:
        actions |= rank.actions
    return Durations(
        actions=actions,
        transfers=transfers_of(num_stages, max(rank.transfer_ms for rank in ranks)),
        launches=equal_launches(num_stages, max(rank.host_ms for rank in ranks)),
    )
