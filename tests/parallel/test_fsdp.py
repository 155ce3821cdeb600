"""The fully sharded wrapper against one process: bit for bit in fp32, and in 16 bits with the same
casts.
"""

import copy
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import MICRO_BATCHES, STEPS, Toy, batch, small_bert
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.fsdp import HELD, PREFETCHED, FullyShardedDataParallel
from stepgauge.runtime.launch import launch
from stepgauge.spec.model import ModelSpec

CLIP = 0.5


def transformer():
    return TransformerLM(
        ModelSpec.preset("nano", vocab_size=7, context_length=5, positions="learned")
    )


NETWORKS = {"toy": Toy, "transformer": transformer, "bert": small_bert}


def make(name, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name]()


CASES = [
    (network, optimizer, dtype, clips)
    for network in NETWORKS
    for optimizer, dtype, clips in (
        (torch.optim.SGD, None, False),
        (torch.optim.AdamW, None, False),
        (torch.optim.SGD, None, True),
        (torch.optim.SGD, torch.bfloat16, False),
        (torch.optim.SGD, torch.float16, False),
    )
    # The toy's buffer is of another type; BERT's tied weight has two gradients, which are rounded
    # to 16 bits apart.
    if dtype is None or network == "transformer"
    # The softmax cancels BERT's key biases: AdamW would make steps of the rounding that is their
    # gradient.
    if optimizer is torch.optim.SGD or network != "bert"
]


def test_training_in_fp32_is_bit_for_bit_that_of_one_process(two_ranks):
    for case in CASES:
        if case[:3] == ("transformer", torch.optim.SGD, None) and not case[3]:
            assert [rank[case] for rank in two_ranks] == [0.0, 0.0], case


def test_tied_frozen_and_unused_weights_and_adamw(two_ranks):
    """The last bits may differ: a tied weight's two gradients are averaged apart, and AdamW rounds
    by where a vector register begins.
    """
    for case in CASES:
        if case[2] is None:
            assert max(rank[case] for rank in two_ranks) < 1e-6, case


def test_with_clipping_by_the_norm_of_the_whole_gradient(two_ranks):
    for case in CASES:
        if case[3]:
            assert max(rank[case] for rank in two_ranks) < 1e-6, case


def test_training_in_16_bits_is_that_of_one_process_with_the_same_casts(two_ranks):
    for case in CASES:
        if case[2] is not None:
            assert max(rank[case] for rank in two_ranks) < 1e-4, case


@pytest.mark.parametrize(
    "check", ["evaluation", "small", "prefetch", "frees", "whole state", "trained later"]
)
def test_on_two_ranks(two_ranks, check):
    assert [rank[check] for rank in two_ranks] == ["", ""]


def test_a_second_synchronisation_changes_nothing_on_three_ranks():
    """A third of a sum of three equal values is not always the value."""
    assert launch(synchronises_twice, ranks=3) == [True] * 3


def test_a_checkpoint_of_two_ranks_loads_on_three(tmp_path):
    (expected, _) = launch(save, str(tmp_path), ranks=2)
    for weights in launch(load, str(tmp_path), ranks=3):
        assert set(weights) == set(expected)
        for name in expected:
            assert torch.equal(weights[name], expected[name]), name


@pytest.fixture(scope="module")
def two_ranks():
    return launch(all_checks, ranks=2)


def all_checks():
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    found = {case: difference_from_one_process(*case) for case in CASES}
    for name, check in CHECKS.items():
        try:
            found[name] = check() or ""
        except AssertionError as error:
            found[name] = str(error) or "failed"
    return found


def optimizer_of(kind, parameters):
    return kind(
        [p for p in parameters if p.requires_grad], lr=0.25 if kind is torch.optim.SGD else 0.01
    )


def difference_from_one_process(network, optimizer, dtype, clips):
    weights = train_alone(network, optimizer, dtype, clips)
    parallel = FullyShardedDataParallel(make(network, seed=dist.get_rank()), dtype)
    step_with = optimizer_of(optimizer, parallel.parameters())
    for step in range(STEPS):
        step_with.zero_grad()
        for micro in range(MICRO_BATCHES):
            (parallel(*batch(step, micro, dist.get_rank())) / MICRO_BATCHES).backward()
        parallel.finish_gradient_synchronization()
        if clips:
            parallel.clip_gradients(CLIP)
        step_with.step()
    full = parallel.full_parameters()
    assert list(full) == list(weights)
    return max((full[name] - weights[name]).abs().max().item() for name in weights)


def train_alone(network, optimizer, dtype, clips):
    """Both ranks' batches in one process, the means formed as ranks form them; casts where the
    wrapper casts.
    """
    model = make(network)
    step_with = optimizer_of(optimizer, model.parameters())
    for step in range(STEPS):
        step_with.zero_grad()
        for micro in range(MICRO_BATCHES):
            parts = [gradients_of(model, dtype, batch(step, micro, rank)) for rank in range(2)]
            for parameter, first, second in zip(model.parameters(), *parts, strict=True):
                if first is None:
                    continue
                if parameter.ndim < 2:
                    first, second = first.float(), second.float()
                mean = (first / 2 + second / 2).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        step_with.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients_of(model, dtype, inputs):
    cast = copy.deepcopy(model)
    cast.zero_grad()
    if dtype is not None:
        cast = cast.to(dtype)
    (cast(*inputs) / MICRO_BATCHES).backward()
    return [None if p.grad is None else p.grad for p in cast.parameters()]


def evaluation():
    whole = make("transformer")
    parallel = FullyShardedDataParallel(make("transformer", seed=dist.get_rank()))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(parallel(*batch(0, 0, 0)), whole(*batch(0, 0, 0)))


