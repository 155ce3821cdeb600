"""Times a rank's actions in the order of its schedule, without other ranks.

Noise stands for the tensors of other ranks, and the rank pauses where it would wait for them. So its
actions take as long as in a step: a GPU at its power limit is up to a tenth slower if it never pauses.
"""

import collections
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stepgauge.cost.pipeline.timeline import Span
from stepgauge.measure import devices
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.interfaces import Meta
from stepgauge.spec.plan.pipeline import Action, Channel
from stepgauge.spec.plan.pipeline.action import FORWARD, RECV_B, RECV_F, WEIGHT

STEPS = 4  # of a rehearsal; the first one, in which a GPU warms up, is not counted
# After a pause a GPU gets products of this width, for as long as the host needs to launch the first
# kernel of the next action. Each takes about this long.
PRODUCT_WIDTH, PRODUCT_S, PRODUCTS = 4096, 2e-4, 2
LEAST_PAUSE_S = 1e-3  # shorter pauses are added to the next one


class NoisyTransfers:
    """Has the methods of a pipeline's transfers, but sends nothing and receives noise.

    pauses  seconds to pause before the tensors of a receive are taken
    """

    can_restart = True

    def __init__(self, pauses: Mapping[Action, float], device: torch.device):
        self._pauses, self._device = pauses, device
        self._noise: dict[Channel, list[Tensor]] = {}
        self._factors: Sequence[Tensor] = ()
        if device.type == "cuda":
            shape = (2, PRODUCT_WIDTH, PRODUCT_WIDTH)
            self._factors = torch.randn(shape, dtype=torch.bfloat16, device=device).unbind()

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
            time.sleep(self._pauses[action])
            for _ in range(PRODUCTS if self._factors else 0):
                torch.mm(*self._factors)
        return self._noise[action.channel]

    def finish(self) -> None:
        """Does nothing: nothing was sent."""


def pauses_of(spans: Sequence[Span]) -> dict[Action, float]:
    """Returns how many seconds a rank with these computations pauses before each of its receives."""
    pauses: dict[Action, float] = {}
    waited_s, now_ms = 0.0, 0.0
    for (stage, kind, micro_batch), start_ms, end_ms in spans:
        waited_s += (start_ms - now_ms) / 1e3
        now_ms = end_ms
        if kind != WEIGHT and waited_s >= LEAST_PAUSE_S:
            receive = Action(stage, RECV_F if kind == FORWARD else RECV_B, micro_batch)
            pauses[receive] = waited_s - PRODUCTS * PRODUCT_S
            waited_s = 0.0
    return pauses


def rehearse(
    pipeline: Pipeline, step: Callable[[], Any], spans: Sequence[Span]
) -> dict[tuple[int, str], float]:
    """Runs steps of this rank without other ranks. Returns the mean ms of its actions by (stage, kind).

    All ranks must call it at the same time, because they may share a CPU or a power supply.

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
