"""Behaviours: unusual modules, and unusual ways to call them."""

import functools

import torch
from tests.parallel.conformance.networks import (
    Attention,
    Complex,
    DictOutput,
    Lookup,
    MixedDtypes,
    Net,
    OddShapes,
    Parametrized,
    PartlyCheckpointed,
    Recurrent,
    Recursive,
    ReturnsInput,
    Scalar,
    SlotsOutput,
    Stack,
    Tied,
    WritesInput,
    call_checkpointed,
    call_checkpointed_reentrant,
    call_checkpointed_selectively,
)
from tests.parallel.conformance.training import Training, batch, whole
from torch import nn
from torch.utils.checkpoint import checkpoint


def _trained(setup, module, **how):
    t = Training(setup, module)
    t.train(0, 1, **how)
    return t.results()


def tied_weights(setup):
    return _trained(setup, Tied())


def blocks_used_twice(setup):
    return _trained(setup, Net(), blocks=(0, 1, 1, 0))


def mixed_dtypes(setup):
    return _trained(setup, MixedDtypes())


def complex_weights(setup):
    return _trained(setup, Complex())


def odd_shapes(setup):
    return _trained(setup, OddShapes())


def a_scalar_parameter(setup):
    return _trained(setup, Scalar())


def recurrent(setup):
    return _trained(setup, Recurrent())


def attention(setup):
    return _trained(setup, Attention())


def parametrized(setup):
    return _trained(setup, Parametrized())


def sparse_gradients(setup):
    return _trained(setup, Lookup(sparse=True))


def an_embedding_with_max_norm(setup):
    """The forward of such an embedding scales the rows that a batch looks up."""
    return _trained(setup, Lookup(max_norm=0.5))


def _checkpointed(setup, call_block):
    module = Net()
    module.call_block = call_block
    t = Training(setup, module)

    def loss(step, rank):
        x = batch(step, rank).requires_grad_()
        return t.module(x).square().mean()

    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, loss)
        t.step()
    return t.results()


def checkpointing(setup):
    return _checkpointed(setup, call_checkpointed)


def reentrant_checkpointing(setup):
    return _checkpointed(setup, call_checkpointed_reentrant)


def selective_checkpointing(setup):
    return _checkpointed(setup, call_checkpointed_selectively)


def checkpointing_within_blocks(setup):
    return _trained(setup, Stack(PartlyCheckpointed))


def reentrant_checkpointing_within_blocks(setup):
    return _trained(setup, Stack(functools.partial(PartlyCheckpointed, reentrant=True)))


def checkpointing_within_checkpointed_blocks(setup):
    call_layer = functools.partial(checkpoint, use_reentrant=False)
    return _trained(setup, Stack(PartlyCheckpointed, call_layer))


def checkpointing_of_all_blocks_together(setup):
    net = Net()
    module = nn.Sequential(net)
    module.forward = functools.partial(checkpoint, net, use_reentrant=False)
    return _trained(setup, module)


def blocks_that_write_their_input(setup):
    module = Stack(WritesInput)
    module.layers[1].gain.requires_grad_(False)
    return _trained(setup, nn.Sequential(nn.Linear(6, 6).double(), module))


def a_learned_input_that_blocks_return(setup):
    module = Stack(ReturnsInput)
    module.forward = lambda x, dropped: [
        x := layer(x, layer is dropped)[0] for layer in module.layers
    ]
    t = Training(setup, module)
    learned = batch(0, 0).requires_grad_()

    def loss(step, rank):
        outputs = t.module(learned, module.layers[step])
        return (outputs[-1] * batch(step, rank)).square().mean()

    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step, loss)
        t.step()
    return t.results()


def a_block_that_calls_itself(setup):
    return _trained(setup, Stack(Recursive))


def outputs_of_a_class_with_slots(setup):
    t = Training(setup, Stack(SlotsOutput))
    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, lambda *at: t.module(batch(*at)).y.square().mean())
        t.step()
    return t.results()


