"""Behaviours: users freeze, write, copy, save and load weights."""

import copy
import functools
import gc
import io

import torch
import torch.distributed as dist
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import Training, batch, whole
from torch import nn
from torch.optim.swa_utils import AveragedModel

from stepgauge.kernels.adamw import FusedAdamW

FROZEN = ("blocks.0.linear.weight", "blocks.1.linear.bias", "head.weight")


def _freeze(module, frozen=True):
    for name in FROZEN:
        module.get_parameter(name).requires_grad_(not frozen)
    return module


def frozen_before_wrapping(setup):
    t = Training(setup, _freeze(Net()))
    t.train(0, 1)
    return t.results()


def frozen_after_a_step(setup):
    t = Training(setup, Net())
    t.train(0)
    _freeze(t.inner)
    t.train(1, 2)
    return t.results()


def unfrozen_after_a_step(setup):
    t = Training(setup, _freeze(Net()))
    t.train(0)
    _freeze(t.inner, False)
    t.train(1, 2)
    return t.results()


def some_weights_frozen_and_as_many_unfrozen(setup):
    t = Training(setup, _freeze(Net()))
    t.train(0)
    _freeze(t.inner, False)
    t.inner.blocks[2].linear.requires_grad_(False)
    t.inner.blocks[2].gain.requires_grad_(False)
    t.inner.blocks[0].gain.requires_grad_(False)
    t.train(1, 2)
    return t.results()


def frozen_between_backward_and_step(setup):
    t = Training(setup, Net())
    t.train(0)
    t.backward(1)
    _freeze(t.inner)
    t.step()
    t.train(2)
    return t.results()


def frozen_between_no_sync_and_backward(setup):
    t = Training(setup, Net())
    with t.parallel.no_sync():
        t.backward(0)
    _freeze(t.inner)
    t.backward(1)
    norm = t.gradient_norm()
    t.step()
    return t.results() | {"norm": norm}


def frozen_between_forward_and_no_sync(setup):
    t = Training(setup, Net())
    losses = [t.loss(step, rank) for step in range(2) for rank in setup.batches]
    _freeze(t.inner)
    half = len(setup.batches)
    with t.parallel.no_sync():
        (sum(losses[:half]) / half).backward()
    (sum(losses[half:]) / half).backward()
    t.step()
    return t.results()


def frozen_between_forward_and_backward(setup):
    t = Training(setup, Net())
    losses = [t.loss(0, rank) / len(setup.batches) for rank in setup.batches]
    _freeze(t.inner)
    for loss in losses:
        loss.backward()
    t.step()
    return t.results()


def frozen_with_a_gradient_and_stepped_twice(setup):
    t = Training(setup, Net())
    t.backward(0)
    _freeze(t.inner)
    t.step()
    t.step()
    return t.results()


def dropped_layer_after_a_step(setup):
    """Weight decay and momentum do not change weights that no rank used in a step."""
    t = Training(setup, Net())
    t.train(0)
    t.train(1, blocks=(0, 2))
    t.train(2, blocks=(1,))
    t.train(3)
    return t.results()


def a_layer_that_is_never_used(setup):
    t = Training(setup, Net())
    t.train(0, 1, blocks=(0, 1))
    return t.results()


def a_layer_that_only_one_rank_uses(setup):
    if setup.wrapper in ("zero3", "torch-fsdp"):  # all ranks must gather the same weights
        return None
    t = Training(setup, Net())
    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step, lambda s, r: t.loss(s, r, blocks=(0, 1, 2) if r else (0, 2)))
        t.step()
    return t.results()


def experts_that_differ_by_rank(setup):
    t = Training(setup, Net())
    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step, lambda s, r: t.loss(s, r, expert=(s + r) % 2))
        t.step()
    return t.results()


def an_expert_that_no_rank_uses_any_more(setup):
    t = Training(setup, Net())
    for step, expert in enumerate((0, 1, 0, 0)):
        t.train(step, expert=expert)
    return t.results()


