"""Ends a process whose GPU waits too long for copies of another rank.

A stream that waits for a flag waits for ever if a rank has left or has called other modules. NCCL has
a watchdog for that. This one reads a number that streams write into the host's memory: asking CUDA
from another thread would invalidate a CUDA graph that is being captured.
"""

import os
import sys
import threading
import time
import weakref

import torch
import torch.distributed as dist

from stepgauge.parallel.communication.peer_memory import VALUES, PeerMemory

POLL_S = 1.0


class StallWatch:
    """Counts the copies that a stream has been given and those that it has done.

    limit_s  ends the process if copies take longer
    """

    def __init__(self, memory: PeerMemory, device: torch.device, limit_s: float):
        self._memory = memory
        self._numbers = torch.arange(VALUES, dtype=torch.int32, device=device)
        self._done = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._given = 0
        threading.Thread(target=_watch, args=(weakref.ref(self), limit_s), daemon=True).start()

    def mark(self, stream: int) -> None:
        """To be called when the stream has been given copies."""
        self._given = (self._given + 1) % VALUES
        source = self._numbers.data_ptr() + 4 * self._given
        self._memory.copy(self._done.data_ptr(), source, 4, stream)

    def counts(self) -> tuple[int, int]:
        """Returns how many are done and how many were given, modulo VALUES."""
        return int(self._done), self._given


def _watch(reference: "weakref.ref[StallWatch]", limit_s: float) -> None:
    last, since = -1, time.monotonic()
    while (watch := reference()) is not None:
        done, given = watch.counts()
        if done == given or done != last:
            last, since = done, time.monotonic()
        if time.monotonic() - since > limit_s:
            print(
                f"rank {dist.get_rank()} has waited {limit_s:g} s for copies of another rank: do all ranks "
                f"call the same modules in the same order, and backward equally often?",
                file=sys.stderr,
                flush=True,
            )
            os.abort()  # as NCCL's watchdog does; an exception would not reach the main thread
        del watch
        time.sleep(POLL_S)