def a_layer_in_two_blocks(setup):
    module = Net()
    module.blocks[2].linear = module.blocks[0].linear
    return _trained(setup, module)


def compiled_blocks(setup):
    torch.compiler.reset()
    module = Net()
    for block in module.blocks:
        block.compile(backend="aot_eager")
    return _trained(setup, module)


def whole_module_compiled(setup):
    torch.compiler.reset()
    t = Training(setup, torch.compile(Net(), backend="aot_eager"))
    t.train(0, 1)
    return t.results()


def dictionary_of_outputs(setup):
    t = Training(setup, DictOutput())

    def loss(step, rank):
        first, second = t.module(inputs=batch(step, rank))["parts"]
        return first.square().mean() + second.mean()

    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, loss)
        t.step()
    return t.results()


def an_auxiliary_loss_kept_in_the_module(setup):
    module = Net()
    kept = []
    module.blocks[1].linear.register_forward_hook(lambda m, i, out: kept.append(out) and None)
    t = Training(setup, module)

    def loss(step, rank):
        kept.clear()
        return t.loss(step, rank) + kept[0].square().mean()

    t.backward(0, loss)
    t.step()
    return t.results()


def inputs_that_need_gradients(setup):
    t = Training(setup, Net())
    inputs = []

    def loss(step, rank):
        inputs.append(batch(step, rank).requires_grad_())
        return t.module(inputs[-1]).square().mean()

    t.backward(0, loss)
    t.step()
    own = inputs[setup.batches.index(torch.distributed.get_rank())].grad
    # A rank's inputs get the gradient of its own loss, not of the mean over ranks.
    scale = len(setup.batches)
    return t.results() | {"input": own * scale}


def a_submodule_called_alone(setup):
    t = Training(setup, Net())
    t.train(0)
    t.optimizer.zero_grad()
    t.backward(1, lambda step, rank: t.inner.blocks[1](batch(step, rank)).square().mean())
    t.step()
    return t.results()


def block_wrapped_inside_a_wrapped_module(setup):
    """Wraps the blocks and then the whole module, as fully_shard is used."""
    if setup.wrapper not in ("none", "zero3"):
        return None
    from stepgauge.parallel.fsdp import FullyShardedDataParallel

    module = Net()
    if setup.wrapper == "zero3":
        for index, block in enumerate(module.blocks):
            module.blocks[index] = FullyShardedDataParallel(block, group=setup.group)
    t = Training(setup, module)
    t.train(0, 1)
    return {name.replace(".module.", "."): weight for name, weight in t.results().items()}


def autocast(setup):
    t = Training(setup, Net().float())

    def loss(step, rank):
        with torch.autocast("cpu", torch.bfloat16):
            return t.module(batch(step, rank).float()).float().square().mean()

    t.backward(0, loss)
    t.step()
    return {name: weight.to(torch.bfloat16) for name, weight in t.results().items()}


def loss_scaling(setup):
    """The second step has an infinite gradient on one rank, so all ranks skip it."""
    t = Training(setup, Net())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def loss(step, rank):
        blown = float("inf") if (step, rank) == (1, 0) else 1.0
        return scaler.scale(t.loss(step, rank)) * blown

    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step, loss)
        scaler.step(t.optimizer)
        scaler.update()
    return t.results() | {"scale": torch.tensor(scaler.get_scale())}


def buffers_start_equal(setup):
    class Shifted(nn.Module):
        def __init__(self, rank):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(6, 5).double()
            self.register_buffer("shift", torch.full((5,), 1.0 + rank, dtype=torch.float64))

        def forward(self, x):
            return self.linear(x) + self.shift

    rank = 0 if setup.wrapper == "none" else torch.distributed.get_rank()
    t = Training(setup, Shifted(rank))
    t.train(0)
    return t.results() | {"shift": whole(t.inner.shift)}


def weights_start_equal(setup):
    rank = 0 if setup.wrapper == "none" else torch.distributed.get_rank()
    return _trained(setup, Net(seed=rank))
