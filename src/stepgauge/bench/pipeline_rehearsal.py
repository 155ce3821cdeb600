"""Times a rank's actions in the order of its schedule, without tensors of other ranks.

Noise stands for these tensors, and the rank pauses where it would wait for them. So its actions take
about as long as in a step: a GPU at its power limit is up to a tenth slower if it never pauses.
"""

import collections
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.bench.busy import keep_busy
from stepgauge.cost.pipeline.timeline import Span
from stepgauge.measure import devices
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.interfaces import Meta
from stepgauge.spec.plan.pipeline import Action, Channel
from stepgauge.spec.plan.pipeline.action import FORWARD, RECV_B, RECV_F, WEIGHT

STEPS = 4  # of a rehearsal; the first one, in which a GPU warms up, is not counted
LEAST_PAUSE_S = 1e-3  # shorter waits are added to the next one
LEAD_S = 4e-4  # of a pause, in which the host launches the first kernels of the next action


class NoisyTransfers:
    """Has the methods of a pipeline's transfers, but sends nothing and receives noise.

    pauses  seconds to pause before the tensors of a receive are taken
    """

    can_restart = True

    def __init__(self, pauses: Mapping[Action, float], device: torch.device):
        self._pauses, self._device = pauses, device
        self._noise: dict[Channel, list[Tensor]] = {}

    def prepare(self, messages: Mapping[Channel, Sequence[Meta]]) -> None:
        """Does nothing: tensors are made when they are received."""

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Does nothing: no other rank takes part."""

    def receive(self, action: Action, metas: Sequence[Meta]) -> None:
        if action.channel not in self._noise:
            self._noise[action.channel] = [meta.noise(self._device) for meta in metas]

    def take(self, action: Action) -> list[Tensor]:
        """Pauses if the rank would wait here. Returns the same tensors for all micro-batches."""
        if action in self._pauses:
            devices.synchronize(self._device)
            time.sleep(self._pauses[action] - LEAD_S)
            keep_busy(self._device, LEAD_S)
        return self._noise[action.channel]

    def finish(self) -> None:
        """Does nothing: nothing was sent."""


def pauses_of(spans: Sequence[Span]) -> dict[Action, float]:
    """Returns how many seconds a rank with these computations pauses before each of its receives. A rank
    waits for nothing else.
    """
    pauses: dict[Action, float] = {}
    waited_s, now_ms = 0.0, 0.0
    for (stage, kind, micro_batch), start_ms, end_ms in spans:
        waited_s += (start_ms - now_ms) / 1e3
        now_ms = end_ms
        if kind != WEIGHT and waited_s >= LEAST_PAUSE_S:
            receive = Action(stage, RECV_F if kind == FORWARD else RECV_B, micro_batch)
            pauses[receive], waited_s = waited_s, 0.0
    return pauses


def rehearse(
    pipeline: Pipeline, step: Callable[[], Any], spans: Sequence[Span]
) -> dict[tuple[int, str], float]:
    """Runs steps of this rank with noise. Returns the mean ms of its actions by (stage, kind).

    All ranks must call it at the same time: they share a CPU or a host, and sum tied weights' gradients.

    pipeline  has run a step, and records its actions
    step      runs a step of it
    spans     the rank's computations in a simulated step, which show where it waits
    """
    taken_ms = collections.defaultdict(list)
    with pipeline.exchanging_by(NoisyTransfers(pauses_of(spans), pipeline.device)):
        for number in range(STEPS):
            dist.barrier()
            step()
            for (stage, kind, _), start_ms, end_ms in pipeline.spans if number else ():
                taken_ms[stage, kind].append(end_ms - start_ms)
    return {action: statistics.fmean(times) for action, times in taken_ms.items()}
