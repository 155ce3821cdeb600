"""Compares each data parallel wrapper with one process that has the whole batch, over Gloo.

All checks on the same number of ranks run in one launch, because starting ranks takes longer than the
checks.
"""

import contextlib
import gc
import itertools
import types
import weakref

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import MICRO_BATCHES, STEPS, batch, make, optimizer_of, train_alone
from torch import nn

from stepgauge.parallel.data_axis import REPLICATING, Settings, bucketed
from stepgauge.parallel.data_parallel import (
    BucketedDataParallel,
    FlatDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
)
from stepgauge.parallel.data_parallel.bucket_gradients import BucketGradients
from stepgauge.parallel.data_parallel.readiness import TrackedParameter
from stepgauge.parallel.replicas import DifferentModelsError
from stepgauge.runtime.launch import launch
from stepgauge.spec import layout

WRAPPERS = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "overlapped": OverlappedDataParallel,
    "bucketed": lambda module: BucketedDataParallel(module, bucket_mb=0.0005),
    "one bucket": lambda module: BucketedDataParallel(module, bucket_mb=1000),
}
NETWORKS = ("toy", "transformer", "bert")
CLIP = 0.5
OPTIMIZERS = ("sgd", "adamw")
CASES = [*itertools.product(WRAPPERS, NETWORKS, OPTIMIZERS)]


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_share_memory_are_sent_as_copies(count):
    shared = torch.ones(3, 6)  # one row more than the gradients have
    sent = [nn.Parameter(torch.zeros(2, 3)) for _ in range(count)]
    for parameter, row in zip(sent, shared, strict=False):
        parameter.grad = row.view(2, 3)
    members = [TrackedParameter(n, "", p, is_unreduced=True) for n, p in enumerate(sent)]
    message = BucketGradients(
        members, types.SimpleNamespace(rank=0), dtype=torch.float32, packs=count > 1
    )
    for tensor in message.tensors:
        tensor.zero_()
    assert shared.eq(1).all()
    message.unpack()
    assert all(parameter.grad.eq(0).all() for parameter in sent)


def test_training_on_two_ranks_equals_one_process(two_ranks):
    for case in CASES:
        for rank in two_ranks:
            assert rank[case] < 1e-12, case


def test_training_on_four_ranks_equals_one_process():
    for rank in launch(parity, CASES[-4:], ranks=4):
        assert all(difference < 1e-12 for difference in rank.values()), rank


@pytest.mark.parametrize(
    "check",
    [
        "several types",
        "each wrapper has the policy of its row in the spec",
        "gradients that share a storage",
        "gradients are views of their buckets",
        "one large gradient stays where it is",
        "ranks start from rank 0",
        "without communication",
        "a wrapper that is dropped frees its weights",
        "sparse",
    ],
)
def test_on_two_ranks(two_ranks, check):
    assert [rank[check] for rank in two_ranks] == ["", ""]


def test_different_models_are_refused_at_the_start(two_ranks):
    for rank in two_ranks:
        assert rank["shapes"] == (
            "the ranks' models differ: parameter or buffer weight is float32 (3, 2) on cpu on rank 0, "
            "float32 (3, 3) on cpu on rank 1"
        )
        assert "bias is missing on rank 0" in rank["names"]
        assert "float32 (3, 2) on cpu, frozen on rank 1" in rank["frozen"]


@pytest.fixture(scope="module")
def two_ranks():
    """The results of each rank, by check."""
    return launch(all_checks, ranks=2)


def all_checks():
    found = parity(CASES)
    for name, check in CHECKS.items():
        try:
            found[name] = check() or ""
        except AssertionError as error:
            found[name] = str(error) or "failed"
    for name, build in DIFFERENT.items():
        try:
            NaiveDataParallel(build(dist.get_rank()))
            found[name] = "accepted"
        except DifferentModelsError as error:
            found[name] = str(error)
    return found


def parity(cases):
    torch.use_deterministic_algorithms(True)
    return {case: difference_from_one_process(*case) for case in cases}


def difference_from_one_process(wrapper, network, optimizer):
    losses, gradients, weights = train_alone(network, optimizer, dist.get_world_size(), clip=CLIP)
    # Ranks start with different weights; all get those of rank 0.
    parallel = WRAPPERS[wrapper](make(network, seed=dist.get_rank()))
    sgd_or_adamw = optimizer_of(optimizer, [p for p in parallel.parameters() if p.requires_grad])
    differences = []
    for step in range(STEPS):
        sgd_or_adamw.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else parallel.no_sync():
                loss = parallel(*batch(step, micro, dist.get_rank())) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        parallel.clip_gradients(CLIP)
        sgd_or_adamw.step()
        dist.all_reduce(total)
        differences.append(abs(total.item() / dist.get_world_size() - losses[step]))
    for name, parameter in parallel.module.named_parameters():
        differences.append((parameter.detach() - weights[name]).abs().max().item())
        assert (parameter.grad is None) == (gradients[name] is None), name
        if parameter.grad is not None:
            differences.append((parameter.grad - gradients[name]).abs().max().item())
    return max(differences)


def expected(module, *losses):
    """Returns the gradients of the mean over ranks of losses, functions of the module and the rank."""
    for rank in range(dist.get_world_size()):
        for loss in losses:
            (loss(module, rank) / dist.get_world_size()).backward()
    return [p.grad for p in module.parameters()]


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loss_of(module, rank, seed=0):
    generator = torch.Generator("cpu").manual_seed(seed * 10 + rank)
    x = torch.randn(5, 4, generator=generator, dtype=torch.float64, device="cpu")
    return module(x.to(torch.get_default_device())).square().mean()


