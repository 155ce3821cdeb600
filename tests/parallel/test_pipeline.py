"""Pipelines against one process: loss, every gradient and every weight, under SGD."""

import copy
import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.parallel.graphs import RunAgain
from tests.parallel.pipelines import batch, mean_loss, network, whole
from tests.schedules import random_schedule
from torch import nn

from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.split import SplitBackward, Watch
from stepgauge.parallel.pipeline.step import PipelineStep
from stepgauge.parallel.pipeline.transfers import Transfers
from stepgauge.parallel.zero import ShardedOptimizer
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.pipeline import SCHEDULES, build, from_text

STEPS, CLIP = 2, 0.3
# On two ranks every schedule with every network, and some that are checkpointed, compiled or
# recorded; on four ranks what has most stages.
NETWORKS = ("transformer", "transformer untied", "bert", "list")
ON_TWO = [
    *itertools.product(SCHEDULES, NETWORKS),
    ("1f1b", "transformer checkpointed"),
    ("zb-h1", "transformer checkpointed"),
    ("zb-h1", "transformer compiled"),
    *((schedule, "shared list") for schedule in ("1f1b", "zb-h1", "zbv")),
    *(("zbv", f"{name} graphed") for name in ("transformer", "list")),
    *(("1f1b", f"{name} graphed") for name in ("bert", "list")),
]
ON_FOUR = [("zbv", "transformer"), ("interleaved", "list"), ("v-half", "bert")]


def test_two_ranks_are_one_process():
    for found in launch(
        all_checks, ON_TWO, ("mistakes", "recorded", "waits", "another type"), ranks=2
    ):
        assert {case: told for case, told in found.items() if told} == {}


def test_four_ranks_are_one_process_alone_and_as_two_pipelines_of_two():
    for found in launch(
        all_checks, ON_FOUR, ("replicated", "joined by hand", "any schedule"), ranks=4
    ):
        assert {case: told for case, told in found.items() if told} == {}


@pytest.mark.parametrize(
    ("schedule", "action"),
    [
        *(("1f1b", action) for action in ("1F2", "0B1", "0SEND_F1", "0RECV_B2")),
        *(("zb-h1", action) for action in ("1I2", "0W3")),
    ],
)
def test_a_rank_that_dies_in_an_action_ends_the_job_with_its_name(schedule, action):
    rank = action[0]
    with pytest.raises(
        RankError, match=rf"rank {rank} of 2: ZeroDivisionError: in {action}"
    ) as ended:
        launch(dies, schedule, action, ranks=2)
    assert f"in {action} on rank {rank} of the pipeline" in ended.value.trace


def all_checks(cases, others):
    torch.set_num_threads(1)
    found = {case: difference_from_one_process(*case) for case in cases}
    return found | {name: OTHERS[name]() for name in others}


def difference_from_one_process(schedule_name, name):
    """Two steps, the second with two batches, each with clipping; what differs, in words."""
    micro_batches = 8 if schedule_name == "dualpipev" else 4
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=micro_batches)
    graphs = RunAgain() if name.endswith("graphed") else None
    name = name.removesuffix(" graphed")
    modules, ties, share = network(name, schedule.num_stages)
    alone = copy.deepcopy(modules)
    transport = "copies" if name in ("list", "tied") else "messages"
    pipeline = Pipeline(
        modules,
        schedule,
        loss=mean_loss,
        tied=ties,
        share=share,
        transport=transport,
        graphs=graphs,
    )
    theirs = list(dict.fromkeys(p for module in alone for p in module.parameters()))
    for number in range(STEPS):
        losses = []
        for accumulated in range(number + 1):
            tokens, targets, few = batch(10 * number + accumulated)
            targets = few if share else targets
            expected = mean_loss(whole(alone, tokens), targets)
            expected.backward()
            losses.append((pipeline.step((tokens,), (targets,)), expected.detach()))
        for loss, expected in losses:
            if loss is not None and not torch.allclose(loss, expected, atol=1e-6):
                return f"step {number}: loss {loss}, alone {expected}"
        norms = pipeline.clip(CLIP), torch.nn.utils.clip_grad_norm_(theirs, CLIP)
        if not torch.allclose(*norms, atol=1e-5):
            return f"step {number}: norm {norms[0]}, alone {norms[1]}"
        told = differing(pipeline, alone, number)
        if told:
            return told
        update(pipeline.parameters())
        update(theirs)
    return differing(pipeline, alone, STEPS)


