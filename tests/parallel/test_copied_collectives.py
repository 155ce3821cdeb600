"""Tests all-gathers and reduce-scatters by copies against what they should compute."""

import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import Toy, batch

from stepgauge.parallel.communication import stall_watch
from stepgauge.parallel.communication.copied_collectives import (
    BOXES,
    CopiedCollectives,
    split_into_messages,
)
from stepgauge.parallel.communication.peer_memory import ALIGNMENT
from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.runtime.launch import RankError, launch

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
    copies = CopiedCollectives(dist.group.WORLD, device, ranks * ALIGNMENT)
    choose, checks, wrong = random.Random(0), [], []
    for turn in range(COLLECTIVES):
        dtype = choose.choice(DTYPES)
        sizes = [choose.choice(SIZES) for _ in range(choose.randint(1, 4))]
        start = gather if choose.random() < 0.5 else scatter
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
    rank, ranks, size = dist.get_rank(), dist.get_world_size(), sizes[0]
    messages = [values(each, turn, 0, ranks * size, dtype) for each in range(ranks)]
    row = torch.full((size,), torch.nan, dtype=dtype)
    mean = torch.stack(messages).double().mean(0).view(ranks, size)[rank]
    return copies.reduce_scatter_mean(row, messages[rank]), lambda: torch.allclose(
        row.double(), mean, rtol=0, atol=2 * torch.finfo(dtype).eps
    )


def difference_in_training():
    by_collectives, by_copies = trained(torch.inf), trained(0)
    return max(float((a - b).abs().max()) for a, b in zip(by_collectives, by_copies, strict=True))


def trained(copied_from):
    torch.manual_seed(0)
    module = FullyShardedDataParallel(Toy(), copied_from=copied_from)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        module(*batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
    return [parameter.full_tensor().detach() for parameter in module.parameters()]


def check(ranks):
    assert [wrong for wrong, _ in ranks] == [[]] * len(ranks)
    assert max(difference for _, difference in ranks) < 1e-6


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
    stall_watch.LIMIT_S = 3.0
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
    assert len(messages) > 2 * BOXES, "boxes are used again"
