"""Means by copies between ranks of one machine are those of the library."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgauge.parallel.copy_reducer import CopyReducer
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


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_on_two_gpus():
    check(launch(differences, "cuda", 2**22, (3, 5000, 5_000_000) * 5, ranks=2, device="cuda"))
    assert max(launch(wrapped, "cuda", ranks=2, device="cuda")) < 1e-12