def differing(pipeline, alone, number):
    for stage, module in pipeline.modules.items():
        for (name, own), other in zip(
            module.named_parameters(), alone[stage].parameters(), strict=True
        ):
            if not torch.allclose(own, other, atol=1e-6):
                return f"step {number}: weight {name} of stage {stage}"
            if (own.grad is None) != (other.grad is None):
                return f"step {number}: {name} of stage {stage} has {own.grad}, alone {other.grad}"
            if own.grad is not None and not torch.allclose(own.grad, other.grad, atol=1e-6):
                return f"step {number}: gradient of {name} of stage {stage}"
    return ""


@torch.no_grad()
def update(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= 0.5 * parameter.grad
        parameter.grad = None


def mistakes():
    """Each is one sentence, on all ranks and before anything is sent."""
    schedule = build("1f1b", ranks=2, micro_batches=4)
    endless = from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    modules, _, _ = network("list", 2)
    for make, sentence in (
        (lambda: Pipeline(modules[:1], schedule), "there are 1 modules; the schedule has 2 stages"),
        (
            lambda: Pipeline(modules, build("1f1b", ranks=3, micro_batches=4)),
            "schedule is for 3 ranks; there are 2",
        ),
        (
            lambda: Pipeline(modules, endless),
            "the schedule deadlocks",
        ),
        (
            lambda: Pipeline(modules, schedule).step((torch.zeros(6, 2),)),
            "the batch is 6; 4 micro-batches must divide it",
        ),
        (
            lambda: Pipeline(modules, build("1f1b", ranks=2, micro_batches=2 + dist.get_rank())),
            "the schedule of rank 1 is another one than that of rank 0",
        ),
        (  # which rank 1 alone would refuse
            lambda: Pipeline(modules, endless if dist.get_rank() else schedule),
            "the schedule of rank 1 is another one than that of rank 0",
        ),
    ):
        with pytest.raises(ValueError, match=sentence):
            make()
    return ""


def recorded():
    """What ran is what is simulated, action by action; the modules are given back as they were."""
    schedule = build("zbv", ranks=2, micro_batches=4)
    modules, ties, _ = network("transformer", 4)
    pipeline = Pipeline(modules, schedule, loss=mean_loss, tied=ties, recording=True)
    tokens, targets, _ = batch(0)
    pipeline.step((tokens,), (targets,))
    simulated = simulate(pipeline.schedule, Durations.of_stages(4)).ranks[dist.get_rank()]
    ran = [action for action, _, _ in pipeline.spans]
    if ran != [span.action for span in simulated]:
        return f"ran {ran}"
    kinds = {type(layer) for module in modules for layer in module.modules()}
    seen = itertools.count()
    pipeline.clock.level = lambda: next(seen)
    pipeline.step((tokens,), (targets,))
    if pipeline.clock.levels != list(range(2 * len(ran))):
        return "what is held is asked for at the start and the end of each action"
    pipeline.close()
    after = {type(layer) for module in modules for layer in module.modules()}
    return "" if kinds - after and nn.Linear in after else f"layers left: {after}"


class HandClock:
    """Shows the seconds that the test lets pass."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


class Timed(nn.Linear):
    """Its forward takes a second of the clock."""

    def __init__(self, clock):
        super().__init__(2, 2)
        self.hand_clock = clock

    def forward(self, x):
        self.hand_clock.seconds += 1
        return super().forward(x)


def waits():
    """A rank that waits for another one is idle: no span has the time in which it waited."""
    clock, take = HandClock(), Transfers.take

    def take_in_an_hour(transfers, action):
        clock.seconds += 3600
        return take(transfers, action)

    schedule = build("1f1b", ranks=2, micro_batches=2)
    modules = [Timed(clock), nn.Linear(2, 2)]
    pipeline = Pipeline(modules, schedule, loss=lambda y: y.square().mean(), recording=True)
    with (
        mock.patch.object(Transfers, "take", take_in_an_hour),
        mock.patch("stepgauge.parallel.pipeline.clock.time", clock),
    ):
        pipeline.step((torch.ones(4, 2),))
        took = {str(action): end - start for action, start, end in pipeline.spans}
    forward = 0.0 if dist.get_rank() else 1e3
    asked = {name: forward if "F" in name else 0.0 for name in took}
    return "" if took == asked and clock.seconds >= 7200 else f"{took}, {clock.seconds} s"


def test_one_rank_has_all_stages_and_sends_nothing():
    assert launch(one_rank, ranks=1) == [""]


def one_rank():
    modules, ties, share = network("transformer", 2)
    alone = copy.deepcopy(modules)
    schedule = build("interleaved", ranks=1, micro_batches=4)
    pipeline = Pipeline(
        modules, schedule, loss=mean_loss, tied=ties, share=share, transport="copies"
    )
    tokens, targets, _ = batch(0)
    mean_loss(whole(alone, tokens), targets).backward()
    pipeline.step((tokens,), (targets,))
    return differing(pipeline, alone, 0)


def any_schedule():
    """Schedules that nobody has published, the same on all ranks."""
    for seed in range(3):
        schedule = random_schedule(random.Random(seed), ranks=4, stages=6, micro_batches=4)
        modules, ties, _ = network("list", 6)
        alone = copy.deepcopy(modules)
        pipeline = Pipeline(
            modules, schedule, loss=mean_loss, tied=ties, ahead=seed, transport="copies"
        )
        tokens, targets, _ = batch(seed)
        mean_loss(whole(alone, tokens), targets).backward()
        pipeline.step((tokens,), (targets,))
        if told := differing(pipeline, alone, seed):
            return told
    return ""


def replicated():
    """Two pipelines of two ranks, each with a batch of its own: the seam for data parallel."""
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def reduce(stage, module):
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=replicas[rank % 2])
                parameter.grad /= 2

    schedule = build("zb-h1", ranks=2, micro_batches=4)
    modules, ties, _ = network("transformer", 2)
    alone = copy.deepcopy(modules)
    pipeline = Pipeline(
        modules, schedule, loss=mean_loss, tied=ties, reduce=reduce, group=pipes[rank // 2]
    )
    for seed in range(2):
        tokens, targets, _ = batch(seed)
        (mean_loss(whole(alone, tokens), targets) / 2).backward()
    tokens, targets, _ = batch(rank // 2)
    pipeline.step((tokens,), (targets,))
    return differing(pipeline, alone, 0)


def joined_by_hand():
    """Pipelines whose stages' gradients go to owners, joined by a user; the second step adds to the
    means of the first.
    """
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for schedule in ("1f1b", "zb-h1"):
        modules, _, _ = network("transformer untied", 2)
        alone = copy.deepcopy(modules[rank % 2])
        whole_alone = copy.deepcopy(modules)
        owned = ShardedOptimizer(
            modules[rank % 2].parameters(),
            torch.optim.SGD,
            stage=2,
            group=replicas[rank % 2],
            lr=1.0,
        )
        wrapped = OwnerDataParallel(
            modules[rank % 2], owners=owned.owners_of(modules[rank % 2]), group=replicas[rank % 2]
        )
        pipeline = Pipeline(
            lambda _, wrapped=wrapped: wrapped,
            build(schedule, ranks=2, micro_batches=4),
            loss=mean_loss,
            reduce=lambda _, module: module.begin_synchronizing(),
            group=pipes[rank // 2],
        )
        for number in range(2):
            for replica in range(2):
                tokens, targets, _ = batch(2 * number + replica)
                (mean_loss(whole(whole_alone, tokens), targets) / 2).backward()
            tokens, targets, _ = batch(2 * number + rank // 2)
            with wrapped.no_sync():
                pipeline.step((tokens,), (targets,))
            wrapped.finish_synchronizing()
        owned.step()
        with torch.no_grad():
            for mine, theirs, other in zip(
                wrapped.parameters(),
                whole_alone[rank % 2].parameters(),
                alone.parameters(),
                strict=True,
            ):
                expected = other if theirs.grad is None else other - theirs.grad
                if not torch.allclose(mine, expected, atol=1e-6):
                    return f"{schedule}: {(mine - expected).abs().max()}"
    return ""


def of_another_type():
    """The norm of gradients is in their type, not narrower."""
    modules = [nn.Linear(3, 3).double() for _ in range(2)]
    pipeline = Pipeline(
        modules, build("1f1b", ranks=2, micro_batches=2), loss=lambda y: y.square().mean()
    )
    pipeline.step((torch.ones(4, 3, dtype=torch.float64),))
    own = [p.grad for p in pipeline.parameters()]
    square = torch.nn.utils.get_total_norm(own).square()
    dist.all_reduce(square)
    norm = pipeline.clip(1e9)
    return "" if norm.dtype == torch.float64 and torch.equal(norm, square.sqrt()) else str(norm)


OTHERS = {
    "joined by hand": joined_by_hand,
    "another type": of_another_type,
    "mistakes": mistakes,
    "recorded": recorded,
    "waits": waits,
    "replicated": replicated,
    "any schedule": any_schedule,
}


def dies(schedule_name, action):
    schedule = build(schedule_name, ranks=2, micro_batches=4)
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipeline = Pipeline(modules, schedule, loss=lambda y: y.square().mean())
    whole_act = PipelineStep.act

    def act(step, now):
        if str(now) == action:
            raise ZeroDivisionError(f"in {action}")
        whole_act(step, now)

    PipelineStep.act = act
    pipeline.step((torch.ones(4, 2),))


def test_fused_layers_are_split_too_and_given_back():
    class Fused(nn.Linear):
        pass

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = nn.Sequential(Fused(4, 8), Own(8, 8), nn.Linear(8, 2))
    with Watch(module) as watch:
        module(torch.randn(2, 4))
    split = SplitBackward(module, watch.splittable)
    assert [layer.out_features for layer in split.layers] == [8, 2]
    split.close()
    assert [type(layer) for layer in module] == [Fused, Own, nn.Linear]


class Sums(nn.Module):
    """Gradients of sums are one tensor for all that is summed: here of p, q, the input and the layer's
    output.
    """

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x + (self.p + self.q)


class Direct(nn.Module):
    """Its weight is used by its layer and without it; the layer is called by keyword."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(input=x) @ self.layer.weight


class Spread(nn.Module):
    """A gradient without memory of its own for each element."""

    def __init__(self):
        super().__init__()
        self.p, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x).sum() + self.p.sum()


