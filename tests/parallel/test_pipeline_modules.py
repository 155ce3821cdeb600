"""Unusual user modules as stages: each trains as in one process, or is refused with a reason."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parallel.groups import in_turn
from tests.parallel.test_pipeline import difference_in_weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.interfaces import Meta, StageOutputs, stage_inputs
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.pipeline import build

WIDTH, MICRO_BATCHES = 6, 4
SPLIT, UNSPLIT = "zbv", "1f1b"  # schedules with a split and with a whole backward


class Linears(nn.Module):
    """Base of the stages below: two linear layers."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attach()

    def attach(self):
        """Registers hooks and buffers. Called again on a deep copy, which has no hooks."""


class Unused(Linears):
    """The loss does not depend on the output of the second layer."""

    def forward(self, x, y=None):
        return torch.tanh(self.one(x)), self.two(x if y is None else y)


class Repeats(Linears):
    """One layer runs one to three times, depending on the values of the input."""

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
    """Each row goes to one of the two layers, so their inputs change shape every time."""

    def forward(self, x):
        to_one = (x[:, 0] > 0)[:, None]
        y = torch.zeros_like(x).masked_scatter(to_one, self.one(x[to_one[:, 0]]))
        return x + y.masked_scatter(~to_one, self.two(x[~to_one[:, 0]]))


class Hooked(Linears):
    """A post-accumulate hook halves each gradient and counts its calls."""

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
    """Forward replaces one buffer by another tensor and creates another buffer."""

    def attach(self):
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", None)

    def forward(self, x):
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.calls = torch.ones(()) if self.calls is None else self.calls + 1
        return self.two(torch.tanh(self.one(x))) + self.mean * self.calls


class Forces(Linears):
    """The output contains the gradient of an energy, as in molecular dynamics."""

    def forward(self, x):
        x = x if x.requires_grad else x.clone().requires_grad_()
        energy = self.two(torch.tanh(self.one(x))).square().sum()
        return x + torch.autograd.grad(energy, x, create_graph=True)[0]


class Transformed(Linears):
    """Uses torch.func.grad and vmap, and calls a layer row by row."""

    def forward(self, x):
        slope = torch.func.grad(lambda x: torch.tanh(self.one(x)).sum())(x)
        return slope + torch.vmap(self.one)(x) + torch.stack([self.two(row) for row in x])


class Swaps(Linears):
    """Calls a layer with weights that are not its own: computed ones, then those of another layer."""

    def forward(self, x):
        scaled = {name: 2 * p for name, p in self.one.named_parameters()}
        y = torch.tanh(torch.func.functional_call(self.one, scaled, (x,)))
        z = torch.func.functional_call(self.one, dict(self.two.named_parameters()), (y,))
        return torch.tanh(z) + self.one(x)


class FrozenForOneCall(Linears):
    """A layer is frozen during its second call, and the bias of another in its first."""

    def forward(self, x):
        y = torch.tanh(self.one(x))
        self.one.requires_grad_(False)
        y = torch.tanh(self.one(y))
        self.one.requires_grad_(True)
        self.two.bias.requires_grad_(False)
        y = torch.tanh(self.two(y))
        self.two.bias.requires_grad_(True)
        return self.two(y)


def shared(count):
    """Returns the same module for all stages; its second layer is unused."""
    stage = UsesOne()
    return [stage] * count


class UsesOne(Linears):
    def forward(self, x):
        return torch.tanh(self.one(x))


CASES = (
    *(shared, Unused, Repeats, RepeatsCheckpointed, Routed, Hooked, Replaces),
    *(Forces, Transformed, Swaps, FrozenForOneCall),
)


def loss_of(*values):
    """Returns the loss of the last stage's first output and the targets."""
    return F.mse_loss(values[0], values[-1])


def test_unusual_stages_train_as_in_one_process():
    for differences in launch(all_differences, ranks=2):
        assert {case: text for case, text in differences.items() if text} == {}


def all_differences():
    torch.set_num_threads(1)
    torch.manual_seed(0)  # some values cancel gradients of 1000 to 0.1, more than the tolerance
    return in_turn(
        {
            f"{make.__name__} {schedule}": functools.partial(difference, make, schedule)
            for make, schedule in itertools.product(CASES, (UNSPLIT, SPLIT))
        }
    )


def difference(make, schedule_name):
    """Accumulates the gradients of two steps, and describes how they differ from one process that
    runs one micro-batch after another. Weights are not updated, because what some stages do depends
    on the last bit of their input.
    """
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=MICRO_BATCHES)
    count = schedule.num_stages
    modules = make(count) if make is shared else [make() for _ in range(count)]
    reference = copy.deepcopy(modules)
    for module in reference:
        module.attach()
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    differences = []
    for number in range(2):
        x, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
        dist.broadcast(x, 0)
        dist.broadcast(targets, 0)
        pipeline.step((x,), (targets,))
        for micro_batch in zip(*(t.chunk(MICRO_BATCHES) for t in (x, targets)), strict=True):
            inputs, part_targets = micro_batch
            (loss_of(*run(reference, inputs), part_targets) / MICRO_BATCHES).backward()
        differences.append(difference_in_weights(pipeline, reference, number))
        differences += [
            f"step {number}: buffer {name} of stage {stage}"
            for stage, module in pipeline.modules.items()
            for name, buffer in module.named_buffers()
            if not torch.allclose(buffer, reference[stage].get_buffer(name), atol=1e-6)
        ]
    return "; ".join(filter(None, differences))


def run(modules, x):
    """Runs all stages one after the other, in one process."""
    values = (x,)
    for module in modules:
        values = module(*values)
        values = values if isinstance(values, tuple) else (values,)
    return values


