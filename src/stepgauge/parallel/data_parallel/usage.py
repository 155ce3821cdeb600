"""Which parameters any rank used in a backward."""

from collections.abc import Container, Iterable

import torch
from torch import nn

from stepgauge.parallel.communication.reducer import GradientReducer


class Usage:
    """Tells parameters that some rank has a gradient of from those that none has.

    All ranks ask together, once a backward. A rank that used everything need not know what the
    others used: its host does not wait, as that of torch's DistributedDataParallel does not.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], reducer: GradientReducer):
        self._places = {parameter: place for place, parameter in enumerate(parameters)}
        self._reducer = reducer
        self._ones: torch.Tensor | None = None

    def unused_anywhere(
        self, asked: Iterable[nn.Parameter], used: Container[nn.Parameter], *, asks: bool = True
    ) -> set[nn.Parameter]:
        """Those of the asked parameters that no rank used; `used` are this rank's."""
        unused = [parameter for parameter in asked if parameter not in used]
        flags = self._flags(used if unused else self._places)
        if asks and flags.numel():
            self._reducer.launch_any(flags).wait()
        if not unused:
            return set()
        anywhere = flags.tolist()
        return {parameter for parameter in unused if not anywhere[self._places[parameter]]}

    def _flags(self, used: Container[nn.Parameter]) -> torch.Tensor:
        """Ones where all are used, which can be sent again and again: the greatest of ones and
        anything is one.
        """
        device = next(iter(self._places)).device if self._places else torch.device("cpu")
        if used is not self._places:
            flags = torch.tensor([p in used for p in self._places], dtype=torch.uint8)
            return flags.to(device)
        if self._ones is None or self._ones.device != device:
            self._ones = torch.ones(len(self._places), dtype=torch.uint8, device=device)
        return self._ones