def hooked():
    layer = nn.Linear(4, 4)
    layer.weight.register_hook(lambda gradient: 3 * gradient)
    return layer


@pytest.mark.parametrize(
    "make",
    [Sums, Direct, Spread, hooked, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))],
)
def test_a_split_backward_is_autograd_s_whatever_the_module_does_with_its_weights(make):
    """Two micro-batches whose W wait until both I are done, and their sum by autograd alone."""
    module = make()
    batches = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for x in batches:
        found = torch.autograd.grad(module(x).square().sum(), [*module.parameters(), x])
        x.expected = found[-1].clone()
        expected = [a + b for a, b in zip(expected, found, strict=False)]
    with Watch(module) as watch, torch.no_grad():
        module(batches[0])
    split = SplitBackward(module, watch.splittable)
    losses, calls = [], []
    for x in batches:
        with split.forward() as called:
            losses.append(module(x).square().sum())
        calls.append(called)
    parts = [
        split.input_gradients([loss], [torch.ones(())], [x], called)
        for loss, x, called in zip(losses, batches, calls, strict=True)
    ]
    for _, factors in parts:
        for each in factors:
            each.accumulate()
    split.close()
    for x, ((given,), _) in zip(batches, parts, strict=True):
        torch.testing.assert_close(given, x.expected)
    for (name, parameter), gradient in zip(module.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, msg=lambda text, name=name: f"{name}: {text}"
        )
