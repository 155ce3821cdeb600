"""Tests the fully sharded wrapper: parity with one process, memory of whole weights, checkpoints."""

import contextlib
import copy
import dataclasses
import datetime
import functools
import types

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import MICRO_BATCHES, STEPS, Toy, batch, small_bert
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from stepgauge.models.checkpointing import by_plan
from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.data_parallel import BucketedDataParallel
from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.parallel.fsdp.call_order import CallOrder
from stepgauge.parallel.fsdp.flat_gradients import pack
from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.sharded_unit import ShardedUnit
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit
from stepgauge.runtime.launch import launch
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.recompute import RecomputePlan

CLIP = 0.5


def transformer(num_layers=2):
    spec = ModelSpec.preset(
        "nano", vocab_size=7, context_length=5, positions="learned", num_layers=num_layers
    )
    return TransformerLM(spec)


NETWORKS = {"toy": Toy, "transformer": transformer, "bert": small_bert}


def make(name, seed=0):
    torch.manual_seed(seed)
    return NETWORKS[name]()


CASES = [
    (network, optimizer, dtype, clips)
    for network in NETWORKS
    for optimizer, dtype, clips in (
        (torch.optim.SGD, None, False),
        (torch.optim.AdamW, None, True),
        (torch.optim.SGD, torch.bfloat16, False),
        (torch.optim.SGD, torch.float16, False),
    )
    # Not in 16 bits: the toy's buffer has another dtype, and BERT's tied weight has two gradients, which
    # are rounded separately.
    if dtype is None or network == "transformer"
    # Not with AdamW: the softmax cancels BERT's key biases, so their gradients are rounding errors, which
    # AdamW would turn into whole steps.
    if optimizer is torch.optim.SGD or network != "bert"
]


def test_padding_is_sent_as_zeros():
    """Uninitialised memory may contain NaN, which NCCL's checks would report."""
    whole = torch.full((4, 6 + 1), torch.nan)
    pack([torch.ones(5, 3), torch.ones(0, 3), torch.full((3,), 2.0)], whole)
    matrix, vector = whole.split([6, 1], dim=1)
    assert matrix.reshape(8, 3).sum(1).tolist() == [3.0] * 5 + [0.0] * 3
    assert vector.flatten().tolist() == [2.0, 2.0, 2.0, 0.0]


def test_training_equals_one_process(two_ranks):
    for case in CASES:
        worst = max(rank[case] for rank in two_ranks)
        assert worst < (1e-6 if case[2] is None else 1e-4), case


def test_on_two_ranks(two_ranks):
    checks = [name for name in CHECKS if name not in ("order", "scalar")]
    assert [(c, rank[c]) for rank in two_ranks for c in checks if rank[c]] == []


def test_ranks_that_call_different_blocks_raise(two_ranks):
    calls = [f"rank {rank} calls {rank} after [the module]" for rank in range(2)]
    for rank, found in enumerate(two_ranks):
        assert f"{calls[rank]}, {calls[1 - rank]}" in found["order"]


def test_a_rank_that_changes_its_order_alone_raises():
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=0.2))
    group = types.SimpleNamespace(
        group_name="two", get_group_store=lambda: store, rank=lambda: 1, size=lambda: 2
    )
    message = r"rank 1 calls 2 after \[0\], rank 0 has kept to the order of the previous forward"
    with pytest.raises(RuntimeError, match=message):
        CallOrder(group).require_same(["0"], "2")


def test_a_parameter_without_dimensions_is_refused(two_ranks):
    assert all(rank["scalar"].startswith("scale has no dimensions") for rank in two_ranks)


def test_a_checkpoint_of_two_ranks_loads_on_three(tmp_path):
    (expected, _) = launch(save, str(tmp_path), ranks=2)
    for weights in launch(load, str(tmp_path), ranks=3):
        assert set(weights) == set(expected)
        for name in expected:
            assert torch.allclose(weights[name], expected[name], atol=1e-7), name


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
        except (AssertionError, StopIteration) as error:
            found[name] = str(error) or "failed"
    return found


def optimizer_of(kind, parameters):
    return kind(
        [p for p in parameters if p.requires_grad], lr=0.25 if kind is torch.optim.SGD else 0.01
    )