def written_in_place(setup):
    t = Training(setup, Net())
    t.train(0)
    with torch.no_grad():
        for parameter in t.inner.parameters():
            parameter.mul_(0.9)
    t.train(1)
    return t.results()


def clamped_after_each_step(setup):
    t = Training(setup, Net())
    for step in range(2):
        t.train(step)
        for parameter in t.inner.parameters():
            parameter.data.clamp_(-0.2, 0.2)
    return t.results()


def weight_data_set_to_another_tensor(setup):
    t = Training(setup, Net())
    t.train(0)
    for parameter in t.inner.parameters():
        parameter.data = parameter.data * 0.9
    t.train(1)
    return t.results()


def initialised_after_wrapping(setup):
    t = Training(setup, Net())
    nn.init.constant_(t.parameter("head.weight"), 0.25)
    nn.init.zeros_(t.parameter("blocks.1.linear.bias"))
    nn.init.ones_(t.parameter("blocks.0.linear.weight"))
    t.train(0)
    return t.results()


def written_between_backward_and_step(setup):
    t = Training(setup, Net())
    t.backward(0)
    with torch.no_grad():
        t.parameter("blocks.2.linear.weight").fill_(0.125)
    t.step()
    return t.results()


def written_after_an_evaluation(setup):
    t = Training(setup, Net())
    t.train(0)
    with torch.no_grad():
        t.loss(0, 0)
        t.parameter("embedding.weight").mul_(2)
        t.parameter("blocks.0.linear.weight").mul_(2)
        after = t.loss(0, 0)
    t.train(1)
    return t.results() | {"after": whole(after)}


def pretrained_weights_loaded_into_the_module(setup):
    t = Training(setup, Net())
    t.train(0)
    t.inner.load_state_dict(Net(seed=5).state_dict())
    t.train(1)
    return t.results()


def weights_assigned_by_load_state_dict(setup):
    """The module then has new parameters and a new optimizer. The first step skips a block."""
    t = Training(setup, Net())
    t.inner.load_state_dict(Net(seed=5).state_dict(), assign=True)
    t.optimizer = torch.optim.SGD(t.inner.parameters(), lr=0.1)
    t.train(0, blocks=(0, 2))
    t.train(1)
    return t.results()


def functional_call_with_other_weights(setup):
    """Calls the module with torch.func.functional_call, after another module was built."""
    t = Training(setup, Net())
    t.train(0)
    Net()
    others = {name: p.detach() * 0.5 for name, p in t.module.named_parameters()}
    with torch.no_grad():
        found = torch.func.functional_call(t.module, others, batch(4, 0))
    t.train(1)
    return t.results() | {"found": found}


def functional_call_with_computed_weights(setup):
    """Passes functional_call weights computed from the module's own, which get the gradients."""
    t = Training(setup, Net())

    def loss(step, rank):
        halves = {name: p * 0.5 for name, p in t.module.named_parameters()}
        return torch.func.functional_call(t.module, halves, batch(step, rank)).square().mean()

    t.backward(0, loss)
    t.step()
    return t.results()


def attributes_of_a_weight(setup):
    """For example, a mark for weights without weight decay."""
    network = Net()
    network.head.weight.does_not_decay = True
    module = Training(setup, network).inner
    found = [n for n, p in module.named_parameters() if getattr(p, "does_not_decay", False)]
    assert found == ["head.weight"], found
    return {}


