"""Limits how many computations of a pipeline the host launches ahead of the GPU.

A sent tensor is kept until the GPU has sent it. A host that runs far ahead therefore holds many of
them: up to 16 messages were measured in a step, which no count of live activations predicts.

The limit cannot make ranks wait for each other for ever. A rank's host waits for a computation that
comes earlier in its row than anything it has not launched yet, and a schedule whose computations wait
for each other in a circle is refused before it runs.
"""

from typing import Any

import torch

COMPUTATIONS = 3  # enough that the GPU has work while the host launches the next


class HostLead:
    """Waits for earlier computations. Has no effect on a CPU, where the host computes."""

    def __init__(self, device: torch.device):
        self._device, self._launched = device, 0
        self._ends: list[Any] = []
        if device.type == "cuda":
            self._ends = [torch.cuda.Event() for _ in range(COMPUTATIONS)]

    def keep(self) -> None:
        """Called after each computation is launched: waits for the one `COMPUTATIONS` before it."""
        if not self._ends:
            return
        end = self._ends[self._launched % COMPUTATIONS]
        end.synchronize()
        end.record(torch.cuda.current_stream(self._device))
        self._launched += 1