def test_a_stage_can_be_differentiated_between_steps():
    for differences in launch(differentiate_between_steps, ranks=2):
        assert differences == ""


def differentiate_between_steps():
    """Runs each stage, and a copy of it, forward and backward after each of two steps."""
    schedule = build(SPLIT, ranks=2, micro_batches=MICRO_BATCHES)
    torch.manual_seed(1)
    modules = [UsesOne() for _ in range(schedule.num_stages)]
    reference = copy.deepcopy(modules)
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    x, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
    for _ in range(2):
        pipeline.step((x,), (targets,))
        loss_of(*run(reference, x), targets).backward()
        for number, module in pipeline.modules.items():
            copied, before = copy.deepcopy(module), module.one.weight.grad.clone()
            for each in (module, copied, reference[number]):
                each(x).square().mean().backward()
            torch.testing.assert_close(before + copied.one.weight.grad, module.one.weight.grad)
    return difference_in_weights(pipeline, reference, 1)


class KeepsPenalty(Linears):
    """Keeps a loss of its own, to be differentiated later."""

    def forward(self, x):
        self.penalty = self.two(x).square().mean()
        return self.one(x)


def test_a_backward_between_steps_through_a_forward_of_the_step_is_refused():
    with pytest.raises(RankError, match="a linear layer whose backward is split"):
        launch(differentiate_kept_loss, ranks=2)


def differentiate_kept_loss():
    schedule = build(SPLIT, ranks=2, micro_batches=MICRO_BATCHES)
    modules = [KeepsPenalty() for _ in range(schedule.num_stages)]
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    x = torch.ones(8, WIDTH)
    pipeline.step((x,), (x,))
    for module in pipeline.modules.values():
        module.penalty.backward()


class ForcesLater(Linears):
    differentiates = False

    def forward(self, x):
        return Forces.forward(self, x) if self.differentiates else self.two(self.one(x))


def test_a_layer_that_forward_differentiates_only_later_is_refused():
    with pytest.raises(RankError, match="split backward has no second derivative"):
        launch(differentiate_later, ranks=2)


def differentiate_later():
    schedule = build(SPLIT, ranks=2, micro_batches=MICRO_BATCHES)
    modules = [ForcesLater() for _ in range(schedule.num_stages)]
    pipeline = Pipeline(modules, schedule, loss=loss_of)
    for differentiates in (False, True):
        ForcesLater.differentiates = differentiates
        x = torch.ones(8, WIDTH)
        pipeline.step((x,), (x,))


def test_a_change_of_outputs_after_the_first_step_is_refused_unless_the_pipeline_is_closed():
    for change, message in (
        ("used", "the loss depends on output 1 of stage 0 now"),
        ("unfrozen", "output 0 of a stage depends on trainable weights now"),
        ("narrow", r"output 0 of a stage is \(2, 5\) float32; it was \(2, 6\) float32"),
    ):
        with pytest.raises(RankError, match=message):
            launch(change_after_first_step, [change], False, ranks=2)
    launch(change_after_first_step, ["used", "unfrozen", "narrow"], True, ranks=2)


class First(Linears):
    width = WIDTH

    def forward(self, x):
        return self.one(x)[:, : self.width], self.two(x)


class Last(Linears):
    uses_both = False

    def forward(self, x, y):
        return F.pad(x, (0, WIDTH - x.shape[1])) + (y if self.uses_both else 0)


def change_after_first_step(changes, close_before):
    """Makes each change between two steps of a new pipeline."""
    for change in changes:
        first, last = First(), Last()
        first.requires_grad_(change != "unfrozen")
        pipeline = Pipeline([first, last], build(UNSPLIT, ranks=2, micro_batches=4), loss=loss_of)
        x = torch.ones(8, WIDTH)
        pipeline.step((x,), (x,))
        first.requires_grad_()
        last.uses_both = change == "used"
        first.width = 5 if change == "narrow" else WIDTH
        if close_before:
            pipeline.close()
        pipeline.step((x,), (x,))


def test_with_every_output_the_loss_may_depend_on_an_output_in_some_steps_only():
    for differences in launch(differences_if_used_in_second_step, ranks=2):
        assert differences == []


def differences_if_used_in_second_step():
    """The loss depends on the first stage's second output in the second of three steps."""
    differences = []
    for schedule in (UNSPLIT, SPLIT):
        plan = build(schedule, ranks=2, micro_batches=MICRO_BATCHES)
        torch.manual_seed(1)
        modules = [First(), *(Last() for _ in range(plan.num_stages - 1))]
        modules[1:-1] = [Passes() for _ in modules[1:-1]]
        reference = copy.deepcopy(modules)
        pipeline = Pipeline(modules, plan, loss=loss_of, every_output=True)
        for number in range(3):
            modules[-1].uses_both = reference[-1].uses_both = number == 1
            x, targets = torch.randn(2, 2 * MICRO_BATCHES, WIDTH)
            pipeline.step((x,), (targets,))
            loss_of(*run(reference, x), targets).backward()
            zero_missing(reference)
            differences.append(difference_in_weights(pipeline, reference, number))
    return list(filter(None, differences))


class Passes(Linears):
    def forward(self, x, y):
        return self.one(x), self.two(y)


def zero_missing(modules):
    """Sets missing gradients to zero: the pipeline has zeros for weights that no step has used."""
    for module in modules[:-1]:
        for parameter in module.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def test_a_last_stage_that_returns_more_than_one_number_is_refused():
    outputs = StageOutputs([Meta(torch.Size([2]), torch.float32)], [set()])
    with pytest.raises(
        ValueError, match=r"returns tensors of shapes \[\(2,\)\]; it must return one"
    ):
        stage_inputs([], {0: outputs})
