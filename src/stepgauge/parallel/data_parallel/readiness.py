"""Which bucket is complete: gradients of one backward, from the first to the last."""

from collections.abc import Iterator, Sequence

from torch import nn

from stepgauge.parallel.autograd.parameter_hooks import hooks_after


class Readiness:
    """Gradients of one backward as they arrive, and how many each launch of buckets still misses.

    Launches go out in the plan's order, whatever the order of arrival: one that is complete early
    waits for those before it, so that all ranks send the same messages in the same order.
    """

    def __init__(self, launches: Sequence[Sequence[nn.Parameter]]):
        self.arrived: set[nn.Parameter] = set()
        self._next = 0
        self._launch_of = {p: number for number, launch in enumerate(launches) for p in launch}
        self._missing = [len(launch) for launch in launches]
        self._latest: nn.Parameter | None = None  # until it counts

    def arrive(self, parameter: nn.Parameter) -> None:
        """Raises RuntimeError for a second gradient after the first was sent, and where a hook of
        others took the gradient before it was averaged.
        """
        if self._launch_of.get(parameter, self._next) < self._next:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was added to after it was sent, in "
                f"one backward: checkpoint with use_reentrant=False, or train under no_sync()"
            )
        self._count_latest()
        self._latest = parameter
        # Hooks of others run after ours, and may write `.grad`: it counts when the next is there.
        if len(hooks_after(parameter)) <= 1:
            self._count_latest()

    def next_launches(self, *, rest: bool = False) -> Iterator[int]:
        """The next launches whose gradients are all there; or the rest, at the end of backward,
        which raises RuntimeError as `arrive` does.
        """
        if rest:
            self._count_latest()
        while self._next < len(self._missing) and (rest or not self._missing[self._next]):
            self._next += 1
            yield self._next - 1

    def _count_latest(self) -> None:
        parameter, self._latest = self._latest, None
        if parameter is None:
            return
        if parameter.grad is None:
            raise RuntimeError(
                f"a hook set the gradient of shape {tuple(parameter.shape)} to None before it was "
                f"averaged over ranks: let optimizers step after backward"
            )
        # one that was not trained when backward began is of no launch
        if parameter in self._launch_of and parameter not in self.arrived:
            self.arrived.add(parameter)
            self._missing[self._launch_of[parameter]] -= 1
