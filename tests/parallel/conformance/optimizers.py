"""Behaviours: optimizers and learning-rate schedules."""

import copy
import functools

import torch
from tests.parallel.conformance.networks import Net
from tests.parallel.conformance.training import SGD, Training
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau


def _trained(setup, optimizer, *steps, groups=None):
    t = Training(setup, Net(), optimizer, **({"groups": groups} if groups else {}))
    t.train(*(steps or (0, 1, 2)))
    return t.results()


def adamw(setup):
    return _trained(setup, functools.partial(torch.optim.AdamW, lr=0.05))


def adam_without_foreach(setup):
    return _trained(setup, functools.partial(torch.optim.Adam, lr=0.05, foreach=False))


def adagrad(setup):
    return _trained(setup, functools.partial(torch.optim.Adagrad, lr=0.05))


def rmsprop(setup):
    return _trained(setup, functools.partial(torch.optim.RMSprop, lr=0.05))


def adafactor(setup):
    return _trained(setup, functools.partial(torch.optim.Adafactor, lr=0.05))


def adafactor_of_vectors(setup):
    def groups(module):
        return [{"params": [p for p in module.parameters() if p.ndim == 1]}]

    return _trained(setup, functools.partial(torch.optim.Adafactor, lr=0.05), groups=groups)


def rprop(setup):
    return _trained(setup, functools.partial(torch.optim.Rprop, lr=0.01))


def fused_sgd(setup):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "fused": True}
    return _trained(setup, functools.partial(torch.optim.SGD, **settings))


def fused_adamw(setup):
    return _trained(setup, functools.partial(torch.optim.AdamW, lr=0.05, fused=True))


def muon(setup):
    def groups(module):
        return [{"params": [p for p in module.parameters() if p.ndim == 2]}]

    weights = _trained(setup, functools.partial(torch.optim.Muon, lr=0.05), groups=groups)
    # Muon computes in bfloat16.
    return {name: weight.to(torch.bfloat16) for name, weight in weights.items()}


