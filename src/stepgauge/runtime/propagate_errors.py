"""Raises the error of one rank on all ranks, so that they can continue together.

If a rank fails, its peers wait in a collective that it will never join. So the rank writes its error
to the rendezvous store, which works even while collectives hang. A thread on each rank polls the
store and aborts the process group.
"""

import itertools
import json
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from stepgauge.runtime.launch import RankError
from stepgauge.runtime.world import TIMEOUT_S, GroupError, World, abort_groups, shared_store

POLL_S = 0.25
_FAILURE = "failure"
_blocks = itertools.count()
Value = TypeVar("Value")


def propagate_errors(world: World, action: Callable[[], Value]) -> Value:
    """Runs the action and returns its value; every rank must call this.

    If the action fails on a rank, all ranks raise the RankError of the first failure, and the
    process group is gone. Raises GroupError if a rank does not finish within twice the timeout of
    collectives.
    """
    name = f"propagate{next(_blocks)}"
    store = shared_store(name)
    with _Watch(shared_store(name)):
        try:
            value = action()
        except Exception as error:
            store.compare_set(_FAILURE, "", _encoded(error, world))  # keeps the first error
            abort_groups()
        store.set(f"ended{world.rank}", "")
        _wait_for_all(store, world, timedelta(seconds=2 * TIMEOUT_S))
    if store.check([_FAILURE]):
        abort_groups()
        raise RankError(**json.loads(store.get(_FAILURE)))
    return value


class _Watch:
    """Aborts this rank's process groups if a peer fails while the block runs."""

    def __init__(self, store: dist.Store):
        self._store, self._done = store, threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _poll(self) -> None:
        while not self._done.wait(POLL_S):
            if self._store.check([_FAILURE]):
                abort_groups()
                return


def _wait_for_all(store: dist.Store, world: World, limit: timedelta) -> None:
    try:
        store.wait([f"ended{rank}" for rank in range(world.size)], limit)
    except dist.DistError as error:
        raise GroupError(
            f"rank {world.rank} of {world.size} has lost the others: {_first_line(error)}"
        ) from error


def _encoded(error: Exception, world: World) -> str:
    reason = _first_line(error) or "no message"
    type_ = type(error).__name__
    return json.dumps(
        {
            "message": f"rank {world.rank} of {world.size}: {type_}: {reason}",
            "rank": world.rank,
            "type": type_,
            "reason": reason,
            "trace": "".join(traceback.format_exception(error)),
        }
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
