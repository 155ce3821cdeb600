"""The ring has the library's results for any number of ranks and elements, and sends the expected
number of bytes.
"""

import pytest
import torch
import torch.distributed as dist

from stepgauge.measure.ring import Ring
from stepgauge.parallel.communication.collectives import all_gather_flat, reduce_scatter_flat
from stepgauge.runtime.launch import launch

COUNTS = (1, 2, 5, 12, 1000, 4099)


def compare(counts):
    """Compares the ring's results with the library's, and returns the bytes that this rank sent in
    each all-reduce.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    sent = []
    for count in counts:
        own = torch.randint(
            -1000, 1000, (count,), generator=torch.Generator().manual_seed(rank)
        ).double()
        expected = own.clone()
        dist.all_reduce(expected)
        ring, result = Ring(), own.clone()
        ring.all_reduce(result)
        assert torch.equal(result, expected)
        chunk = Ring().reduce_scatter(own)
        assert torch.equal(chunk, expected.tensor_split(size)[rank])
        gathered = torch.empty_like(expected)
        Ring().all_gather(gathered, chunk)
        assert torch.equal(gathered, expected)
        sent.append(ring.sent_bytes)
    return sent


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_the_ring_equals_the_library_and_counts_its_bytes(ranks):
    by_rank = launch(compare, COUNTS, ranks=ranks)
    for index, count in enumerate(COUNTS):
        sent = [mine[index] for mine in by_rank]
        assert sum(sent) == 2 * (ranks - 1) * count * 8
        if count % ranks == 0:
            assert set(sent) == {2 * (ranks - 1) * count * 8 // ranks}


def bfloat(_):
    tensor = torch.full((7,), 0.5, dtype=torch.bfloat16)
    Ring().all_reduce(tensor)
    with pytest.raises(ValueError, match="input has 1 elements"):
        Ring().all_gather(torch.empty(7), torch.empty(1))
    return tensor.tolist()


def test_bfloat16_works_and_an_input_of_the_wrong_size_raises():
    assert launch(bfloat, None, ranks=2) == [[1.0] * 7] * 2


def flat(_):
    rank = dist.get_rank()
    gathered, part = torch.empty(4), torch.empty(2)
    all_gather_flat(gathered, torch.full((2,), float(rank)))
    reduce_scatter_flat(part, torch.arange(4.0))
    return gathered.tolist(), part.tolist()


def test_flat_collectives_work_in_this_version_of_torch():
    values = launch(flat, None, ranks=2)
    assert values == [([0, 0, 1, 1], [0, 2]), ([0, 0, 1, 1], [4, 6])]


def subgroup(_):
    group = dist.new_group([1, 2])
    tensor = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() > 0:
        Ring(group).all_reduce(tensor)
    return tensor.item()


def test_a_ring_of_a_subgroup():
    assert launch(subgroup, None, ranks=3) == [0, 3, 3]
