"""Which parameters any rank used in a backward."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from stepgauge.parallel.communication.reducer import GradientReducer


class Usage:
    """Tells parameters that some rank has a gradient of from those that none has, by their numbers.

    All ranks ask together, once a backward. A rank that used everything need not know what the
    others used: its host does not wait, as that of torch's DistributedDataParallel does not.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reducer: GradientReducer):
        self._parameters, self._reducer = list(parameters), reducer
        self._ones = torch.ones(len(self._parameters), dtype=torch.uint8)

    def unused_anywhere(self, unused: Collection[int], *, asks: bool = True) -> set[int]:
        """Those that no rank used of the ones that this rank did not use."""
        if not self._parameters:
            return set()
        device = self._parameters[0].device
        if self._ones.device != device:
            self._ones = self._ones.to(device)
        # They can be sent again and again: the greatest of ones and anything is one.
        flags = self._ones
        if unused:
            flags = torch.ones(len(self._parameters), dtype=torch.uint8)
            flags[[*unused]] = 0
            flags = flags.to(device)
        if asks:
            self._reducer.launch_any(flags).wait()
        if not unused:
            return set()
        anywhere = flags.tolist()
        return {number for number in unused if not anywhere[number]}
