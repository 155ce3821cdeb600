"""Tests gradients that are averaged in a narrower dtype than their own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stepgauge.parallel.data_parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
)
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.runtime.launch import launch

DTYPES = (torch.bfloat16, torch.float16)


WRAPPERS = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "bucketed": BucketedDataParallel,
    "owners": lambda module, **settings: OwnerDataParallel(
        module, owners={name: 0 for name, _ in module.named_parameters()}, **settings
    ),
}


class Net(nn.Module):
    """Has float32, float64 and complex parameters, and one in the narrow dtype itself."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.usual = nn.Parameter(torch.randn(5, 3))
        self.wide = nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(5, 3).to(dtype))
        self.imaginary = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))

    def forward(self, rank):
        generator = torch.Generator().manual_seed(rank)
        factor = torch.randn(5, 3, generator=generator)
        loss = (self.usual * factor).sum() + (self.wide * factor).sum().float()
        loss = loss + (self.narrow * factor.to(self.narrow.dtype)).float().sum()
        return loss + (self.imaginary * factor).real.sum()


def means(name, dtype):
    """Returns the gradients under a wrapper, and the means of the gradients as ranks send them."""
    module = Net(dtype)
    wrapped = WRAPPERS[name](module, reduce_dtype=dtype)
    wrapped(dist.get_rank()).backward()
    found = {n: p.grad for n, p in module.named_parameters()}
    expected = {}
    for n, p in module.named_parameters():
        of_ranks = []
        for rank in range(2):
            alone = Net(dtype)
            alone(rank).backward()
            gradient = dict(alone.named_parameters())[n].grad
            sent = gradient if gradient.is_complex() else gradient.to(dtype)
            of_ranks.append(sent / 2)
        expected[n] = sum(of_ranks).to(p.dtype)
    return found, expected


def all_means():
    return {(name, dtype): means(name, dtype) for name in WRAPPERS for dtype in DTYPES}


def test_means_are_of_cast_gradients_and_have_the_weights_dtype():
    first, second = launch(all_means, ranks=2)
    for case, (found, expected) in first.items():
        for name, gradient in found.items():
            assert gradient.dtype == expected[name].dtype, case
            assert torch.equal(gradient, expected[name]), (*case, name)
    for (name, _), (found, expected) in second.items():
        for parameter, gradient in found.items():
            if name == "owners":
                assert gradient is None
            else:
                assert torch.equal(gradient, expected[parameter]), (name, parameter)


def test_an_integer_dtype_is_refused():
    with pytest.raises(ValueError, match=r"reduce_dtype is torch\.int8"):
        BucketedDataParallel(nn.Linear(2, 2), reduce_dtype=torch.int8)
