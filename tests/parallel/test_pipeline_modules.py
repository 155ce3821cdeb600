"""What modules of users do as stages: each is as in one process, or is refused in one sentence."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parallel.test_pipeline import differing
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.between import Given, Meta, inputs_of
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.pipeline import build

WIDTH, MICRO_BATCHES = 6, 4
SPLIT, WHOLE = "zbv", "1f1b"


class Linears(nn.Module):
    """A stage that computes with two layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attach()

    def attach(self):
        """Hooks, which a deep copy of a module has not."""


class Unused(Linears):
    """Nobody uses what its second layer gives."""

    def forward(self, x, y=None):
        return torch.tanh(self.one(x)), self.two(x if y is None else y)


class Repeats(Linears):
    """A layer runs as often as its input says."""

    def forward(self, x):
        for _ in range(1 + int(100 * x.detach().abs().sum()) % 3):
            x = torch.tanh(self.one(x))
        return x + self.two(x)


class RepeatsCheckpointed(Linears):
    def forward(self, x):
        for _ in range(1 + int(100 * x.detach().abs().sum()) % 3):
            x = checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=False)
        return x + self.two(x)


class Routed(Linears):
    """Each row goes to one of two layers, which see other numbers of rows each time."""

    def forward(self, x):
        to_one = (x[:, 0] > 0)[:, None]
        y = torch.zeros_like(x).masked_scatter(to_one, self.one(x[to_one[:, 0]]))
        return x + y.masked_scatter(~to_one, self.two(x[~to_one[:, 0]]))


class Hooked(Linears):
    """A hook halves each gradient once it is there, and counts."""

    def attach(self):
        self.register_buffer("seen", torch.zeros(()))
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.halve)

    def halve(self, parameter):
        self.seen += 1
        parameter.grad /= 2

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class Replaces(Linears):
    """Its buffers are other tensors after each forward, or are there only then."""

    def attach(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", None)

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1
        return self.two(torch.tanh(self.one(x))) + self.mean * self.calls


class Forces(Linears):
    """Its output has the gradient of an energy in it."""

    def forward(self, x):
        x = x if x.requires_grad else x.clone().requires_grad_()
        energy = self.two(torch.tanh(self.one(x))).square().sum()
        return x + torch.autograd.grad(energy, x, create_graph=True)[0]


class Transformed(Linears):
    """By torch.func, and row by row."""

    def forward(self, x):
        slope = torch.func.grad(lambda x: torch.tanh(self.one(x)).sum())(x)
        return slope + torch.vmap(self.one)(x) + torch.stack([self.two(row) for row in x])


def shared(count):
    """One stage of which nobody uses the second layer, in all places."""
    stage = UsesOne()
    return [stage] * count


class UsesOne(Linears):
    def forward(self, x):
        return torch.tanh(self.one(x))


CASES = (
    *(shared, Unused, Repeats, RepeatsCheckpointed, Routed, Hooked, Replaces),
    *(Forces, Transformed),
)


def loss_of(*values):
    """Of a stage's first output."""
    return F.mse_loss(values[0], values[-1])


def test_whatever_stages_compute_is_as_in_one_process():
    for found in launch(all_differences, ranks=2):
        assert {case: told for case, told in found.items() if told} == {}


def all_differences():
    torch.set_num_threads(1)
    return {
        f"{make.__name__} {schedule}": difference(make, schedule)
        for make, schedule in itertools.product(CASES, (WHOLE, SPLIT))
    }


def difference(make, schedule_name):
    """Two steps whose gradients add up, micro-batch after micro-batch in one process; what differs,
    in words. Weights stay, since what a stage does depends on the last bit of its input.
    """
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=MICRO_BATCHES)
    count = schedule.num_stages
    modules = make(count) if make is shared else [make() for _ in range(count)]
    alone = copy.deepcopy(modules)
    for module in alone:
        module.attach()
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    told = []
    for number in range(2):
        x, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
        dist.broadcast(x, 0)
        dist.broadcast(targets, 0)
        pipeline.step((x,), (targets,))
        for part, answers in zip(*(t.chunk(MICRO_BATCHES) for t in (x, targets)), strict=True):
            (loss_of(*run(alone, part), answers) / MICRO_BATCHES).backward()
        told.append(differing(pipeline, alone, number))
        told += [
            f"step {number}: buffer {name} of stage {stage}"
            for stage, module in pipeline.modules.items()
            for name, own in module.named_buffers()
            if not torch.allclose(own, alone[stage].get_buffer(name), atol=1e-6)
        ]
    return "; ".join(filter(None, told))


