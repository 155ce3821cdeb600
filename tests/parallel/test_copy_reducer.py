"""Means by copies between ranks of one machine are those of the library."""

import contextlib
import ctypes
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgauge.parallel.copy_reducer import ADD, NUM_BOXES, CopyReducer
from stepgauge.parallel.data_parallel import BucketedDataParallel
from stepgauge.parallel.reducer import GradientReducer
from stepgauge.runtime.launch import launch

# Values: fewer than ranks, of one piece, of several.
COUNTS = (1, 3, 700, 5000)
TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.complex128)


def differences(device: str, piece_bytes: int, counts) -> dict:
    device = torch.device(device, int(os.environ["LOCAL_RANK"]) if device == "cuda" else None)
    copies, library = CopyReducer(None, device, piece_bytes=piece_bytes), GradientReducer()
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    sent = []
    for count in counts:
        for dtype in TYPES:
            ours = torch.randn(count, dtype=dtype, device=device, generator=generator)
            theirs = ours.to(torch.complex128 if dtype.is_complex else torch.float64)
            sent.append((ours, theirs, copies.launch([ours]), library.launch([theirs])))
    found = {}
    for ours, theirs, *works in sent:
        for work in works:
            work.wait()
        found[len(ours), ours.dtype] = float((ours - theirs).abs().max())
    return found


def wrapped(device: str) -> float:
    """The largest difference between gradients of a network averaged by copies and otherwise, of
    several steps, so that their memory is used again and again.
    """
    device = torch.device(device, int(os.environ["LOCAL_RANK"]) if device == "cuda" else None)
    largest = 0.0
    found = []
    for copies in (False, True):
        torch.manual_seed(0)
        width = 2048 if device.type == "cuda" else 16
        layers = [nn.Linear(width, width, dtype=torch.float64, device=device) for _ in range(8)]
        # Weights travel alone, biases packed.
        cap = width * width * 8 / 1e6
        module = BucketedDataParallel(nn.Sequential(*layers), bucket_mb=cap, copies=copies)
        torch.manual_seed(dist.get_rank())
        steps = []
        for _ in range(6):
            module.zero_grad()
            module(
                torch.randn(64, width, dtype=torch.float64, device=device)
            ).square().mean().backward()
            steps.append([p.grad.clone() for p in module.parameters()])
        found.append(steps)
    for first, second in zip(*found, strict=True):
        for one, other in zip(first, second, strict=True):
            largest = max(largest, float((one - other).abs().max() / one.abs().max()))
    return largest


def check(found) -> None:
    for rank in found:
        for (count, dtype), difference in rank.items():
            assert difference <= 4 * torch.finfo(dtype).eps, (count, dtype, difference)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_means_are_those_of_the_library(ranks):
    check(launch(differences, "cpu", 4096, COUNTS, ranks=ranks))


def test_a_wrapper_averages_by_copies():
    assert max(launch(wrapped, "cpu", ranks=2)) < 1e-12


class Stream:
    """A stream as a queue: what it does, each behind a question whether it can go on."""

    def __init__(self):
        self.queue, self.done = [], 0

    def put(self, act=lambda: None, can_go_on=lambda: True):
        self.queue.append((act, can_go_on))

    def record_event(self):
        end = len(self.queue)
        return lambda: self.done >= end

    def wait_event(self, event):
        self.put(can_go_on=event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def goes_on(self) -> bool:
        if self.done == len(self.queue) or not self.queue[self.done][1]():
            return False
        self.queue[self.done][0]()
        self.done += 1
        return True


BOX_BYTES = 4096


class Boxes:
    """Peer memory of ranks in one process; the streams themselves are the handles."""

    def __init__(self, ranks: int):
        self._boxes = torch.zeros(ranks, 2 * NUM_BOXES, BOX_BYTES, dtype=torch.uint8)
        self._flags = [[0] * 2 * NUM_BOXES * ranks for _ in range(ranks)]

    def box(self, rank, index):
        return self._boxes[rank, index]

    def address(self, rank, index):
        return self.box(rank, index).data_ptr()

    def copy(self, target, source, nbytes, stream):
        stream.put(lambda: ctypes.memmove(target, source, nbytes))

    def tell(self, rank, flag, turn, stream):
        stream.put(lambda: self._flags[rank].__setitem__(flag, turn))

    def wait_of(self, rank):
        flags = self._flags[rank]
        return lambda flag, turn, stream: stream.put(can_go_on=lambda: flags[flag] == turn)


class OnQueues(CopyReducer):
    """The launches of one rank of two; its sums are computed when their stream comes to them."""

    def __init__(self, rank: int, boxes: Boxes):
        self.rank, self.ranks, self._others = rank, 2, [1 - rank]
        self._share_bytes, self._turn, self._received = BOX_BYTES, 0, [None] * NUM_BOXES
        self._streams = self._handles = [Stream() for _ in range(3)]
        self._memory = mock.Mock(wraps=boxes, wait=boxes.wait_of(rank))

    def _add(self, piece, box):
        for rank in self._others:
            self._wait(rank, box, ADD)
        self._streams[ADD].put(lambda: self._sum(piece, box))

    def _sum(self, piece, box):
        with (
            mock.patch.object(self, "_wait"),
            mock.patch("torch.cuda.stream", contextlib.nullcontext),
        ):
            super()._add(piece, box)


@pytest.mark.parametrize("last", range(6))  # a stream that goes on when no other can
def test_work_is_over_when_all_means_are_there_and_nothing_reads_them(last):
    boxes, gradients = Boxes(2), [torch.full((8,), value) for value in (1.0, 3.0)]
    reducers = [OnQueues(rank, boxes) for rank in range(2)]
    for reducer, gradient in zip(reducers, gradients, strict=True):
        for piece in reducer._pieces([gradient]):
            reducer._average(piece)
    streams = [stream for reducer in reducers for stream in reducer._streams]
    streams.append(streams.pop(last))
    for reducer, gradient in zip(reducers, gradients, strict=True):
        while not reducer._received[reducer._turn % NUM_BOXES]():
            assert any(stream.goes_on() for stream in streams), "all wait"
        assert torch.equal(gradient, torch.full((8,), 2.0))
        gradient.fill_(float("nan"))  # memory that is used again
    while any(stream.goes_on() for stream in streams):
        pass
    assert not any(stream.done < len(stream.queue) for stream in streams)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus():
    check(launch(differences, "cuda", 2**22, (3, 5000, 5_000_000) * 5, ranks=2, device="cuda"))
    assert max(launch(wrapped, "cuda", ranks=2, device="cuda")) < 1e-12