def small():
    """Vectors stay whole, matrices become slices of half the elements."""
    module = make("transformer")
    matrices = sum(p.numel() for p in module.parameters() if p.ndim >= 2)
    vectors = sum(p.numel() for p in module.parameters() if p.ndim < 2)
    parallel = FullyShardedDataParallel(module)
    elements = [p.numel() for p in parallel.parameters() if p.ndim >= 2]
    assert matrices / 2 <= sum(elements) <= matrices / 2 + len(elements)
    assert sum(p.numel() for p in parallel.parameters() if p.ndim < 2) == vectors


def prefetch():
    """From the second step on, all but the first weight are on their way before they are read."""
    parallel = FullyShardedDataParallel(make("transformer"))
    waits = []
    original = parallel._units[0].__class__.start_gather

    def counting(unit, dtype):
        waits.append(unit)
        return original(unit, dtype)

    read = parallel.materialise
    late = []

    def reading(unit):
        before = len(waits)
        coming = unit in parallel._coming or any(held is unit for held, _ in parallel._held)
        flat = read(unit)
        late.append(not coming and len(waits) > before)
        return flat

    parallel.materialise = reading
    for unit in parallel._units:
        unit.start_gather = counting.__get__(unit)
    for _ in range(2):
        late.clear()
        parallel(*batch(0, 0, 0)).backward()
        parallel.finish_gradient_synchronization()
    assert late[0]
    assert sum(late) == 1, late


def frees():
    """Whole weights that are alive at any read are a few, not all."""
    spec = ModelSpec.preset(
        "nano", vocab_size=7, context_length=5, positions="learned", num_layers=6
    )
    parallel = FullyShardedDataParallel(TransformerLM(spec))
    storages, alive = [], []
    for unit in parallel._units:
        unit.start_gather = functools.partial(noting, unit.start_gather, storages)
    read = parallel.materialise

    def reading(unit):
        # The list itself is one of the users.
        alive.append(sum(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in storages))
        return read(unit)

    parallel.materialise = reading
    for _ in range(2):
        parallel(*batch(0, 0, 0)).backward()
        parallel.finish_gradient_synchronization()
    assert len(storages) > 1.4 * len(parallel._units)
    assert max(alive) <= HELD + PREFETCHED + 1 < len(parallel._units) / 2, alive


def noting(start_gather, storages, dtype):
    work, flat = start_gather(dtype)
    storages.append(flat.untyped_storage())
    return work, flat


def trained():
    parallel = FullyShardedDataParallel(make("transformer"))
    optimizer = optimizer_of(torch.optim.AdamW, parallel.parameters())
    parallel(*batch(0, 0, 0)).backward()
    parallel.finish_gradient_synchronization()
    return parallel, optimizer


def whole_state():
    """Rank 0 alone has the state; meanwhile no rank holds more than one gathered weight, and one
    more of the next.
    """
    parallel, optimizer = trained()
    optimizer.step()
    expected = parallel.full_parameters()
    before, held = tensor_bytes(), []
    for unit in parallel._units:
        unit._start = functools.partial(noting_bytes, unit._start, held)
    state = parallel.full_state(optimizer)
    assert len(held) == 3 * len(parallel._units)
    if dist.get_rank() > 0:
        assert state == {}
        assert max(held) - before <= max(4 * unit.plan.elements for unit in parallel._units), (
            held,
            before,
        )
        return
    assert list(state["model"]) == list(expected)
    assert all(torch.equal(state["model"][name], weight) for name, weight in expected.items())
    assert all(
        values["exp_avg"].shape == expected[name].shape
        for name, values in state["optimizer"]["state"].items()
    )


def noting_bytes(start, held, slice_):
    work, flat = start(slice_)
    held.append(tensor_bytes())
    return work, flat


def tensor_bytes():
    gc.collect()
    tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def synchronises_twice():
    torch.manual_seed(0)
    parallel = FullyShardedDataParallel(nn.Linear(64, 64))
    parallel(torch.randn(4, 64) * (1 + dist.get_rank())).square().sum().backward()
    parallel.finish_gradient_synchronization()
    once = [parameter.grad.clone() for parameter in parallel.parameters()]
    parallel.finish_gradient_synchronization()
    return all(
        torch.equal(p.grad, before) for p, before in zip(parallel.parameters(), once, strict=True)
    )


def trained_later():
    """A vector that was frozen when it was wrapped is averaged once it has gradients."""
    module = nn.Linear(4, 4)
    module.bias.requires_grad_(False)
    parallel = FullyShardedDataParallel(module)
    module.bias.requires_grad_(True)
    parallel(torch.ones(2, 4) * (1 + dist.get_rank())).square().sum().backward()
    parallel.finish_gradient_synchronization()
    everyones = [torch.empty(4) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, module.bias.grad)
    assert torch.equal(everyones[0], everyones[1])


def save(folder):
    parallel, optimizer = trained()
    optimizer.step()
    state_dict_saver.save(parallel.sharded_state_dict(optimizer.state), checkpoint_id=folder)
    # One more step, that the loaded ones have to repeat.
    step_with_ones(parallel, optimizer)
    return parallel.full_parameters()


def load(folder):
    parallel, optimizer = trained()
    optimizer.step()  # so that there is state to load into
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    state = parallel.sharded_state_dict(optimizer.state)
    state_dict_loader.load(state, checkpoint_id=folder)
    step_with_ones(parallel, optimizer)
    return parallel.full_parameters()


def step_with_ones(parallel, optimizer):
    for parameter in parallel.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


CHECKS = {
    "evaluation": evaluation,
    "small": small,
    "prefetch": prefetch,
    "frees": frees,
    "whole state": whole_state,
    "trained later": trained_later,
}