def run(modules, x):
    values = (x,)
    for module in modules:
        values = module(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values


class ForcesLater(Linears):
    differentiates = False

    def forward(self, x):
        return Forces.forward(self, x) if self.differentiates else self.two(self.one(x))


def test_a_layer_that_forward_differentiates_later_is_refused():
    with pytest.raises(RankError, match="split backward has no second derivative"):
        launch(differentiates_later, ranks=2, timeout_s=20)


def differentiates_later():
    schedule = build(SPLIT, ranks=2, micro_batches=MICRO_BATCHES)
    modules = [ForcesLater() for _ in range(schedule.num_stages)]
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    for differentiates in (False, True):
        ForcesLater.differentiates = differentiates
        x = torch.ones(8, WIDTH)
        pipeline.step((x,), (x,))


def test_what_changes_after_the_first_step_is_one_sentence():
    for change, sentence in (
        ("used", "the loss depends on output 1 of stage 0 now"),
        ("unfrozen", "output 0 of a stage depends on trained weights now"),
        ("narrow", r"output 0 of a stage is \(2, 5\) float32; it was \(2, 6\) float32"),
    ):
        with pytest.raises(RankError, match=sentence):
            launch(changes, False, change, ranks=2)
    launch(changes, True, "used", "unfrozen", "narrow", ranks=2)


class First(Linears):
    width = WIDTH

    def forward(self, x):
        return self.one(x)[:, : self.width], self.two(x)


class Last(Linears):
    uses_both = False

    def forward(self, x, y):
        return F.pad(x, (0, WIDTH - x.shape[1])) + (y if self.uses_both else 0)


def changes(closes, *kinds):
    """Each between two steps of a pipeline of its own, which may be closed before."""
    for change in kinds:
        first, last = First(), Last()
        first.requires_grad_(change != "unfrozen")
        pipeline = Pipeline([first, last], build(WHOLE, ranks=2, micro_batches=4), loss=loss_of)
        x = torch.ones(8, WIDTH)
        pipeline.step((x,), (x,))
        first.requires_grad_()
        last.uses_both = change == "used"
        first.width = 5 if change == "narrow" else WIDTH
        if closes:
            pipeline.close()
        pipeline.step((x,), (x,))


def test_an_output_may_be_used_in_some_steps_only():
    for told in launch(uses_by_turns, ranks=2):
        assert told == []


def uses_by_turns():
    """The second output of the first stage in every other step; what differs from one process."""
    told = []
    for schedule in (WHOLE, SPLIT):
        plan = build(schedule, ranks=2, micro_batches=MICRO_BATCHES)
        torch.manual_seed(1)
        modules = [First(), *(Last() for _ in range(plan.num_stages - 1))]
        modules[1:-1] = [Passes() for _ in modules[1:-1]]
        alone = copy.deepcopy(modules)
        pipeline = Pipeline(modules, plan, loss=loss_of, every_output=True)
        for number in range(3):
            modules[-1].uses_both = alone[-1].uses_both = number == 1
            x, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
            pipeline.step((x,), (targets,))
            loss_of(*run(alone, x), targets).backward()
            zero_missing(alone)
            told.append(differing(pipeline, alone, number))
    return list(filter(None, told))


class Passes(Linears):
    def forward(self, x, y):
        return self.one(x), self.two(y)


def zero_missing(modules):
    """What no step has used has zeros in the pipeline."""
    for module in modules[:-1]:
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def test_a_last_stage_gives_one_number():
    with pytest.raises(ValueError, match=r"gives tensors of shapes \[\(2,\)\]; its loss must be"):
        inputs_of([], {0: Given([Meta(torch.Size([2]), torch.float32)], [set()])})