def whole(module):
    return {name: p.detach().full_tensor() for name, p in module.named_parameters()}


def difference_from_one_process(network, optimizer, dtype, clips):
    weights = train_alone(network, optimizer, dtype, clips)
    parallel = FullyShardedDataParallel(make(network, seed=dist.get_rank()), dtype)
    built = optimizer_of(optimizer, parallel.parameters())
    for step in range(STEPS):
        built.zero_grad()
        for micro in range(MICRO_BATCHES):
            (parallel(*batch(step, micro, dist.get_rank())) / MICRO_BATCHES).backward()
        if clips:
            parallel.clip_gradients(CLIP)
        built.step()
    full = whole(parallel.module)
    assert list(full) == list(weights)
    return max((full[name] - weights[name]).abs().max().item() for name in weights)


def train_alone(network, optimizer, dtype, clips):
    """Trains in one process on the batches of both ranks. It computes the means as ranks do, and casts
    where the wrapper casts.
    """
    model = make(network)
    built = optimizer_of(optimizer, model.parameters())
    for step in range(STEPS):
        built.zero_grad()
        for micro in range(MICRO_BATCHES):
            parts = [gradients_of(model, dtype, batch(step, micro, rank)) for rank in range(2)]
            for parameter, first, second in zip(model.parameters(), *parts, strict=True):
                if first is None:
                    continue
                mean = (first / 2 + second / 2).to(parameter.dtype)
                parameter.grad = mean if parameter.grad is None else parameter.grad + mean
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        built.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def gradients_of(model, dtype, inputs):
    cast = copy.deepcopy(model)
    cast.zero_grad()
    if dtype is not None:
        cast = cast.to(dtype)
    (cast(*inputs) / MICRO_BATCHES).backward()
    return [None if p.grad is None else p.grad for p in cast.parameters()]


def parameters_are_shards():
    """Each of two ranks has half the elements, and the module's parameters are DTensors."""
    module = transformer()
    elements = sum(p.numel() for p in module.parameters())
    parallel = FullyShardedDataParallel(module)
    assert all(isinstance(p, DTensor) for p in module.parameters())
    own = sum(p.to_local().numel() for p in parallel.parameters())
    assert abs(own - elements / 2) <= 64 * len(list(module.parameters())), (own, elements)


