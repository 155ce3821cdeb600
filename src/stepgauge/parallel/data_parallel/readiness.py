"""Which bucket is complete: gradients of one backward, from the first to the last."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn


@dataclasses.dataclass(eq=False, slots=True)
class Averaged:
    """A parameter of a wrapper that averages its gradients, and how far the present one is.

    hook        ours, which autograd calls when the gradient is there
    launch      of the plan's, the one that it is in; None: it is in none
    is_local    backward has added to its gradient since that was averaged
    is_counted  its launch knows the gradient of this backward
    """

    number: int
    name: str
    parameter: nn.Parameter
    hook: Any = None
    launch: int | None = None
    is_local: bool = False
    is_counted: bool = False


class Readiness:
    """Gradients of one backward as they arrive, and how many each launch of buckets still misses.

    Launches go out in the plan's order, whatever the order of arrival: one that is complete early
    waits for those before it, so that all ranks send the same messages in the same order.
    """

    def __init__(self, launches: Sequence[Sequence[Averaged]]):
        self._next = 0
        self._missing = [len(launch) for launch in launches]
        self._latest: Averaged | None = None  # until it counts

    def arrive(self, member: Averaged, *, counts: bool = True) -> None:
        """Raises RuntimeError for a second gradient after the first was sent, and where a hook of
        others took the gradient before it was averaged.

        counts  False: only when the next is there, since `.grad` may still be written
        """
        if member.launch is not None and member.launch < self._next:
            raise RuntimeError(
                f"a gradient of shape {tuple(member.parameter.shape)} was added to after it was "
                f"sent, in one backward: checkpoint with use_reentrant=False, or train under "
                f"no_sync()"
            )
        if self._latest is not None:
            self._count(self._latest)
            self._latest = None
        if counts:
            self._count(member)
        else:
            self._latest = member

    @property
    def is_next_complete(self) -> bool:
        return self._next < len(self._missing) and not self._missing[self._next]

    def next_launches(self, *, rest: bool = False) -> Iterator[int]:
        """The next launches whose gradients are all there; or the rest, at the end of backward,
        which raises RuntimeError as `arrive` does.
        """
        if rest and self._latest is not None:
            self._count(self._latest)
            self._latest = None
        while self.is_next_complete or (rest and self._next < len(self._missing)):
            self._next += 1
            yield self._next - 1

    def _count(self, member: Averaged) -> None:
        if member.parameter.grad is None:
            raise RuntimeError(
                f"a hook set the gradient of shape {tuple(member.parameter.shape)} to None before "
                f"it was averaged over ranks: let optimizers step after backward"
            )
        # one that was not trained when backward began is of no launch
        if member.launch is not None and not member.is_counted:
            member.is_counted = True
            self._missing[member.launch] -= 1
