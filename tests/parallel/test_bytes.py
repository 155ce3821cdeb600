"""Counts the bytes that a step of each ZeRO stage keeps alive and sends, on two ranks."""

import time
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stepgauge.parallel.communication.reducer import GradientReducer
from stepgauge.parallel.sharding import Sharding
from stepgauge.parallel.wrappers import Settings, parallelise
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.runtime.launch import launch
from stepgauge.spec.layout import sent_bytes

WRAPPERS = ("bucketed", "zero1", "zero2", "zero3")
RANKS, BLOCKS, WIDTH = 2, 8, 64
UNIT = WIDTH * WIDTH * 4  # bytes of a block, which is one matrix
WHOLE = (BLOCKS + 1) * UNIT
SMALL = UNIT / 2  # activations of a batch of one row, and flags
SHARE = (BLOCKS + 2) // RANKS * UNIT  # of the rank that owns more
# Bounds of the bytes alive. They allow for weights and gradients, or this rank's shares of them. Stage 2
# adds the gradient being computed and one in flight to another rank. Stage 3 adds two gathered blocks,
# the gradients of one, those of two in flight, and the head, which is in no block, with its gradient.
BOUNDS = {
    "bucketed": 2 * WHOLE + SMALL,
    "zero1": 2 * WHOLE + SMALL,
    "zero2": WHOLE + SHARE + 2 * UNIT + SMALL,
    "zero3": 2 * WHOLE / RANKS + (2 + 1 + 2 + 2) * UNIT + SMALL,
}


class Blocks(nn.Module):
    """A list of square matrices, and a head outside of the list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


# How many times a ring algorithm sends (N-1)/N of a message's bytes.
SENDS = {
    "allreduce_": 2,
    "allreduce_coalesced_": 2,
    "reduce_": 1,
    "broadcast_": 1,
    "allgather_": 1,  # ranks compare names in the first step
    "_allgather_base_": 1,
    "_reduce_scatter_base_": 1,
}


class Counting(TorchDispatchMode):
    """Counts the bytes of all storages and messages of the operations inside it.

    bound  if more bytes are alive, waits up to 20 s: Gloo's threads hold messages for a moment after
           they have been waited for
    most   the most bytes alive at once
    sent   bytes that a rank sends with ring algorithms
    """

    def __init__(self, bound):
        super().__init__()
        self._storages = {}
        self._bound, self._pauses = bound, 2000
        self.most, self.sent = 0, 0.0

    def alive(self):
        storages = [each() for each in [*self._storages.values()]]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        seen = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        for tensor in seen:
            self.see(tensor)
        while (alive := self.alive()) > self._bound and self._pauses:
            self._pauses -= 1
            time.sleep(0.01)
        self.most = max(self.most, alive)
        if func.namespace == "c10d":
            sends = SENDS[func._schema.name.partition("::")[2]]
            whole = max(map(nbytes_of, args))  # input or output, whichever is larger
            self.sent += sends * (RANKS - 1) / RANKS * whole
        return result

    def see(self, tensor):
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key))


def nbytes_of(argument):
    return sum(t.nbytes for t in tree_leaves(argument) if isinstance(t, torch.Tensor))


class LateWork:
    """Behaves like NCCL's work when the host is ahead of the device: it is never completed yet."""

    waits = 0

    def __init__(self, work):
        self._work = work

    def wait(self):
        LateWork.waits += 1
        return self._work.wait()

    def is_completed(self):
        return False


def late(launch):
    return lambda *given: LateWork(launch(*given))


@pytest.fixture(scope="module")
def counted():
    return launch(count, ranks=RANKS)


def count():
    held, scatter = [], Sharding.launch_scatter

    def scatter_and_hold(self, slice_, message):
        held.append(message)  # NCCL's watchdog holds messages too
        return scatter(self, slice_, message)

    OwnerDataParallel.device_may_wait = lambda *_: True
    for name in ("launch", "launch_to"):
        launched = getattr(GradientReducer, name)
        setattr(GradientReducer, name, late(launched))
    Sharding.launch_scatter = scatter_and_hold
    return {
        **{wrapper: count_a_step(wrapper) for wrapper in WRAPPERS},
        "waits": count_waits_of_begin(),
    }


def spread(wrapper, module):
    torch.manual_seed(0)
    return parallelise(
        wrapper,
        module,
        lambda module: [{"params": [*module.parameters()]}],
        lambda groups: torch.optim.SGD(groups, lr=0.1),
        settings=Settings(bucket_mb=UNIT / 1e6),
    )


def count_a_step(wrapper):
    """Returns the most bytes alive in forward and backward, and the bytes sent in a step."""
    module = Blocks()
    parallel = spread(wrapper, module)
    for _ in range(2):  # in the first, ranks compare the order of their blocks
        parallel.optimizer.zero_grad()
        with Counting(BOUNDS[wrapper]) as counting:
            for parameter in module.parameters():
                counting.see(parameter)
            parallel.module(torch.ones(1, WIDTH)).sum().backward()
            most = counting.most
            parallel.optimizer.step()
    return most, counting.sent


def count_waits_of_begin():
    """Returns how many messages begin_synchronizing waits for, and how many until the means are
    complete.
    """
    module = spread("zero2", Blocks()).module
    with module.no_sync():
        module(torch.ones(1, WIDTH)).sum().backward()
    LateWork.waits = 0
    module.begin_synchronizing()
    begun = LateWork.waits
    module.finish_synchronizing()
    return begun, LateWork.waits


def test_bytes_alive_are_within_bounds(counted):
    for rank in counted:
        for wrapper, bound in BOUNDS.items():
            assert rank[wrapper][0] <= bound, (wrapper, rank[wrapper][0] / UNIT)


def test_begin_synchronizing_does_not_wait(counted):
    """A pipeline computes other stages while a stage's gradients are in flight."""
    for rank in counted:
        begun, finished = rank["waits"]
        assert begun == 0 < finished


def test_bytes_sent_equal_those_declared_in_the_spec(counted):
    for wrapper in WRAPPERS:
        sent = sum(rank[wrapper][1] for rank in counted) / RANKS
        declared = sent_bytes(wrapper, gradient_bytes=WHOLE, weight_bytes=WHOLE, ranks=RANKS)
        # The head and the last block are gathered once: they stay whole from forward to backward.
        once = 2 * UNIT * (RANKS - 1) / RANKS if wrapper == "zero3" else 0
        assert sent == pytest.approx(declared - once, rel=1e-3), wrapper