def compiled_blocks():
    """Blocks that are compiled separately and checkpoint themselves have the same gradients."""
    gradients = []
    for plan in (None, RecomputePlan(2, feed_forward=1, selective=1)):
        torch.manual_seed(0)
        module = transformer()
        if plan is not None:
            module.through_blocks = functools.partial(by_plan, plan=plan, compiled_blocks=True)
            for block in module.blocks:
                block.compile(backend="aot_eager")
        FullyShardedDataParallel(module)(*batch(0, 0, dist.get_rank())).backward()
        gradients.append([p.grad.full_tensor() for p in module.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def prefetches():
    """From the second step on, weights are gathered while another unit computes."""
    late = []
    with noting(late):
        parallel = FullyShardedDataParallel(transformer(4))
        for _ in range(2):
            late.clear()
            parallel(*batch(0, 0, 0)).backward()
    # The root and the first block in forward. The last block is whole when backward begins.
    assert len(late) == 8 and sum(late) <= 2, late


@contextlib.contextmanager
def noting(late):
    """Appends, for each gather that is waited for, True if nothing was computed since its start."""
    start, wait, after, reduce = (
        UnshardedUnit.unshard,
        UnshardedUnit.wait,
        ShardedUnit.after_forward,
        GradientReductions.reduce,
    )
    computed, started = [0], {}

    def noting_start(gathered):
        if not gathered.is_unsharded:
            started[gathered] = computed[0]
        start(gathered)

    def noting_wait(gathered):
        if gathered._works:
            late.append(started[gathered] == computed[0])
        wait(gathered)

    def noting_after(*call):
        computed[0] += 1
        return after(*call)

    def noting_reduce(*call):
        computed[0] += 1
        return reduce(*call)

    UnshardedUnit.unshard, UnshardedUnit.wait = noting_start, noting_wait
    ShardedUnit.after_forward, GradientReductions.reduce = noting_after, noting_reduce
    try:
        yield
    finally:
        UnshardedUnit.unshard, UnshardedUnit.wait = start, wait
        ShardedUnit.after_forward, GradientReductions.reduce = after, reduce


def allocates_each_buffer_once():
    """Resizing a storage to its own size allocates it again and, on a GPU, copies it."""
    resize, sizes = torch.UntypedStorage.resize_, []

    def noting_resize(storage, size):
        sizes.append((storage.nbytes(), size))
        return resize(storage, size)

    torch.UntypedStorage.resize_ = noting_resize
    try:
        parallel = FullyShardedDataParallel(transformer())
        for _ in range(2):
            parallel(*batch(0, 0, 0)).backward()
    finally:
        torch.UntypedStorage.resize_ = resize
    assert sizes
    assert all(before != after for before, after in sizes if after), sizes


def frees_weights():
    """Few units are whole at any time, and none after a step."""
    assert most_alive(FullyShardedDataParallel(transformer(6))) <= 4


def frees_frozen_weights():
    """The same holds if most weights are frozen, as with adapters."""
    module = transformer(6)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("norm" in name)
    assert most_alive(FullyShardedDataParallel(module)) <= 4


def most_alive(parallel):
    """Returns the most units that are whole at once in two steps; raises if one stays whole."""
    alive, most, start, free = set(), [0], UnshardedUnit.unshard, UnshardedUnit.reshard

    def noting_start(gathered):
        alive.add(gathered)
        most[0] = max(most[0], len(alive))
        start(gathered)

    def noting_free(gathered):
        alive.discard(gathered)
        free(gathered)

    UnshardedUnit.unshard, UnshardedUnit.reshard = noting_start, noting_free
    try:
        for _ in range(2):
            loss = parallel(*batch(0, 0, 0))
            loss.backward()
            assert not alive, [gathered.unit.name for gathered in alive]
    finally:
        UnshardedUnit.unshard, UnshardedUnit.reshard = start, free
    return most[0]


def different_orders():
    parallel = FullyShardedDataParallel(Ordered())
    try:
        parallel([0, 1, 2] if dist.get_rank() == 0 else [1, 0, 2])
        return "accepted"
    except RuntimeError as error:
        return str(error)


class Ordered(nn.Sequential):
    def __init__(self):
        super().__init__(*(nn.Linear(4, 4) for _ in range(3)))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, order):
        x = self.scale
        for place in order:
            x = self[place](x)
        return x


def scalar_parameter():
    module = nn.Linear(2, 2)
    module.scale = nn.Parameter(torch.tensor(1.0))
    try:
        FullyShardedDataParallel(module)
        return "accepted"
    except ValueError as error:
        return str(error)


def trained():
    torch.manual_seed(0)
    parallel = FullyShardedDataParallel(transformer())
    optimizer = optimizer_of(torch.optim.AdamW, parallel.parameters())
    parallel(*batch(0, 0, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return parallel, optimizer


def one_more_step(parallel, optimizer):
    parallel(*batch(1, 0, 0)).backward()  # the same on every rank
    optimizer.step()
    return whole(parallel.module)


def save(folder):
    parallel, optimizer = trained()
    model, state = get_state_dict(parallel.module, optimizer)
    state_dict_saver.save({"model": model, "optimizer": state}, checkpoint_id=folder)
    return one_more_step(parallel, optimizer)


def load(folder):
    parallel, optimizer = trained()
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.zero_()
    model, state = get_state_dict(parallel.module, optimizer)
    state_dict_loader.load({"model": model, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(parallel.module, optimizer, model_state_dict=model, optim_state_dict=state)
    return one_more_step(parallel, optimizer)


class Levels(nn.Module):
    """Has integers that bfloat16 cannot represent, and trainable complex weights."""

    def __init__(self):
        super().__init__()
        self.levels = nn.Parameter(torch.arange(1000, 1008, dtype=torch.int32), requires_grad=False)
        self.angles = nn.Parameter(torch.polar(torch.ones(8), torch.arange(8.0)))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        assert self.scale.dtype is x.dtype
        assert self.levels.tolist() == [*range(1000, 1008)], self.levels.tolist()
        return (self.angles.abs() * self.scale.float() * self.levels).sum()


def only_floating_dtypes_are_cast():
    parallel = FullyShardedDataParallel(Levels(), torch.bfloat16)
    parallel(torch.ones(8)).backward()
    gradient = parallel.module.angles.grad.full_tensor()
    expected = parallel.module.angles.full_tensor().detach() * torch.arange(1000, 1008)
    assert torch.allclose(gradient, expected, rtol=1e-5)


class UnusedLast(nn.Module):
    """Computes three blocks and returns the result of the second."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        second = self.blocks[1](self.blocks[0](x))
        self.blocks[2](second)
        return second


def frees_a_last_block_that_backward_does_not_reach():
    parallel = FullyShardedDataParallel(UnusedLast())
    for _ in range(3):
        parallel(torch.ones(2, 4)).sum().backward()
        require_none_is_whole(parallel)


def frees_after_part_of_a_backward():
    """A backward that does not reach all weights leaves none of them whole."""
    parallel = FullyShardedDataParallel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    x = torch.ones(2, 4, requires_grad=True)
    parallel.module[1].weight.requires_grad_(False)
    expected = None
    for _ in range(2):
        y = parallel(x).sum()
        (gradient,) = torch.autograd.grad(y, x, retain_graph=True)
        require_none_is_whole(parallel)
        y.backward(inputs=[parallel.module[2].bias])
        require_none_is_whole(parallel)
        y = parallel(x).sum()
        y.backward()
        require_none_is_whole(parallel)
        expected = x.grad if expected is None else expected
        assert torch.equal(gradient, expected)
        x.grad = None


def require_none_is_whole(parallel):
    kept = [unit.name for unit in parallel.residency._units if unit.unsharded is not None]
    assert not kept, kept


def two_groups():
    """Operations on sharded weights communicate over the group that these are sharded over."""
    for _ in range(2):
        group = dist.new_group()
        norm = FullyShardedDataParallel(Toy(), group=group).module.last.weight.norm()
        assert norm.device_mesh.get_group() is group, norm.device_mesh


def no_parameters():
    x = torch.ones(2, requires_grad=True)
    parallel = FullyShardedDataParallel(nn.ReLU())
    parallel(x).sum().backward()
    assert x.grad.tolist() == [1, 1]
    assert parallel.clip_gradients(1.0) == 0


@dataclasses.dataclass
class Output:
    out: torch.Tensor


class Exit(nn.Module):
    """Returns an object, and keeps a loss that backward reaches before the output."""

    def __init__(self):
        super().__init__()
        self.layer, self.exit = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        out = self.layer(x.out).tanh()
        self.loss = self.exit(out).square().mean()
        return Output(out)


def kept_losses():
    """Losses that blocks keep as attributes have correct gradients; the blocks return objects."""

    class Exits(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Exit() for _ in range(3))

        def forward(self, x):
            x = Output(x)
            for block in self.blocks:
                x = block(x)
            return Output(x.out.square().mean() + sum(block.loss for block in self.blocks))

    torch.manual_seed(0)
    alone = Exits()
    parallel = FullyShardedDataParallel(copy.deepcopy(alone))
    for _ in range(2):
        for model in (alone, parallel):
            model.zero_grad()
            model(torch.ones(2, 4)).out.backward()
        for name, parameter in alone.named_parameters():
            given = parallel.module.get_parameter(name).grad.full_tensor()
            assert torch.allclose(given, parameter.grad, atol=1e-6), name


def losses_kept_elsewhere():
    """Backward reaches such a loss before the block's weights are gathered, and must raise."""
    losses = []

    class Elsewhere(Exit):
        def forward(self, x):
            out = super().forward(x)
            losses.append(vars(self).pop("loss"))
            return out

    blocks = [Elsewhere() for _ in range(3)]
    parallel = FullyShardedDataParallel(nn.Sequential(*blocks))
    for _ in range(2):
        losses.clear()
        output = parallel(Output(torch.ones(2, 4))).out.square().mean()
        with pytest.raises(RuntimeError, match="modified"):
            (output + sum(losses)).backward()
        parallel.zero_grad()


def refusals():
    """Unsupported uses of sharded weights raise with a message that helps."""
    with pytest.raises(ValueError, match=r"^0 has max_norm"):
        FullyShardedDataParallel(nn.Sequential(nn.Embedding(3, 4, max_norm=1.0)))
    with pytest.raises(ValueError, match=r"^the module has max_norm"):
        BucketedDataParallel(nn.Embedding(3, 4, max_norm=1.0))
    late = nn.Linear(4, 4)
    late.forward = lambda x: (torch.ones(4) @ late.weight for _ in range(2))
    with pytest.raises(RuntimeError, match=r"^0 returns a generator"):
        FullyShardedDataParallel(nn.Sequential(late))(torch.ones(4))
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    parallel = FullyShardedDataParallel(tied)
    tied[1].weight = nn.Parameter(tied[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"^weight of a Linear was tied .* tie it again"):
        parallel(torch.ones(4))
    with torch.device("meta"):
        empty = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match=r"^weight of a Linear is on the meta .* to_empty"):
        empty(torch.ones(4))
    hooked = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)))
    loss = hooked(torch.ones(4)).sum()
    hooked.module[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(RuntimeError, match="register it before forward"):
        loss.backward()


def parts_are_called_alone():
    """A part of the module, such as the encoder in `generate`, needs whole weights."""
    torch.manual_seed(0)
    module, inputs = Toy(), batch(0, 0, dist.get_rank())
    expected = module.embedding(inputs[0]).detach()
    parallel = FullyShardedDataParallel(module)
    with pytest.raises(RuntimeError, match=r"^Embedding was called outside .*whole_weights\(\)"):
        module.embedding(inputs[0])
    for _ in range(2):  # also after a training step
        with parallel.whole_weights():
            part = module.embedding(inputs[0])
        assert torch.equal(part, expected) and not part.requires_grad
        assert all(isinstance(weight, DTensor) for weight in module.parameters())
        loss = parallel(*inputs)
        loss.backward()
    module.compile(backend="aot_eager")
    torch.testing.assert_close(parallel(*inputs), loss)


def other_weights():
    """A tensor in place of a weight is used or refused, but never ignored."""
    module = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    parallel, x = FullyShardedDataParallel(module), torch.ones(4)
    whole = {name: p.full_tensor().detach() for name, p in module.named_parameters()}

    def of_weights(weights):
        return torch.func.functional_call(module, weights, x).sum()

    for call in (of_weights, torch.func.grad(of_weights)):
        with pytest.raises(RuntimeError, match=r"^weight of a Linear is not sharded .*functional"):
            call(whole)
    expected = parallel(x).detach()
    doubled = module[1].weight.data * 2
    with torch.no_grad():
        module[1].weight.data.copy_(doubled)
    torch.testing.assert_close(parallel(x), 2 * expected)
    module.to(torch.bfloat16).to(torch.float32)
    rounded = copy.deepcopy(parallel)(x)
    torch.testing.assert_close(parallel(x), rounded)
    module.load_state_dict(whole)
    torch.testing.assert_close(parallel(x), expected)
    module[1].weight.data = doubled
    for each in (parallel, module):
        with pytest.raises(RuntimeError, match=r"^weight.data of a Linear was set .*copy_"):
            each(x)


CHECKS = {
    "other weights": other_weights,
    "kept losses": kept_losses,
    "losses kept elsewhere": losses_kept_elsewhere,
    "refusals": refusals,
    "parts called alone": parts_are_called_alone,
    "part of a backward": frees_after_part_of_a_backward,
    "unused last block": frees_a_last_block_that_backward_does_not_reach,
    "no parameters": no_parameters,
    "two groups of the same ranks": two_groups,
    "dtypes": only_floating_dtypes_are_cast,
    "parameters are shards": parameters_are_shards,
    "compiled blocks": compiled_blocks,
    "prefetches": prefetches,
    "fresh buffers": allocates_each_buffer_once,
    "frees weights": frees_weights,
    "frees frozen weights": frees_frozen_weights,
    "order": different_orders,
    "scalar": scalar_parameter,
}
