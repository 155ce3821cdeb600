"""Behaviours: what users do with gradients."""

import contextlib

import torch
from tests.parallel.conformance.networks import (
    Block,
    Critic,
    MeetsInBackward,
    MixedDtypes,
    Net,
    OddShapes,
)
from tests.parallel.conformance.training import (
    SGD,
    FailedError,
    Training,
    batch,
    whole,
)
from torch import nn


def ordinary_steps(setup):
    t = Training(setup, Net())
    t.train(0, 1, 2)
    return t.results()


def accumulation_without_no_sync(setup):
    t = Training(setup, Net())
    t.backward(0)
    t.backward(1)
    t.step()
    t.train(2)
    return t.results()


def accumulation_under_no_sync(setup):
    t = Training(setup, Net())
    for step in (0, 2):
        t.optimizer.zero_grad()
        with t.parallel.no_sync():
            t.backward(step)
        t.backward(step + 1)
        t.step()
    return t.results()


def no_sync_after_a_synchronised_backward(setup):
    t = Training(setup, Net())
    t.backward(0)
    with t.parallel.no_sync():
        t.backward(1)
    t.backward(2)
    t.step()
    return t.results()


def zero_grad_between_no_sync_and_backward(setup):
    t = Training(setup, Net())
    with t.parallel.no_sync():
        t.backward(0)
    t.train(1, 2)
    return t.results()


def weights_used_only_under_no_sync(setup):
    t = Training(setup, Net())
    with t.parallel.no_sync():
        t.backward(0)
    t.backward(1, blocks=(0, 2))
    t.step()
    return t.results()


def zeros_instead_of_none(setup):
    t = Training(setup, Net())
    for step in range(3):
        t.optimizer.zero_grad(set_to_none=False)
        t.backward(step)
        t.step()
    return t.results()


def zero_grad_between_forward_and_backward(setup):
    t = Training(setup, Net())
    for step in range(3):
        losses = [t.loss(step, rank) for rank in setup.batches]
        t.optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        t.step()
    return t.results()


def zero_grad_of_the_module(setup):
    t = Training(setup, Net())
    for step in range(3):
        t.module.zero_grad()
        t.backward(step)
        t.step()
    return t.results()


def a_batch_skipped_after_backward(setup):
    t = Training(setup, Net())
    t.train(0)
    t.optimizer.zero_grad()
    t.backward(1)
    t.train(2)
    return t.results()


def a_batch_skipped_with_zeros(setup):
    t = Training(setup, Net())
    t.train(0)
    t.optimizer.zero_grad()
    t.backward(1)
    t.optimizer.zero_grad(set_to_none=False)
    t.backward(2)
    t.step()
    return t.results()


def a_batch_skipped_after_forward(setup):
    t = Training(setup, Net())
    t.train(0)
    for rank in setup.batches:
        t.loss(1, rank)
    t.train(2)
    return t.results()


def two_steps_with_one_gradient(setup):
    t = Training(setup, Net())
    t.backward(0)
    t.step()
    t.step()
    return t.results()


def step_without_a_backward(setup):
    t = Training(setup, Net())
    t.step()
    t.train(0)
    return t.results()


def two_backwards_of_one_forward(setup):
    t = Training(setup, Net())
    losses = [t.loss(0, rank) / len(setup.batches) for rank in setup.batches]
    for retain in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain)
    t.step()
    return t.results()


def two_forwards_then_their_backwards(setup):
    t = Training(setup, Net())
    losses = [
        t.loss(step, rank) / len(setup.batches) for step in range(2) for rank in setup.batches
    ]
    for loss in losses:
        loss.backward()
    t.step()
    return t.results()


def a_graph_kept_over_a_step(setup):
    """The kept graph needs weights from before the step. Under ZeRO 1 and 2 the single weight has
    one owner.
    """
    torch.manual_seed(0)
    t = Training(setup, nn.Linear(6, 6, bias=False).double())
    given = batch(1, 0).requires_grad_()
    kept = t.module(given).square().mean()
    t.train(0)
    try:
        torch.autograd.grad(kept, given)
    except RuntimeError:
        return t.results()
    raise AssertionError("backward used weights that were not those of forward")


def one_backward_of_two_forwards(setup):
    t = Training(setup, Net())
    t.backward(0, lambda step, rank: t.loss(step, rank) + t.loss(step + 1, rank))
    t.step()
    t.train(2)
    return t.results()


def losses_that_use_parts_of_the_module(setup):
    t = Training(setup, Net())
    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, blocks=(0,))
        t.backward(step, blocks=(1, 2))
        t.step()
    return t.results()


def backward_with_inputs(setup):
    t = Training(setup, Net())
    weights = [t.parameter("head.weight"), t.parameter("head.bias")]
    for rank in setup.batches:
        (t.loss(0, rank) / len(setup.batches)).backward(inputs=weights)
    t.step()
    return t.results()


def gradient_scaled_in_place(setup):
    t = Training(setup, Net())
    t.backward(0)
    for parameter in t.inner.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)
    t.step()
    return t.results()


