"""Finds the parameters that no rank used in a backward."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from stepgauge.parallel.communication.reducer import GradientReducer


class Usage:
    """Compares over the ranks which parameters got a gradient. Parameters are given by number.

    All ranks compare once per backward. A rank that used every parameter does not need the result,
    so its host does not wait for it; torch's DistributedDataParallel does the same.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reducer: GradientReducer):
        self._parameters, self._reducer = list(parameters), reducer
        self._all_used = torch.ones(len(self._parameters), dtype=torch.uint8)

    def unused_on_all_ranks(
        self, unused: Collection[int], *, communicates: bool = True
    ) -> set[int]:
        """Returns those of the parameters unused on this rank that no other rank used either."""
        if not self._parameters:
            return set()
        device = self._parameters[0].device
        if self._all_used.device != device:
            self._all_used = self._all_used.to(device)
        # This tensor can be sent again and again: the maximum of ones and other flags is ones.
        used = self._all_used
        if unused:
            used = torch.ones(len(self._parameters), dtype=torch.uint8)
            used[[*unused]] = 0
            used = used.to(device)
        if communicates:
            self._reducer.launch_any(used).wait()
        if not unused:
            return set()
        used_anywhere = used.tolist()
        return {number for number in unused if not used_anywhere[number]}
