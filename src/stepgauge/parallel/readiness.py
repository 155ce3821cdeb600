"""Which bucket is complete: the course of one backward, from its first gradient to its end.

A backward that raises ends as well: autograd drops the callback of its end without calling it, and
what was not sent then is sent all the same. So no rank waits for another that failed, and gradients
mean what they mean in one process: sums of what was computed, here averaged.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.autograd import Variable


class Backward:
    """Gradients of one backward as they arrive, and how many each launch of buckets still misses.

    Launches go out in the plan's order, whatever the order of arrival: one that is complete early
    waits for those before it, so that all ranks send the same messages in the same order.
    """

    def __init__(self, launches: Sequence[Sequence[nn.Parameter]]):
        self.launches = launches
        self.arrived: set[nn.Parameter] = set()
        self.launched = 0
        self._place = {p: place for place, launch in enumerate(launches) for p in launch}
        self._missing = [len(launch) for launch in launches]

    def arrive(self, parameter: nn.Parameter) -> None:
        """Raises RuntimeError for a second gradient after the first was sent."""
        place = self._place.get(parameter)
        if place is None:  # not trained when backward began
            return
        if parameter not in self.arrived:
            self.arrived.add(parameter)
            self._missing[place] -= 1
        elif place < self.launched:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was added to after it was sent, in "
                f"one backward: checkpoint with use_reentrant=False, or train under no_sync()"
            )

    def next_complete(self) -> int | None:
        """The next launch, if all its gradients are there."""
        place = self.launched
        if place == len(self.launches) or self._missing[place]:
            return None
        self.launched += 1
        return place

    def remaining(self) -> Iterable[int]:
        while self.launched < len(self.launches):
            self.launched += 1
            yield self.launched - 1


def at_end_of_backward(call: Callable[[bool], None], device: torch.device) -> None:
    """Calls when the present backward ends, with whether it raised. To be called from a hook of it.

    torch's DistributedDataParallel and fully_shard use the same entry, which has no public name.
    """
    Variable._execution_engine.queue_callback(_End(call, device))


class _End:
    def __init__(self, call: Callable[[bool], None], device: torch.device):
        self._call = weakref.WeakMethod(call)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._called = False

    def __call__(self, failed: bool = False) -> None:
        self._called = True
        if (call := self._call()) is not None:
            call(failed)

    def __del__(self) -> None:
        if self._called:
            return
        # What fails here has failed in backward already, or its ranks are gone.
        with torch.cuda.stream(self._stream), contextlib.suppress(Exception):
            self(failed=True)