def require_equal(module, wanted, tolerance=1e-13):
    for (name, parameter), gradient in zip(module.named_parameters(), wanted, strict=True):
        assert parameter.grad is not None, f"{name} has no gradient"
        assert (parameter.grad - gradient).abs().max() < tolerance, name


def several_types():
    def mixed():
        torch.manual_seed(0)
        return nn.ModuleList(
            [nn.Linear(4, 4, dtype=t) for t in (torch.float64, torch.float32, torch.bfloat16)]
        )

    def loss(module, rank):
        layers = module.module if hasattr(module, "module") else module
        x = torch.full((2, 4), 1.0 + rank)
        for layer in layers:
            x = layer(x.to(layer.weight.dtype))
        return x.float().sum()

    wanted = expected(mixed(), loss)
    for wrap in WRAPPERS.values():
        parallel = wrap(mixed())
        loss(parallel, dist.get_rank()).backward()
        require_equal(parallel.module, wanted, tolerance=0.05)


def shared_storage():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))
            self.b = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

        def forward(self, factor):
            return factor * (self.a.view(-1) + self.b.view(-1)).pow(2).sum()

    # Computed by hand: with a shared storage, autograd in one process would add to both gradients.
    mean_factor = (dist.get_world_size() + 1) / 2
    wanted = [torch.full((4, 4), 4 * mean_factor, dtype=torch.float64)] * 2
    for wrap in WRAPPERS.values():
        parallel = wrap(Sum())
        parallel(dist.get_rank() + 1.0).backward()
        require_equal(parallel.module, wanted)


def gradients_are_views_of_their_bucket():
    parallel = FlatDataParallel(mlp())
    loss_of(parallel, dist.get_rank()).backward()
    storages = {p.grad.untyped_storage().data_ptr() for p in parallel.parameters()}
    assert len(storages) == 1
    elements = sum(p.numel() for p in parallel.parameters())
    assert next(parallel.parameters()).grad.untyped_storage().nbytes() == 8 * elements


def large_gradient_stays_in_place():
    parallel = OverlappedDataParallel(mlp())
    places = {}
    for name, parameter in parallel.named_parameters():
        parameter.register_hook(
            lambda gradient, name=name: places.update({name: gradient.data_ptr()})
        )
    loss_of(parallel, dist.get_rank()).backward()
    kept = [name for name, p in parallel.named_parameters() if p.grad.data_ptr() == places[name]]
    assert "module.0.weight" in kept, kept


def all_ranks_start_with_rank_0s_values():
    torch.manual_seed(dist.get_rank())
    parallel = NaiveDataParallel(nn.BatchNorm1d(3))
    parallel.module.running_mean += dist.get_rank()
    module = nn.BatchNorm1d(3)
    nn.init.normal_(module.weight)
    module.running_mean += dist.get_rank()
    parallel = NaiveDataParallel(module)
    of_ranks = [torch.empty(6) for _ in range(2)]
    dist.all_gather(
        of_ranks, torch.cat((parallel.module.weight.detach(), parallel.module.running_mean))
    )
    assert torch.equal(of_ranks[0], of_ranks[1])
    assert torch.equal(of_ranks[0][3:], torch.zeros(3))


def communication_is_skipped():
    alone, parallel = mlp(), BucketedDataParallel(mlp())
    parallel.communicates = False
    loss_of(alone, dist.get_rank()).backward()
    loss_of(parallel, dist.get_rank()).backward()
    require_equal(parallel.module, [p.grad for p in alone.parameters()])


def dropped_wrapper_is_freed():
    for wrap in WRAPPERS.values():
        parallel = wrap(mlp())
        loss_of(parallel, dist.get_rank()).backward()
        weight = weakref.ref(parallel.module[0].weight)
        del parallel
        gc.collect()
        assert weight() is None


def sparse_gradient_is_refused():
    parallel = NaiveDataParallel(nn.Embedding(5, 2, sparse=True))
    try:
        parallel(torch.tensor([1])).sum().backward()
        return "accepted"
    except ValueError as error:
        return "" if "a gradient of shape (5, 2) is sparse" in str(error) else str(error)


def policies_are_rows_of_the_spec():
    for name, wrap in REPLICATING.items():
        assert wrap(mlp(), Settings()).policy is layout.WRAPPERS[name], name
    owners = {"0.weight": 0}
    assert bucketed(mlp(), Settings(), owners).policy is layout.WRAPPERS["zero2"]


CHECKS = {
    "several types": several_types,
    "each wrapper has the policy of its row in the spec": policies_are_rows_of_the_spec,
    "gradients that share a storage": shared_storage,
    "gradients are views of their buckets": gradients_are_views_of_their_bucket,
    "one large gradient stays where it is": large_gradient_stays_in_place,
    "ranks start from rank 0": all_ranks_start_with_rank_0s_values,
    "without communication": communication_is_skipped,
    "a wrapper that is dropped frees its weights": dropped_wrapper_is_freed,
    "sparse": sparse_gradient_is_refused,
}
DIFFERENT = {
    "shapes": lambda rank: nn.Linear(2 + rank, 3),
    "names": lambda rank: nn.Linear(2, 3, bias=rank == 1),
    "frozen": lambda rank: nn.Linear(2, 3).requires_grad_(rank == 0),
}
