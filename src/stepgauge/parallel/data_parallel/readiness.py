"""Tracks which gradients have arrived in the running backward, and so which buckets are complete."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


@dataclasses.dataclass(eq=False, slots=True)
class TrackedParameter:
    """A parameter of a data-parallel wrapper, and the state of its gradient.

    hook           the wrapper's hook, which autograd calls when it has added to `.grad`
    launch         the launch (a group of buckets sent together) that has this gradient; None if the
                   plan leaves the parameter out
    is_unreduced   backward has added to `.grad` since it was last averaged
    is_ready       its launch has counted the gradient of the running backward
    """

    number: int
    name: str
    parameter: nn.Parameter
    hook: Any = None
    launch: int | None = None
    is_unreduced: bool = False
    is_ready: bool = False


class Readiness:
    """Counts the gradients of one backward as they arrive, and which launches are complete.

    Launches are sent in the order of the plan, whatever the order in which gradients arrive. A
    launch that is complete early waits for those before it, so that all ranks send the same messages
    in the same order.
    """

    def __init__(self, launches: Sequence[Sequence[TrackedParameter]]):
        self._next = 0
        self._num_missing = [len(launch) for launch in launches]
        self._deferred: TrackedParameter | None = None

    def arrive(self, tracked: TrackedParameter, *, defers: bool = False) -> None:
        """Records a gradient that backward has added to `.grad`.

        defers  counts the gradient only when the next one arrives, because hooks that run after the
                wrapper's may still write `.grad`

        Raises RuntimeError if the parameter's gradient was already sent in this backward, and if a
        hook has set an earlier gradient to None before it was averaged.
        """
        if tracked.launch is not None and tracked.launch < self._next:
            raise RuntimeError(
                f"backward added to a gradient of shape {tuple(tracked.parameter.shape)} after it "
                f"had been sent: checkpoint with use_reentrant=False, or train under no_sync()"
            )
        self._count_deferred()
        if defers:
            self._deferred = tracked
        else:
            self._count(tracked)

    @property
    def is_next_complete(self) -> bool:
        return self._next < len(self._num_missing) and not self._num_missing[self._next]

    def complete_launches(self) -> Iterator[int]:
        """Yields the next launches of the plan as far as all their gradients have arrived."""
        while self.is_next_complete:
            self._next += 1
            yield self._next - 1

    def remaining_launches(self) -> Iterator[int]:
        """Yields all launches not yet sent, at the end of backward. Raises RuntimeError as `arrive`
        does.
        """
        self._count_deferred()
        while self._next < len(self._num_missing):
            self._next += 1
            yield self._next - 1

    def _count_deferred(self) -> None:
        if self._deferred is not None:
            self._count(self._deferred)
            self._deferred = None

    def _count(self, tracked: TrackedParameter) -> None:
        if tracked.parameter.grad is None:
            raise RuntimeError(
                f"a hook set the gradient of shape {tuple(tracked.parameter.shape)} to None before "
                f"it was averaged over ranks: let optimizers step after backward"
            )
        # A parameter that was frozen when backward began is in no launch.
        if tracked.launch is not None and not tracked.is_ready:
            tracked.is_ready = True
            self._num_missing[tracked.launch] -= 1