class Listing(nn.Module):
    """Keeps its weight in a plain list too, where a wrapper does not find it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 6).double()
        self.listed = [self.linear.weight]

    def forward(self, x):
        return torch.tanh(x @ self.listed[0] + self.linear.bias)


def a_weight_that_the_module_keeps_in_a_list(setup):
    t = Training(setup, Listing())
    t.train(0, 1)
    return t.results()


def an_optimizer_built_before_wrapping(setup):
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    t = Training(setup, network)
    if setup.wrapper == "zero2":
        return None
    t.optimizer = optimizer
    t.train(0, 1)
    return t.results()


def _wrapped_on_meta(setup):
    """Wraps a module on the meta device, then allocates it; one process builds it on the CPU."""
    with torch.device("cpu" if setup.wrapper == "none" else "meta"):
        module = Net()
    t = Training(setup, module)
    t.inner.to_empty(device="cpu")
    return t


def built_on_the_meta_device_and_loaded(setup):
    t = _wrapped_on_meta(setup)
    t.inner.load_state_dict(Net().state_dict())
    t.train(0, 1)
    return t.results()


def built_on_the_meta_device_and_initialised(setup):
    t = _wrapped_on_meta(setup)
    for name, parameter in t.inner.named_parameters():
        nn.init.constant_(parameter, 0.01 * len(name))
    t.train(0, 1)
    return t.results()


def own_state_dict_loaded_back(setup):
    t = Training(setup, Net())
    t.train(0)
    before = {name: value.detach().clone() for name, value in t.inner.state_dict().items()}
    t.train(1)
    t.inner.load_state_dict(before)
    t.train(2)
    return t.results()


def _when_a_block_ends(t, act, *, backward):
    """Calls `act` once when the middle block ends: in the first forward, or in the last backward of a
    step. In one process a step has a backward for the batch of each rank.
    """
    calls, number = [], len(t.setup.batches) if backward else 1

    def once(*_):
        calls.append(None)
        if len(calls) == number:
            act()

    block = t.inner.blocks[1]
    if backward:
        block.register_forward_pre_hook(lambda module, given: given[0].register_hook(once) and None)
    else:
        block.register_forward_hook(once)


def _state_read(setup, **where):
    """Copies the values of the state dict at once, because its tensors may change later."""
    t, seen = Training(setup, Net()), {}

    def read():
        seen.update({f"seen {name}": whole(w) for name, w in t.inner.state_dict().items()})

    t.train(0)
    _when_a_block_ends(t, read, **where)
    t.train(1)
    return t.results() | seen


def state_dict_read_in_a_forward(setup):
    return _state_read(setup, backward=False)


def state_dict_read_in_a_backward(setup):
    return _state_read(setup, backward=True)


def state_dict_kept_from_a_backward(setup):
    """The state dict is kept, as for a checkpoint that is written later. Steps change its tensors in
    place, as they change the weights.
    """
    t, kept = Training(setup, Net()), {}
    _when_a_block_ends(t, lambda: kept.update(t.inner.state_dict()), backward=True)
    t.train(0, 1)
    return t.results() | {f"kept {name}": whole(weight) for name, weight in kept.items()}


def _loaded(setup, loaded, **where):
    t, given = Training(setup, Net()), Net(seed=9).state_dict()
    part = {name: value for name, value in given.items() if name.startswith(loaded)}
    t.train(0)
    _when_a_block_ends(t, lambda: t.inner.load_state_dict(part, strict=False), **where)
    t.train(1)
    return t.results()


def weights_loaded_in_a_forward(setup):
    """Loads the weights of the last block while the middle block's forward ends."""
    return _loaded(setup, "blocks.2", backward=False)


def weights_loaded_in_a_backward(setup):
    """Loads the weights of a block whose backward has ended."""
    return _loaded(setup, "blocks.2", backward=True)


def head_weights_loaded_in_a_backward(setup):
    return _loaded(setup, "head", backward=True)


def head_weights_written_in_a_backward(setup):
    def write():
        with torch.no_grad():
            t.inner.head.weight.mul_(0.5)

    t = Training(setup, Net())
    t.train(0)
    _when_a_block_ends(t, write, backward=True)
    t.train(1)
    return t.results()


def names_of_the_state_dict(setup):
    t = Training(setup, Net())
    state = t.inner.state_dict()
    assert list(state) == list(Net().state_dict()), list(state)
    return {name: whole(value) for name, value in state.items()}