class Lamb(torch.optim.Optimizer):
    """Scales the update of each weight by the weight's norm (You et al. 2020, without moments)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / (p.grad.norm() + 1e-9)), alpha=-group["lr"])


def lamb(setup):
    return _trained(setup, Lamb)


def lbfgs(setup):
    t = Training(setup, Net(), functools.partial(torch.optim.LBFGS, lr=0.1, max_iter=2))

    def closure():
        t.optimizer.zero_grad()
        t.backward(0)
        return sum(t.loss(0, rank) for rank in range(torch.distributed.get_world_size()))

    t.optimizer.step(closure)
    return t.results()


def a_closure(setup):
    t = Training(setup, Net())

    def closure():
        t.optimizer.zero_grad()
        t.backward(0)
        return 0.0

    t.optimizer.step(closure)
    return t.results()


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups and uses the count, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / (group["k"] + 1))
            group["k"] += 1


def counters_in_the_groups(setup):
    t = Training(setup, Net(), Counting)
    t.train(0, 1, 2)
    return t.results() | {"k": torch.tensor(t.optimizer.param_groups[0]["k"])}


def groups_with_their_own_learning_rates(setup):
    def groups(module):
        matrices = [p for p in module.parameters() if p.ndim >= 2]
        vectors = [p for p in module.parameters() if p.ndim < 2]
        return [{"params": matrices, "lr": 0.2}, {"params": vectors, "weight_decay": 0.0}]

    return _trained(setup, SGD, groups=groups)


def a_group_added_later(setup):
    def groups(module):
        return [{"params": [p for n, p in module.named_parameters() if not n.startswith("head")]}]

    t = Training(setup, Net(), groups=groups)
    t.train(0)
    t.optimizer.add_param_group({"params": [*t.inner.head.parameters()], "lr": 0.3})
    t.train(1, 2)
    return t.results()


def a_group_removed(setup):
    def groups(module):
        head = {*module.head.parameters()}
        return [{"params": [*head]}, {"params": [p for p in module.parameters() if p not in head]}]

    t = Training(setup, Net(), groups=groups)
    t.train(0)
    del t.optimizer.param_groups[0]
    t.train(1, 2)
    return t.results()


def a_learning_rate_changed_in_the_groups(setup):
    t = Training(setup, Net())
    t.train(0)
    for group in t.optimizer.param_groups:
        group["lr"] = 0.01
    t.train(1, 2)
    return t.results()


def _scheduled(setup, schedule):
    t = Training(setup, Net())
    scheduler = schedule(t.optimizer)
    for step in range(4):
        t.train(step)
        scheduler.step()
    return t.results() | {"lr": torch.tensor(t.optimizer.param_groups[0]["lr"])}


def cosine_schedule(setup):
    return _scheduled(setup, lambda optimizer: CosineAnnealingLR(optimizer, 5))


def one_cycle_schedule(setup):
    return _scheduled(setup, lambda optimizer: OneCycleLR(optimizer, 0.2, total_steps=5))


def plateau_schedule(setup):
    t = Training(setup, Net())
    scheduler = ReduceLROnPlateau(t.optimizer, patience=0)
    for step in range(3):
        t.train(step)
        scheduler.step(1.0)
    return t.results()


def hooks_of_the_optimizer(setup):
    t = Training(setup, Net())
    calls = []
    t.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    t.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    t.train(0, 1)
    return t.results() | {"calls": torch.tensor(len(calls))}


def optimizer_state_restored(setup):
    t = Training(setup, Net(), functools.partial(torch.optim.AdamW, lr=0.05))
    t.train(0)
    state = copy.deepcopy(t.optimizer.state_dict())
    t.train(1)
    t.optimizer.load_state_dict(state)
    t.train(2)
    return t.results()


def zero_grad_of_the_optimizer(setup):
    t = Training(setup, Net())
    t.backward(0)
    t.optimizer.zero_grad()
    assert all(p.grad is None for p in t.module.parameters())
    t.train(1)
    return t.results()


def maximize(setup):
    return _trained(setup, functools.partial(torch.optim.SGD, lr=0.01, maximize=True), 0, 1)


def nesterov(setup):
    settings = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    return _trained(setup, functools.partial(torch.optim.SGD, **settings))


def exponential_average_of_weights(setup):
    t = Training(setup, Net())
    means = [p.detach().clone() for p in t.inner.parameters()]
    for step in range(2):
        t.train(step)
        with torch.no_grad():
            for mean, p in zip(means, t.inner.parameters(), strict=True):
                mean.lerp_(p, 0.5)
    with torch.no_grad():
        for mean, p in zip(means, t.inner.parameters(), strict=True):
            p.copy_(mean)
    t.train(2)
    return t.results()


class ClippedSGD(torch.optim.SGD):
    """Clips in `step`, as timm's Lamb does."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.01)
        return super().step(closure)


def an_optimizer_that_clips_in_its_step(setup):
    return _trained(setup, functools.partial(ClippedSGD, lr=1.0))


class Lookahead(torch.optim.Optimizer):
    """Moves halfway back after every second step of another optimizer (Zhang et al. 2019)."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.num_steps = base, 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        self.base.step()
        self.num_steps += 1
        for p, state in self.state.items() if self.num_steps % 2 == 0 else ():
            p.lerp_(state["slow"], 0.5)
            state["slow"].copy_(p)


def an_optimizer_around_another(setup):
    return _trained(setup, lambda groups: Lookahead(torch.optim.SGD(groups, lr=0.1)), 0, 1, 2, 3)


def an_optimizer_that_leaves_parameters_out(setup):
    def of_matrices(groups):
        return SGD([p for group in groups for p in group["params"] if p.ndim == 2])

    t = Training(setup, Net(), of_matrices)
    t.train(0)
    t.optimizer.add_param_group({"params": [t.inner.head.bias], "lr": 0.3})
    t.train(1, 2)
    return t.results()


def two_networks_with_one_optimizer(setup):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Net(seed=0), Net(seed=1)

        def forward(self, x, **how):
            return self.first(x, **how) + self.second(x, **how)

    t = Training(setup, Pair())
    t.train(0, 1)
    return t.results()