def gradient_replaced(setup):
    t = Training(setup, Net())
    for step in range(2):
        t.backward(step)
        for parameter in t.inner.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5
    t.step()
    return t.results()


def one_gradient_set_to_none(setup):
    t = Training(setup, Net())
    t.train(0)
    t.optimizer.zero_grad()
    t.backward(1)
    t.parameter("blocks.1.linear.weight").grad = None
    t.step()
    return t.results()


def gradients_held_across_backward(setup):
    """The user keeps `.grad` and reads it after the next backward."""
    t = Training(setup, Net())
    t.backward(0)
    held = {n: p.grad for n, p in t.inner.named_parameters() if p.grad is not None}
    t.backward(1)
    parameters = dict(t.inner.named_parameters())
    for name, gradient in held.items():
        assert whole(gradient).equal(whole(parameters[name].grad)), f"{name}.grad was replaced"
    t.step()
    return t.results()


def gradients_in_a_buffer_of_the_user(setup):
    t = Training(setup, Net())
    parameters = [*t.inner.parameters()]
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    parts = flat.split([p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    t.backward(0)
    return {"flat": flat.clone()}


def gradients_set_before_the_first_backward(setup):
    """Equal on all ranks, for weights that backward uses and one that it does not."""
    t = Training(setup, Net())
    for parameter in t.inner.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    t.backward(0, blocks=(0, 2))
    t.step()
    t.train(1)
    return t.results()


def gradients_set_before_wrapping(setup):
    network = Net()
    for parameter in network.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    t = Training(setup, network)
    t.backward(0)
    t.step()
    return t.results()


def a_gradient_set_before_backward_of_a_module_with_one_weight(setup):
    """Under ZeRO 1 and 2 the single weight has one owner."""
    torch.manual_seed(0)
    t = Training(setup, nn.Linear(6, 6, bias=False).double())
    t.inner.weight.grad = torch.full_like(t.inner.weight, 0.25)
    for step in range(2):
        t.backward(step)
    t.step()
    return t.results()


def clip_by_the_wrapper(setup):
    t = Training(setup, Net())
    norms = {}
    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step)
        norms[f"norm {step}"] = whole(t.parallel.clip_gradients(0.05))
        t.optimizer.step()
    return t.results() | norms


def clip_of_weights_that_no_optimizer_has(setup):
    def groups(module):
        return [{"params": [p for n, p in module.named_parameters() if not n.startswith("head")]}]

    t = Training(setup, Net(), groups=groups)
    t.backward(0)
    norm = whole(t.parallel.clip_gradients(0.05))
    t.step()
    return t.results() | {"norm": norm}


def clip_grad_norm_of_torch(setup):
    t = Training(setup, Net())
    norms = {}
    for step in range(3):
        t.optimizer.zero_grad()
        t.backward(step)
        norm = nn.utils.clip_grad_norm_(t.module.parameters(), 0.05)
        norms[f"norm {step}"] = whole(norm)
        t.optimizer.step()
    return t.results() | norms


def clip_grad_value_of_torch(setup):
    t = Training(setup, Net())
    t.backward(0)
    if any(
        p.grad is not None for p in t.module.parameters()
    ):  # torch's function raises without any
        nn.utils.clip_grad_value_(t.module.parameters(), 0.01)
    t.step()
    return t.results()


def clip_of_mixed_dtypes(setup):
    t = Training(setup, MixedDtypes())
    norms = {}
    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step)
        norms[f"norm {step}"] = whole(t.parallel.clip_gradients(0.05)).float()
        t.optimizer.step()
    return t.results() | norms


def a_gradient_norm_that_is_logged(setup):
    t = Training(setup, Net())
    t.backward(0)
    norm = t.gradient_norm()
    t.step()
    return t.results() | {"norm": norm}


def a_failed_backward_then_zeroed(setup):
    t = Training(setup, Net())
    t.train(0)
    t.optimizer.zero_grad()
    t.backward_that_fails(1)
    t.train(2, 3)
    return t.results()


def a_failed_backward_then_zeroed_in_place(setup):
    t = Training(setup, Net())
    t.train(0)
    t.backward_that_fails(1)
    t.optimizer.zero_grad(set_to_none=False)
    t.backward(2)
    t.step()
    return t.results()


def a_failed_backward_whose_gradients_are_used(setup):
    t = Training(setup, Net())
    t.train(0)
    t.backward_that_fails(1)
    t.backward(2)
    t.step()
    return t.results()


def a_failed_forward(setup):
    t = Training(setup, Net())
    t.train(0)

    def fail(*_):
        raise FailedError

    handle = t.inner.blocks[1].register_forward_pre_hook(fail)
    with contextlib.suppress(FailedError):
        t.backward(1)
    handle.remove()
    t.train(2)
    return t.results()