def saved_and_loaded_by_torch_save(setup):
    t = Training(setup, Net())
    t.train(0)
    file = io.BytesIO()
    torch.save(t.inner.state_dict(), file)
    t.train(1)
    file.seek(0)
    t.inner.load_state_dict(torch.load(file, weights_only=False))
    return t.results()


def _saved(t):
    """Returns the state on rank 0, to all ranks."""
    state = [copy.deepcopy(t.parallel.state())]
    if t.setup.wrapper != "none":
        dist.broadcast_object_list(state, group=t.setup.group, group_src=0)
    return state[0]


def _resumed(setup, optimizer, **how):
    t = Training(setup, Net(), optimizer)
    t.train(0, 1, **how)
    state = _saved(t)
    t.train(2)
    fresh = Training(setup, Net(seed=3), optimizer)
    fresh.parallel.load(state)
    fresh.train(3)
    return fresh.results()


def loaded_between_backward_and_step(setup):
    adamw = functools.partial(torch.optim.AdamW, lr=0.05)
    t = Training(setup, Net(), adamw)
    t.train(0, 1)
    state = _saved(t)
    fresh = Training(setup, Net(seed=3), adamw)
    fresh.backward(2)
    gradients = {p: p.grad for p in fresh.inner.parameters()}
    # torch's loading ignores the state if there are gradients, so the oracle removes them first.
    if setup.wrapper == "none":
        fresh.optimizer.zero_grad()
    fresh.parallel.load(state)
    for parameter, gradient in gradients.items() if setup.wrapper == "none" else ():
        parameter.grad = gradient
    fresh.step()
    return fresh.results()


def resumed(setup):
    return _resumed(setup, functools.partial(torch.optim.AdamW, lr=0.05))


def resumed_with_a_layer_that_was_never_used(setup):
    return _resumed(setup, functools.partial(torch.optim.AdamW, lr=0.05), blocks=(1, 2))


def optimizer_state_in_a_wider_dtype_than_its_weights(setup):
    """float32 master weights of bfloat16 weights are loaded without rounding."""
    optimizer = functools.partial(FusedAdamW, lr=0.05, master_weights=True)
    t = Training(setup, Net().bfloat16(), optimizer)
    t.train(0, loss=lambda step, rank: t.module(batch(step, rank).bfloat16()).square().mean())
    state = _saved(t)
    fresh = Training(setup, Net(seed=3).bfloat16(), optimizer)
    fresh.parallel.load(copy.deepcopy(state))
    loaded, saved = _saved(fresh)["optimizer"]["state"], state["optimizer"]["state"]
    for name, values in saved.items():
        for key, value in values.items():
            assert torch.equal(loaded[name][key], value), (name, key, loaded[name][key].dtype)
    assert any("master_param" in values for values in saved.values())
    return {}


def one_state_loaded_into_two_models(setup):
    """Two networks loaded from the same state are trained separately."""
    adamw = functools.partial(torch.optim.AdamW, lr=0.05)
    t = Training(setup, Net(), adamw)
    t.train(0)
    state = _saved(t)
    first, second = (Training(setup, Net(seed=3), adamw) for _ in range(2))
    for each in (first, second):
        each.parallel.load(copy.deepcopy(state) if setup.wrapper == "none" else state)
    first.train(1, 2)
    second.train(3)
    return second.results()


def saved_before_the_first_step(setup):
    """Saving has no effect on training: the first step has no momentum yet."""
    t = Training(setup, Net())
    if setup.wrapper != "none":
        t.parallel.state()
    t.train(0, 1)
    return t.results()


def a_deep_copy_as_average_of_weights(setup):
    t = Training(setup, Net())
    average = copy.deepcopy(t.module).requires_grad_(False)
    for step in range(2):
        t.train(step)
        with torch.no_grad():
            for mean, weight in zip(average.parameters(), t.module.parameters(), strict=True):
                mean.lerp_(weight, 0.25)
    with torch.no_grad():
        seen = average(torch.ones(2, 6, dtype=torch.float64))
    means = {str(index): whole(mean) for index, mean in enumerate(average.parameters())}
    return t.results() | means | {"seen": whole(seen)}


