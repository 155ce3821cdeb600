"""Tests all-gathers and reduce-scatters by copies against what they should compute."""

import collections
import functools
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import STEPS, batch, make

from stepgauge.parallel.communication import copied_collectives
from stepgauge.parallel.communication.copied_collectives import (
    CopiedCollectives,
    split_into_messages,
)
from stepgauge.parallel.communication.peer_memory import ALIGNMENT
from stepgauge.parallel.communication.stall_watch import StallWatch
from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.shards import COPY_BOXES

RANKS = 3
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = (0, 1, 5, 127, 128, 129, 1000)
COLLECTIVES = 60


def run(device_type):
    device = torch.device(
        device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None
    )
    torch.set_default_device(device)
    return wrong_collectives(device), difference_in_training()


def wrong_collectives(device):
    """Returns the collectives that gave wrong values. Each box has room for 128 values of float32 of
    every rank, so that most messages need several boxes. Two collectives are in flight at a time.
    """
    ranks = dist.get_world_size()
    small = ranks * ALIGNMENT
    copies = CopiedCollectives(dist.group.WORLD, device, gather_bytes=small, scatter_bytes=small)
    choose, checks, wrong = random.Random(0), [], []
    for turn in range(COLLECTIVES):
        dtype = choose.choice(DTYPES)
        sizes = [choose.choice(SIZES) for _ in range(choose.randint(1, 4))]
        start = gather if choose.random() < 0.5 else scatter
        if device.type == "cuda" and turn % 2 == dist.get_rank() % 2:
            torch.cuda._sleep(2_000_000)  # this rank is late
        checks.append((turn, start, dtype, sizes, *start(copies, turn, dtype, sizes)))
        if len(checks) == 2:
            *about, work, is_right = checks.pop(0)
            work.wait()
            if not is_right():
                wrong.append(about)
    return wrong


def values(rank, turn, number, count, dtype):
    generator = torch.Generator("cpu").manual_seed(1000 * turn + 10 * number + rank)
    drawn = torch.randn(count, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(torch.get_default_device(), dtype)


def gather(copies, turn, dtype, sizes):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [
        [values(each, turn, number, size, dtype) for number, size in enumerate(sizes)]
        for each in range(ranks)
    ]
    outputs = [torch.full((ranks * size,), torch.nan, dtype=dtype) for size in sizes]
    expected = [torch.cat(of_tensor) for of_tensor in zip(*parts, strict=True)]
    return copies.all_gather(outputs, parts[rank]), lambda: all(map(torch.equal, outputs, expected))


def scatter(copies, turn, dtype, sizes):
    """The rows are not multiples of the number of ranks; some ranks have none."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wholes = [
        [
            values(each, turn, number, 3 * size, dtype).view(size, 3)
            for number, size in enumerate(sizes)
        ]
        for each in range(ranks)
    ]
    means = [torch.stack(of_tensor).double().mean(0) for of_tensor in zip(*wholes, strict=True)]
    rows = [-(-size // ranks) for size in sizes]
    expected = [mean[rank * n : (rank + 1) * n] for mean, n in zip(means, rows, strict=True)]
    slices = [torch.full(each.shape, torch.nan, dtype=dtype) for each in expected]
    return copies.reduce_scatter_mean(slices, wholes[rank]), lambda: all(
        torch.allclose(a.double(), b, rtol=0, atol=2 * torch.finfo(dtype).eps)
        for a, b in zip(slices, expected, strict=True)
    )


def difference_in_training():
    """Returns the largest difference between weights trained with and without copies, by dtype in which
    they are sent, and how many collectives were copied.
    """
    counted = collections.Counter()
    for name in ("all_gather", "reduce_scatter_mean"):
        method = getattr(CopiedCollectives, name)
        setattr(CopiedCollectives, name, functools.partialmethod(count, counted, name, method))
    differences = {}
    for dtype in (None, torch.bfloat16):
        pairs = zip(trained(torch.inf, dtype), trained(0, dtype), strict=True)
        differences[dtype] = max(float((a - b).abs().max()) for a, b in pairs)
    return differences, counted


def count(self, counted, name, method, *tensors):
    counted[name] += 1
    return method(self, *tensors)


def trained(copied_above, dtype):
    module = make("transformer").float()
    module = FullyShardedDataParallel(module, dtype, copied_above=copied_above)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        module(*batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in module.parameters()]


def check(ranks):
    assert [wrong for wrong, _ in ranks] == [[]] * len(ranks)
    for _, (differences, counted) in ranks:
        assert differences[None] < 1e-6
        assert differences[torch.bfloat16] < 4e-3
        # 3 units: all gather in forward, two in backward again, but the last only in the first step.
        assert counted["reduce_scatter_mean"] == 2 * STEPS * 3
        assert counted["all_gather"] == 2 * (STEPS * 5 - (STEPS - 1))


def test_collectives_and_zero3_by_copies():
    check(launch(run, "cpu", ranks=RANKS))


@pytest.mark.gpu
def test_collectives_and_zero3_by_copies_on_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    check(launch(run, "cuda", ranks=torch.cuda.device_count(), device="cuda"))


@pytest.mark.gpu
def test_a_rank_that_waits_for_ever_is_ended():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    with pytest.raises(RankError, match="rank 0 of 2 was ended by SIGABRT"):
        launch(gather_alone, ranks=2, device="cuda")


def gather_alone():
    copied_collectives.StallWatch = lambda memory, device, _: StallWatch(memory, device, 3.0)
    rank, device = dist.get_rank(), torch.device("cuda", dist.get_rank())
    copies = CopiedCollectives(dist.group.WORLD, device)
    shard, whole = torch.ones(1000, device=device), torch.zeros(2000, device=device)
    copies.all_gather([whole], [shard]).wait()
    time.sleep(5)  # no copies are missing
    assert float(whole.sum()) == 2000
    if rank == 0:
        copies.all_gather([whole], [shard]).wait()
        torch.cuda.synchronize()
    time.sleep(60)


def test_messages_have_all_bytes_once():
    sizes = [0, 3, 5000, ALIGNMENT, 1]
    messages = [*split_into_messages(sizes, 2 * ALIGNMENT)]
    seen = [set() for _ in sizes]
    for message in messages:
        assert sum(-(-nbytes // ALIGNMENT) for _, _, nbytes in message) <= 2, message
        for number, first, nbytes in message:
            new = set(range(first, first + nbytes))
            assert not seen[number] & new
            seen[number] |= new
    assert [len(each) for each in seen] == sizes
    assert len(messages) > 2 * COPY_BOXES, "boxes are used again"