def a_gan(setup):
    """The gradients of the generator's loss with respect to the critic are discarded."""
    generator, critic = Training(setup, Net()), Training(setup, Critic())

    def critic_loss(step, rank):
        fake = generator.module(batch(step, rank)).detach()
        real = batch(step + 50, rank)[:, :5]
        return critic.module(real).square().mean() - critic.module(fake).tanh().mean()

    def generator_loss(step, rank):
        return critic.module(generator.module(batch(step, rank))).square().mean()

    for step in range(3):
        critic.optimizer.zero_grad()
        critic.backward(step, critic_loss)
        critic.step()
        generator.optimizer.zero_grad()
        generator.backward(step, generator_loss)
        generator.step()
    return {**generator.results(), **{f"critic {n}": w for n, w in critic.results().items()}}


def a_critic_with_a_backward_each_for_real_and_fake(setup):
    critic = Training(setup, Critic())
    for step in range(2):
        critic.optimizer.zero_grad()
        critic.backward(step, lambda s, r: critic.module(batch(s, r)[:, :5]).square().mean())
        critic.backward(step, lambda s, r: critic.module(batch(s + 9, r)[:, :5]).tanh().mean())
        critic.step()
    return critic.results()


def gradient_penalty(setup):
    t = Training(setup, Net())

    def loss(step, rank):
        x = batch(step, rank).requires_grad_()
        y = t.module(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + gradient.square().sum()

    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, loss)
        t.step()
    return t.results()


def autograd_grad_of_weights(setup):
    """torch.autograd.grad does not change `.grad`, and each rank gets its own gradients."""
    t = Training(setup, Net())
    for rank in setup.batches:
        torch.autograd.grad(t.loss(0, rank), t.parameter("head.weight"), allow_unused=False)
    t.train(1)
    return t.results()


def autograd_grad_of_weights_that_have_gradients(setup):
    t = Training(setup, Net())
    t.backward(0)
    for rank in setup.batches:
        torch.autograd.grad(t.loss(1, rank), t.parameter("head.weight"))
    t.step()
    return t.results()


def backward_with_create_graph(setup):
    t = Training(setup, Net())
    for rank in setup.batches:
        (t.loss(0, rank) / len(setup.batches)).backward(create_graph=True)
    t.step()
    return t.results()


def a_hook_on_a_weight(setup):
    t = Training(setup, Net())
    t.parameter("head.weight").register_hook(lambda gradient: gradient * 3)
    t.parameter("blocks.0.linear.weight").register_hook(lambda gradient: gradient * 2)
    t.train(0, 1)
    return t.results()


def _double(parameter):
    parameter.grad.mul_(2)


def hooks_registered_before_wrapping(setup):
    network = Net()
    network.head.weight.register_hook(lambda gradient: gradient * 3)
    network.blocks[0].linear.weight.register_post_accumulate_grad_hook(_double)
    removed = network.blocks[1].linear.weight.register_hook(lambda gradient: gradient * 3)
    t = Training(setup, network)
    t.train(0)
    removed.remove()
    t.train(1)
    return t.results()


def a_hook_after_accumulation(setup):
    """The hook's change of `.grad` has an effect, whether it runs before or after the reduction."""
    t = Training(setup, Net())
    t.parameter("head.weight").register_post_accumulate_grad_hook(_double)
    t.backward(0)
    t.step()
    return t.results()


def hooks_of_a_module_converted_to_another_dtype(setup):
    """One hook is registered before the conversion and one after it."""
    t = Training(setup, Net())
    t.parameter("head.weight").register_hook(lambda gradient: gradient * 3)
    t.module.to(torch.float32)
    t.module.to(torch.float64)
    t.parameter("blocks.0.linear.weight").register_hook(lambda gradient: gradient * 2)
    t.train(0, 1)
    return t.results()


def gradients_that_share_memory(setup):
    t = Training(setup, OddShapes())
    t.train(0, 1, 2)
    return t.results()


def a_gradient_used_further_up(setup):
    """Autograd gives a weight the same tensor that it passes on to earlier layers."""

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Block().double()
            self.shift = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))

        def forward(self, x):
            return self.inner(x).view(3, 6) + self.shift.view(3, 6)

    torch.manual_seed(0)
    t = Training(setup, Sum())
    t.train(0, 1)
    return t.results()


def an_optimizer_that_steps_every_other_time(setup):
    """The optimizer of the head steps every other time, with the sum of two gradients."""
    t = Training(setup, Net())
    if setup.wrapper in ("zero1", "zero2", "torch-zero1"):
        return None
    head = SGD([*t.inner.head.parameters()])
    rest = SGD([p for n, p in t.inner.named_parameters() if not n.startswith("head")])
    for step in range(4):
        rest.zero_grad()
        t.backward(step)
        rest.step()
        if step % 2:
            head.step()
            head.zero_grad()
    return t.results()


def different_parameters_per_rank_and_a_collective_in_backward(setup):
    """Rank 1 skips the last layers, whose gradients other ranks compute before the collective."""
    t = Training(setup, MeetsInBackward(setup.wrapper != "none"))
    for step in range(2):
        t.optimizer.zero_grad()
        t.backward(step, lambda step, rank: t.loss(step, rank, layers=2 if rank == 1 else 12))
        t.step()
    return t.results()
