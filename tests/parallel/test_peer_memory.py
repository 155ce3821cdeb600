"""Tests which ranks copy into each other's memory; the ranks are threads of this process."""

import platform
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stepgauge.parallel.communication import peer_memory
from stepgauge.parallel.tensor_parallel import tensor_parallel
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream

BOTH_WAYS = {(0, 1), (1, 0)}


@pytest.fixture
def answers(monkeypatch):
    """Returns a function that returns each rank's answer.

    nodes    by rank: the machine on which it runs
    reaches  pairs of GPUs, of which the first can read the memory of the second
    """
    here = threading.local()

    def ask(nodes, reaches):
        values, everyone = {}, threading.Barrier(len(nodes), timeout=10)

        def gathered(value, group):
            values[here.rank] = value
            everyone.wait()
            found = [values[rank] for rank in range(len(nodes))]
            everyone.wait()
            return found

        def answer(rank):
            here.rank = rank
            return peer_memory.copies_reach(None, torch.device("cuda", rank))

        monkeypatch.setattr(peer_memory, "gathered_objects", gathered)
        monkeypatch.setattr(platform, "node", lambda: nodes[here.rank])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(nodes))
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair in reaches)
        with ThreadPoolExecutor(len(nodes)) as ranks:
            return list(ranks.map(answer, range(len(nodes))))

    return ask


def test_gpus_that_reach_each_other_copy(answers):
    assert answers(["a", "a"], BOTH_WAYS) == [True, True]


@pytest.mark.parametrize("reaches", [{(0, 1)}, {(1, 0)}, set()])
def test_no_rank_copies_if_a_gpu_cannot_reach_another(answers, reaches):
    assert answers(["a", "a"], reaches) == [False, False]


def test_no_rank_copies_to_another_host(answers):
    assert answers(["a", "b"], BOTH_WAYS) == [False, False]


def test_a_rank_without_a_gpu_neither_copies_nor_asks_the_others(monkeypatch):
    monkeypatch.setattr(peer_memory, "gathered_objects", None)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", None)
    assert not peer_memory.copies_reach(None, torch.device("cpu"))


def test_which_numbers_of_gpus_reach_each_other(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda first, second: max(first, second) < 3
    )
    assert peer_memory.connected_gpu_counts([2, 3, 4, 8]) == [2, 3]


def test_overlap_needs_gpus_that_read_each_others_memory(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "on_one_machine", lambda group: True)
    monkeypatch.setattr(tensor_parallel, "copies_reach", lambda group, device: False)
    stream, device = ResidualStream(None), torch.device("cuda", 0)
    asked = {"part_sum": tensor_parallel.part_sum_by_torch}
    with pytest.raises(ValueError, match="which needs GPUs that can read each other's memory"):
        tensor_parallel._set_overlap(stream, device, True, **asked)
    tensor_parallel._set_overlap(stream, device, None, **asked)
    assert not stream.overlap