def averaged_model_of_torch(setup):
    t = Training(setup, Net())
    average = AveragedModel(t.module)
    for step in range(2):
        t.train(step)
        average.update_parameters(t.module)
    with torch.no_grad():
        seen = average(torch.ones(2, 6, dtype=torch.float64))
    return t.results() | {"seen": whole(seen)}


def a_deep_copy_that_is_trained(setup):
    """The copy is a separate wrapper: training it does not change the original."""
    if setup.wrapper == "zero2":  # works only with its own optimizer
        return None
    t = Training(setup, Net())
    t.train(0)
    other = copy.deepcopy(t.module)
    stepping = torch.optim.SGD(other.parameters(), lr=0.1)
    for rank in setup.batches:
        loss = other(torch.full((2, 6), 1.0 + rank, dtype=torch.float64)).square().mean()
        (loss / len(setup.batches)).backward()
    stepping.step()
    trained = {f"copy {i}": whole(p) for i, p in enumerate(other.parameters())}
    return t.results() | trained


def pickled(setup):
    t = Training(setup, Net())
    t.train(0)
    file = io.BytesIO()
    torch.save(t.module, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    with torch.no_grad():
        return {"seen": whole(other(torch.ones(2, 6, dtype=torch.float64)))}


def read_between_backward_and_step(setup):
    t = Training(setup, Net())
    t.backward(0)
    norms = {n: whole(p.norm()) for n, p in t.inner.named_parameters()}
    t.optimizer.step()
    after = {f"after {n}": whole(p.norm()) for n, p in t.inner.named_parameters()}
    return norms | after


def evaluated_between_steps(setup):
    t = Training(setup, Net())
    t.train(0)
    t.module.eval()
    with torch.no_grad():
        seen = whole(t.loss(1, 0))
    t.module.train()
    t.train(1)
    with torch.inference_mode():
        again = t.loss(2, 0).item()
    t.train(2)
    return t.results() | {"seen": seen, "again": torch.tensor(again)}


def evaluated_between_backward_and_step(setup):
    t = Training(setup, Net())
    t.backward(0)
    with torch.no_grad():
        seen = whole(t.loss(1, 0))
    t.step()
    return t.results() | {"seen": seen}


def a_parameter_replaced_after_wrapping(setup):
    t = Training(setup, Net())
    torch.manual_seed(9)
    t.inner.head = nn.Linear(6, 5).double()
    t.optimizer.add_param_group({"params": [*t.inner.head.parameters()]})
    t.train(0, 1)
    return t.results()


def wrapped_again(setup):
    module = Net()
    Training(setup, module).train(0)
    if setup.wrapper in ("zero3", "torch-fsdp"):
        return None
    t = Training(setup, module)
    t.train(1)
    return t.results()


def wrapped_a_second_time_temporarily(setup):
    module = Net()
    t = Training(setup, module)
    t.train(0)
    if setup.wrapper in ("zero3", "torch-fsdp"):
        return None
    Training(setup, module).backward(1)
    gc.collect()
    t.train(2)
    return t.results()


def a_weight_in_two_wrapped_modules(setup):
    first, second = Net(), Net(1)
    second.blocks[0].linear.weight = first.blocks[0].linear.weight
    shared = ("blocks.0.linear.weight",)
    t = Training(setup, first)
    other = Training(
        setup,
        second,
        groups=lambda m: [{"params": [p for n, p in m.named_parameters() if n not in shared]}],
    )
    for step in range(3):
        t.module.zero_grad()
        other.module.zero_grad()
        t.backward(step, lambda *at: t.loss(*at) + other.loss(*at))
        t.step()
        other.step()
    return t.results() | {f"other {name}": value for name, value in other.results().items()}
