"""Which bucket is complete: the course of one backward, from its first gradient to its end.

A backward that raises ends as well: autograd drops the callback of its end without calling it, and
what was not sent then is sent all the same. So no rank waits for another that failed, and gradients
mean what they mean in one process: sums of what was computed, here averaged.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable


class Readiness:
    """Gradients of one backward as they arrive, and how many each launch of buckets still misses.

    Launches go out in the plan's order, whatever the order of arrival: one that is complete early
    waits for those before it, so that all ranks send the same messages in the same order.
    """

    def __init__(self, launches: Sequence[Sequence[nn.Parameter]]):
        self.arrived: set[nn.Parameter] = set()
        self._launched = 0
        self._launch_of = {p: number for number, launch in enumerate(launches) for p in launch}
        self._missing = [len(launch) for launch in launches]
        self._held: nn.Parameter | None = None

    def arrive(self, parameter: nn.Parameter) -> None:
        """Raises RuntimeError for a second gradient after the first was sent, and where a hook of
        others took the gradient before it was averaged.
        """
        if self._launch_of.get(parameter, self._launched) < self._launched:
            raise RuntimeError(
                f"a gradient of shape {tuple(parameter.shape)} was added to after it was sent, in "
                f"one backward: checkpoint with use_reentrant=False, or train under no_sync()"
            )
        self._require_held()
        self._count(self._held)
        # Hooks of others run after ours, and may write `.grad`: it counts when the next is there.
        has_others = len(parameter._post_accumulate_grad_hooks or ()) > 1
        self._held = parameter if has_others else None
        self._count(None if has_others else parameter)

    def _require_held(self) -> None:
        if self._held is not None and self._held.grad is None:
            raise RuntimeError(
                f"a hook set the gradient of shape {tuple(self._held.shape)} to None before it was "
                f"averaged over ranks: let optimizers step after backward"
            )

    def _count(self, parameter: nn.Parameter | None) -> None:
        # one that was not trained when backward began is of no launch
        if parameter in self._launch_of and parameter not in self.arrived:
            self.arrived.add(parameter)
            self._missing[self._launch_of[parameter]] -= 1

    def next_launches(self, *, complete: bool = True) -> Iterator[int]:
        """The next launches whose gradients are all there; without `complete`, at the end of backward,
        all that are left. Raises RuntimeError as `arrive` does, for the last gradient.
        """
        if not complete:
            self._require_held()
        while self._launched < len(self._missing) and not (
            complete and self._missing[self._launched]
        ):
            self._launched += 1
            yield self._launched - 1


def at_end_of_backward(call: Callable[[bool], None], device: torch.device) -> None:
    """Calls when the present backward ends, with whether it raised. To be called from a hook of it.

    torch's DistributedDataParallel and fully_shard use the same entry, which has no public name.
    """
    Variable._execution_engine.queue_callback(_End(call, device))


def goes_on_to(node: Any) -> bool:
    """Whether the present backward calls a weight's node: not all where it was given `inputs`.
    Raises RuntimeError in autograd.grad, which keeps what would be added to the weight.
    """
    # The way out: a public name of it, which register_multi_grad_hook needs too.
    return torch._C._will_engine_execute_node(node)


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
