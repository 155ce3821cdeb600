"""Gradients averaged in a narrower type than the parameters': what each becomes, and which are taken before autograd
widens them. Two ranks over Gloo."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from tests.parallel import test_data_parallel
from tests.parallel.networks import batch, make
from torch import nn

from stepgauge.parallel.data_parallel import BucketedDataParallel, DataParallel, NaiveDataParallel
from stepgauge.parallel.launch import launch
from stepgauge.parallel.narrow import NarrowReads

BF16 = torch.bfloat16


def in_lists(module, **how):
    wrapped = BucketedDataParallel(module, bucket_mb=0.0005, **how)
    wrapped.averager.takes_lists = lambda device: True
    return wrapped


WRAPPERS = {
    "in lists": in_lists,
    "naive": NaiveDataParallel,
    "bucketed": lambda module, **how: BucketedDataParallel(module, bucket_mb=0.0005, **how),
    "one bucket": lambda module, **how: BucketedDataParallel(module, bucket_mb=1000, **how),
    "peer copies": lambda module, **how: BucketedDataParallel(module, 0.0005, transport="peer-copies", **how),
}
ROUNDING = 2**-8  # of bf16, relative: of a sum of halves, once


def autocast():
    return torch.autocast(torch.get_default_device().type, BF16)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(all_checks, ranks=2)


@pytest.mark.parametrize("check", ["float64 in float32", *WRAPPERS, "second backward", "unused", "twice", "by owners"])
def test_on_two_ranks(two_ranks, check):
    assert [rank[check] for rank in two_ranks] == ["", ""]


def all_checks():
    found = {}
    for name, check in CHECKS.items():
        try:
            check()
            found[name] = ""
        except AssertionError as error:
            found[name] = str(error) or "failed"
    return found


def float64_in_float32():
    """Parity as of the other wrappers, with clipping and accumulation, to float32 and not to float64."""
    test_data_parallel.WRAPPERS["narrow"] = lambda module: BucketedDataParallel(
        module, bucket_mb=0.0005, reduce_dtype=torch.float32
    )
    for network in test_data_parallel.NETWORKS:
        difference = test_data_parallel.difference_from_one_process("narrow", network, "sgd")
        assert 1e-12 < difference < 1e-5, (network, difference)


def transformer():
    return make("transformer", seed=0).float()


def loss_of(module, micro, rank):
    return module(*batch(0, micro, rank))


def means(module, *micros):
    """What one process has of all ranks' batches under autocast, the mean in float32."""
    for rank in range(2):
        for micro in micros:
            with autocast():
                loss = loss_of(module, micro, rank)
            (loss / 2).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def require_rounded(module, wanted):
    for name, parameter in module.named_parameters():
        got, want = parameter.grad, wanted[name]
        assert (got is None) == (want is None), name
        if got is None:
            continue
        assert got.dtype == torch.float32 and torch.equal(got, got.to(BF16).float()), f"{name} is not what bf16 holds"
        # A part is rounded where it did not come in bf16, and the mean is.
        assert (got - want).abs().max() <= 3 * ROUNDING * want.abs().max(), name


def of_a_wrapper(name):
    def check():
        taken = []
        noting = lambda self, name, gradient: taken.append(name) or take(self, name, gradient)  # noqa: E731
        take, DataParallel._take = DataParallel._take, noting
        try:
            wrapped = WRAPPERS[name](transformer(), reduce_dtype=BF16)
            names = set(wrapped.module.state_dict())
            with autocast():
                loss = loss_of(wrapped, 0, dist.get_rank())
            loss.backward()
            wrapped.finish_gradient_synchronization()
        finally:
            DataParallel._take = take
        linear = {f"{n}.weight" for n, m in wrapped.module.named_modules() if isinstance(m, nn.Linear)}
        tied = {
            n for n in linear if wrapped.module.get_parameter(n) is wrapped.module.get_submodule("embedding").weight
        }
        assert sorted(taken) == sorted(linear - tied) and len(taken) > 4, taken
        assert names == set(transformer().state_dict())
        require_rounded(wrapped.module, means(transformer(), 0))

    return check


def second_backward():
    """Accumulated, then added to a mean; and each time the sum of what came in both types."""
    for accumulates in (False, True):
        wrapped = BucketedDataParallel(transformer(), 0.0005, reduce_dtype=BF16)
        for micro in range(2):
            with wrapped.no_sync() if accumulates and micro == 0 else contextlib.nullcontext():
                with autocast():
                    loss = loss_of(wrapped, micro, dist.get_rank())
                loss.backward()
        wrapped.finish_gradient_synchronization()
        require_rounded(wrapped.module, means(transformer(), 0, 1))


def unused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.of_one, self.never = (nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x, both):
            return self.used(x).sum() + (self.of_one(x).sum() if both else 0)

    torch.manual_seed(0)
    wrapped = BucketedDataParallel(Two(), reduce_dtype=BF16)
    for _ in range(2):
        wrapped.zero_grad()
        with autocast():
            wrapped(torch.ones(2, 4), dist.get_rank() == 0).backward()
        wrapped.finish_gradient_synchronization()
        module = wrapped.module
        assert module.never.weight.grad is None
        assert module.used.weight.grad.eq(2).all() and module.of_one.weight.grad.eq(1).all()


def twice():
    """A weight that is read twice in a forward comes once, and one that is added to others is not theirs."""
    torch.manual_seed(0)
    layer, bias = nn.Linear(4, 4, bias=False), torch.zeros(4, 4, requires_grad=True)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(self.layer(x)).sum() + (self.layer.weight + bias.to(BF16)).sum()

    x = torch.full((3, 4), 0.5 + dist.get_rank())
    with autocast():
        Both()(x).backward()
    own, layer.weight.grad, bias.grad = layer.weight.grad.clone(), None, None
    wrapped = NaiveDataParallel(Both(), reduce_dtype=BF16)
    with autocast():
        wrapped(x).backward()
    wrapped.finish_gradient_synchronization()
    dist.all_reduce(own)
    assert (layer.weight.grad - own / 2).abs().max() <= 3 * ROUNDING * own.abs().max()
    assert bias.grad.eq(1).all()


def by_owners():
    module = transformer()
    owners = {name: index % 2 for index, (name, _) in enumerate(module.named_parameters())}
    wrapped = BucketedDataParallel(module, 0.0005, owners=owners, reduce_dtype=BF16)
    with autocast():
        loss = loss_of(wrapped, 0, dist.get_rank())
    loss.backward()
    wrapped.finish_gradient_synchronization()
    wanted = means(transformer(), 0)
    require_rounded(module, {n: g if owners[n] == dist.get_rank() else None for n, g in wanted.items()})


CHECKS = {
    "float64 in float32": float64_in_float32,
    **{name: of_a_wrapper(name) for name in WRAPPERS},
    "second backward": second_backward,
    "unused": unused,
    "twice": twice,
    "by owners": by_owners,
}


def test_the_kernel_widens_too():
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    script = """if True:
        import torch
        from stepgauge.parallel.widening import _in_one_pass
        for dtype in (torch.bfloat16, torch.float16):
            for numel in (1, 5000):
                narrow = torch.randn(numel + 1).to(dtype)[1:]
                wide = torch.full((numel,), float("nan"))
                _in_one_pass(wide, narrow)
                assert torch.equal(wide, narrow.float()), dtype
        print("equal")
    """
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout == "equal\n", done.stderr


def test_weights_read_elsewhere_are_the_parameters():
    layer = nn.Linear(2, 2)
    reads = NarrowReads(layer, BF16, lambda name, gradient: None)
    own = dict(layer.named_parameters())["weight"]
    with autocast():
        assert layer.weight is own
        with reads.reading():
            assert layer.weight.dtype == BF16 and layer.weight is layer.weight
            with torch.no_grad():
                assert layer.weight is own
    with reads.reading():
        assert layer.weight is own  # no autocast
    layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert layer.weight.eq(0).all() and set(layer.state_dict()) == {"weight", "bias"}
