"""Pipelines compared with one process under SGD: loss, every gradient and every weight."""

import contextlib
import copy
import functools
import itertools
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.parallel.graphs import RunAgain
from tests.parallel.groups import in_turn
from tests.parallel.pipelines import batch, mean_loss, network, whole
from tests.schedules import random_schedule
from torch import nn
from torch.utils.checkpoint import checkpoint

from stepgauge.bench.pipeline_rehearsal import NoisyTransfers, rehearse
from stepgauge.cost.pipeline.timeline import Durations, simulate
from stepgauge.parallel.communication import peer_memory
from stepgauge.parallel.pipeline import Pipeline
from stepgauge.parallel.pipeline.host_lead import COMPUTATIONS, HostLead
from stepgauge.parallel.pipeline.split import SplitBackward, Watch, _is_plain_linear
from stepgauge.parallel.pipeline.step import PipelineStep
from stepgauge.parallel.pipeline.transfers import Transfers
from stepgauge.parallel.zero import ShardedOptimizer
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.pipeline import SCHEDULES, build, from_text, lower

STEPS, CLIP = 2, 0.3
# On two ranks: every schedule with every network, and some with networks that are checkpointed,
# compiled, have shared modules or are recorded ("graphed"). On four ranks: those with most stages.
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


def test_two_ranks_equal_one_process():
    others = ("mistakes", "spans", "waiting", "rehearsal", "norm dtype")
    for differences in launch(all_differences, ON_TWO, others, ranks=2):
        assert {case: text for case, text in differences.items() if text} == {}


def test_four_ranks_equal_one_process_as_one_pipeline_and_as_two_pipelines_of_two():
    others = ("data parallel", "sharded optimizer", "random schedules")
    for differences in launch(all_differences, ON_FOUR, others, ranks=4):
        assert {case: text for case, text in differences.items() if text} == {}


@pytest.mark.parametrize(
    ("schedule", "action"),
    [
        *(("1f1b", action) for action in ("1F2", "0B1", "0SEND_F1", "0RECV_B2")),
        *(("zb-h1", action) for action in ("1I2", "0W3")),
    ],
)
def test_a_rank_that_dies_in_an_action_ends_the_job_and_the_error_names_both(schedule, action):
    rank = action[0]
    with pytest.raises(
        RankError, match=rf"rank {rank} of 2: ZeroDivisionError: in {action}"
    ) as error:
        launch(die, schedule, action, ranks=2)
    assert f"in {action} on rank {rank} of the pipeline" in error.value.trace


def all_differences(cases, others):
    torch.set_num_threads(1)
    compared = {case: functools.partial(difference_from_one_process, *case) for case in cases}
    return in_turn(compared | {name: OTHERS[name] for name in others})


def difference_from_one_process(schedule_name, name):
    """Trains two steps with clipping, the second with two accumulated batches. Returns a description
    of the first difference, or "".
    """
    micro_batches = 8 if schedule_name == "dualpipev" else 4
    schedule = build(schedule_name, ranks=dist.get_world_size(), micro_batches=micro_batches)
    graphs = RunAgain() if name.endswith("graphed") else None
    name = name.removesuffix(" graphed")
    modules, ties, share = network(name, schedule.num_stages)
    reference = copy.deepcopy(modules)
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
    reference_parameters = list(
        dict.fromkeys(p for module in reference for p in module.parameters())
    )
    for number in range(STEPS):
        losses = []
        for accumulated in range(number + 1):
            tokens, all_targets, some_targets = batch(10 * number + accumulated)
            targets = some_targets if share else all_targets
            expected = mean_loss(whole(reference, tokens), targets)
            expected.backward()
            losses.append((pipeline.step((tokens,), (targets,)), expected.detach()))
        for loss, expected in losses:
            if loss is not None and not torch.allclose(loss, expected, atol=1e-6):
                return f"step {number}: loss {loss}, reference {expected}"
        norms = pipeline.clip(CLIP), torch.nn.utils.clip_grad_norm_(reference_parameters, CLIP)
        if not torch.allclose(*norms, atol=1e-5):
            return f"step {number}: norm {norms[0]}, reference {norms[1]}"
        if difference := difference_in_weights(pipeline, reference, number):
            return difference
        update(pipeline.parameters())
        update(reference_parameters)
    return difference_in_weights(pipeline, reference, STEPS)


class Failing(nn.Linear):
    fails = False

    def forward(self, x):
        if self.fails:
            raise ZeroDivisionError("a bad batch")
        return super().forward(x)


def after_a_failed_step():
    """Returns the errors of two steps, of which the first fails on rank 1, and the losses before and
    after them.
    """
    peer_memory.WAIT_S = 1.0  # in this process
    stages = [nn.Linear(3, 3), Failing(3, 3)]
    schedule = build("1f1b", ranks=2, micro_batches=2)
    pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss, transport="copies")
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 4, 3, generator=generator)
    losses, errors = [pipeline.step((x,), (y,))], []
    stages[1].fails = True
    for _ in range(2):
        with pytest.raises(Exception) as raised:
            pipeline.step((x + 1,), (y,))
        errors.append(str(raised.value))
    stages[1].fails = False
    dist.barrier()
    pipeline.close()
    return errors, [*losses, pipeline.step((x,), (y,))]


def test_a_step_after_one_that_raised_is_refused_until_the_pipeline_is_closed():
    for errors, (before, after) in launch(after_a_failed_step, ranks=2):
        assert "the last step of this pipeline raised" in errors[1]
        assert "call close() on all ranks" in errors[1] and errors[0] != errors[1]
        assert before is None or torch.equal(before, after)


def after_a_failed_rehearsal():
    """Returns the error of the step after a rehearsal that fails on rank 1, and the losses before it
    and after it.
    """
    stages = [nn.Linear(3, 3), Failing(3, 3)]
    schedule = build("1f1b", ranks=2, micro_batches=2)
    pipeline = Pipeline(stages, schedule, loss=nn.functional.mse_loss, transport="messages")
    x, y = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    step = functools.partial(pipeline.step, (x,), (y,))
    losses, error, stages[1].fails = [step()], "", True
    with (
        contextlib.suppress(ZeroDivisionError),
        pipeline.exchanging_by(NoisyTransfers({}, pipeline.device)),
    ):
        step()
    stages[1].fails = False
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError) as raised:
            step()
        error = str(raised.value)
    dist.barrier()
    pipeline.close()
    return error, [*losses, step()]


def test_a_rehearsal_that_raised_leaves_no_messages_on_their_way():
    for rank, (error, (before, after)) in enumerate(launch(after_a_failed_rehearsal, ranks=2)):
        assert not rank or "call close() on all ranks" in error
        assert before is None or torch.equal(before, after)


def test_complex_layers_are_not_split():
    assert _is_plain_linear(nn.Linear(2, 2))
    assert not _is_plain_linear(nn.Linear(2, 2, dtype=torch.complex64))


def test_the_host_waits_for_the_computation_a_few_before_the_last(monkeypatch):
    events = []

    class Event:
        def synchronize(self):
            events.append(("waits for", getattr(self, "number", None)))

        def record(self, stream):
            self.number = len(events)
            events.append(("launches", self.number))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    lead = HostLead(torch.device("cuda"))
    for _ in range(COMPUTATIONS + 2):
        lead.keep()
    launched = [number for kind, number in events if kind == "launches"]
    waited = [number for kind, number in events if kind == "waits for"]
    assert waited == [None] * COMPUTATIONS + launched[:2]


def difference_in_weights(pipeline, reference, number):
    """Describes the first weight or gradient of this rank that differs from the reference, or ""."""
    for stage, module in pipeline.modules.items():
        for (name, actual), expected in zip(
            module.named_parameters(), reference[stage].parameters(), strict=True
        ):
            place = f"step {number}, stage {stage}, {name}"
            if not torch.allclose(actual, expected, atol=1e-6):
                return f"{place}: weight differs"
            if (actual.grad is None) != (expected.grad is None):
                return f"{place}: gradient is {actual.grad}, expected {expected.grad}"
            if actual.grad is not None and not torch.allclose(
                actual.grad, expected.grad, atol=1e-6
            ):
                return f"{place}: gradient differs"
    return ""


@torch.no_grad()
def update(parameters):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= 0.5 * parameter.grad
        parameter.grad = None


def mistakes():
    """Each mistake raises on all ranks, before anything is sent."""
    schedule = build("1f1b", ranks=2, micro_batches=4)
    deadlock = from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    modules, _, _ = network("list", 2)
    for call, message in (
        (lambda: Pipeline(modules[:1], schedule), "there are 1 modules; the schedule has 2 stages"),
        (
            lambda: Pipeline(modules, build("1f1b", ranks=3, micro_batches=4)),
            "schedule is for 3 ranks; there are 2",
        ),
        (
            lambda: Pipeline(modules, deadlock),
            "the schedule deadlocks",
        ),
        (
            lambda: Pipeline(modules, schedule).step((torch.zeros(6, 2),)),
            "the batch is 6; 4 micro-batches must divide it",
        ),
        (
            lambda: Pipeline(modules, build("1f1b", ranks=2, micro_batches=2 + dist.get_rank())),
            "the schedule of rank 1 differs from that of rank 0",
        ),
        (  # only rank 1 has the schedule that cannot run
            lambda: Pipeline(modules, deadlock if dist.get_rank() else schedule),
            "the schedule of rank 1 differs from that of rank 0",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    return ""


def spans():
    """The pipeline runs the simulated actions in the simulated order, and `close` restores the
    modules.
    """
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
    calls = itertools.count()
    pipeline.clock.level = lambda: next(calls)
    pipeline.step((tokens,), (targets,))
    if pipeline.clock.levels != list(range(2 * len(ran))):
        return "clock.level must be called at the start and the end of each action"
    pipeline.close()
    after = {type(layer) for module in modules for layer in module.modules()}
    return "" if kinds - after and nn.Linear in after else f"layers left: {after}"


class HandClock:
    """A clock that the test sets."""

    def __init__(self):
        self.seconds = 0.0

    def perf_counter(self):
        return self.seconds


class Timed(nn.Linear):
    """A layer whose forward takes one second of the clock."""

    def __init__(self, clock):
        super().__init__(2, 2)
        self.hand_clock = clock

    def forward(self, x):
        self.hand_clock.seconds += 1
        return super().forward(x)


def waiting():
    """The time in which a rank waits for another one is in no span."""
    clock, take = HandClock(), Transfers.take

    def take_after_an_hour(transfers, action):
        clock.seconds += 3600
        return take(transfers, action)

    schedule = build("1f1b", ranks=2, micro_batches=2)
    modules = [Timed(clock), nn.Linear(2, 2)]
    pipeline = Pipeline(modules, schedule, loss=lambda y: y.square().mean(), recording=True)
    with (
        mock.patch.object(Transfers, "take", take_after_an_hour),
        mock.patch("stepgauge.parallel.pipeline.clock.time", clock),
    ):
        pipeline.step((torch.ones(4, 2),))
        durations = {str(action): end - start for action, start, end in pipeline.spans}
    forward = 0.0 if dist.get_rank() else 1e3
    expected = {name: forward if "F" in name else 0.0 for name in durations}
    waited = clock.seconds >= 7200
    return "" if durations == expected and waited else f"{durations}, {clock.seconds} s"


def rehearsal():
    """Pauses are not counted, nothing is sent, and the next step exchanges tensors again."""
    clock, rank = HandClock(), dist.get_rank()
    schedule = build("1f1b", ranks=2, micro_batches=2)
    modules = [Timed(clock), nn.Linear(2, 2)]
    pipeline = Pipeline(modules, schedule, loss=lambda y: y.square().mean(), recording=True)
    step = functools.partial(pipeline.step, (torch.ones(4, 2),))
    step()
    gradients = [parameter.grad.clone() for parameter in pipeline.parameters()]
    simulated = simulate(pipeline.schedule, Durations.of_stages(2, forward=1e3)).ranks[rank]
    slept = []
    with (
        mock.patch("stepgauge.parallel.pipeline.clock.time", clock),
        mock.patch("stepgauge.bench.pipeline_rehearsal.time.sleep", slept.append),
        mock.patch.object(Transfers, "send", side_effect=AssertionError("a rehearsal sends")),
    ):
        times = rehearse(pipeline, step, simulated)
    expected = {(rank, "F"): 0.0 if rank else 1e3, (rank, "B"): 0.0}
    for parameter in pipeline.parameters():
        parameter.grad = None
    step()
    again = [parameter.grad for parameter in pipeline.parameters()]
    is_same = all(torch.equal(*pair) for pair in zip(gradients, again, strict=True))
    return "" if times == expected and slept and is_same else f"{times}, {slept}, {is_same}"


def test_a_pipeline_of_one_rank_sends_nothing():
    assert launch(one_rank, ranks=1) == [""]


def one_rank():
    modules, ties, share = network("transformer", 2)
    reference = copy.deepcopy(modules)
    schedule = build("interleaved", ranks=1, micro_batches=4)
    pipeline = Pipeline(
        modules, schedule, loss=mean_loss, tied=ties, share=share, transport="copies"
    )
    tokens, targets, _ = batch(0)
    mean_loss(whole(reference, tokens), targets).backward()
    pipeline.step((tokens,), (targets,))
    return difference_in_weights(pipeline, reference, 0)


def random_schedules():
    for seed in range(3):
        schedule = random_schedule(random.Random(seed), ranks=4, stages=6, micro_batches=4)
        modules, ties, _ = network("list", 6)
        reference = copy.deepcopy(modules)
        lowered = lower(schedule, ahead=seed)
        pipeline = Pipeline(modules, lowered, loss=mean_loss, tied=ties, transport="copies")
        tokens, targets, _ = batch(seed)
        mean_loss(whole(reference, tokens), targets).backward()
        pipeline.step((tokens,), (targets,))
        if difference := difference_in_weights(pipeline, reference, seed):
            return difference
    return ""


def data_parallel():
    """Two pipelines of two ranks with different batches. `reduce` averages their gradients."""
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
    reference = copy.deepcopy(modules)
    pipeline = Pipeline(
        modules, schedule, loss=mean_loss, tied=ties, reduce=reduce, group=pipes[rank // 2]
    )
    for seed in range(2):
        tokens, targets, _ = batch(seed)
        (mean_loss(whole(reference, tokens), targets) / 2).backward()
    tokens, targets, _ = batch(rank // 2)
    pipeline.step((tokens,), (targets,))
    return difference_in_weights(pipeline, reference, 0)


def sharded_optimizer():
    """Two pipelines whose stages' gradients go to the owners of a sharded optimizer, without a
    layout. The second step adds to the averages of the first.
    """
    rank = dist.get_rank()
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for schedule in ("1f1b", "zb-h1"):
        modules, _, _ = network("transformer untied", 2)
        reference = copy.deepcopy(modules[rank % 2])
        whole_reference = copy.deepcopy(modules)
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
                (mean_loss(whole(whole_reference, tokens), targets) / 2).backward()
            tokens, targets, _ = batch(2 * number + rank // 2)
            with wrapped.no_sync():
                pipeline.step((tokens,), (targets,))
            wrapped.finish_synchronizing()
        owned.step()
        with torch.no_grad():
            for updated, trained, initial in zip(
                wrapped.parameters(),
                whole_reference[rank % 2].parameters(),
                reference.parameters(),
                strict=True,
            ):
                expected = initial if trained.grad is None else initial - trained.grad
                if not torch.allclose(updated, expected, atol=1e-6):
                    return f"{schedule}: {(updated - expected).abs().max()}"
    return ""


def norm_dtype():
    """The norm of float64 gradients is float64."""
    modules = [nn.Linear(3, 3).double() for _ in range(2)]
    pipeline = Pipeline(
        modules, build("1f1b", ranks=2, micro_batches=2), loss=lambda y: y.square().mean()
    )
    pipeline.step((torch.ones(4, 3, dtype=torch.float64),))
    gradients = [p.grad for p in pipeline.parameters()]
    square = torch.nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    norm = pipeline.clip(1e9)
    return "" if norm.dtype == torch.float64 and torch.equal(norm, square.sqrt()) else str(norm)


OTHERS = {
    "mistakes": mistakes,
    "spans": spans,
    "waiting": waiting,
    "rehearsal": rehearsal,
    "norm dtype": norm_dtype,
    "data parallel": data_parallel,
    "sharded optimizer": sharded_optimizer,
    "random schedules": random_schedules,
}


def die(schedule_name, action):
    schedule = build(schedule_name, ranks=2, micro_batches=4)
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    pipeline = Pipeline(modules, schedule, loss=lambda y: y.square().mean())
    original = PipelineStep.run

    def run(step, current):
        if str(current) == action:
            raise ZeroDivisionError(f"in {action}")
        original(step, current)

    PipelineStep.run = run
    pipeline.step((torch.ones(4, 2),))


def test_subclasses_of_linear_are_split_and_restored_unless_they_override_forward():
    class Fused(nn.Linear):
        pass

    class Overrides(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = nn.Sequential(Fused(4, 8), Overrides(8, 8), nn.Linear(8, 2))
    with Watch(module) as watch:
        module(torch.randn(2, 4))
    split = SplitBackward(module, watch.splittable)
    assert [layer.out_features for layer in split.layers] == [8, 2]
    split.close()
    assert [type(layer) for layer in module] == [Fused, Overrides, nn.Linear]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.first(self.first(x)))


class TwiceCheckpointed(Twice):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("make", [Twice, TwiceCheckpointed])
def test_a_compiled_module_with_split_layers_is_a_single_graph(make):
    """From its first forward on, because a module whose compilation fails then stays eager."""
    module = make()
    with Watch(module) as watch:
        module(torch.randn(2, 4))
    split = SplitBackward(module, watch.splittable)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        with split.forward() as calls:
            loss = compiled(torch.randn(2, 4)).sum()
        assert len(calls) == 3
        _, factors = split.input_gradients([loss], [torch.ones(())], [], calls)
        assert all(each.x is not None and each.dy is not None for each in factors)


class Sums(nn.Module):
    """The terms of a sum share one gradient tensor: here p, q, the input and the layer's output."""

    def __init__(self):
        super().__init__()
        self.p, self.q = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4))
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x) + x + (self.p + self.q)


class Direct(nn.Module):
    """The weight is used by its layer and directly; the layer is called with a keyword."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(input=x) @ self.layer.weight


class Spread(nn.Module):
    """The gradient of p is an expanded tensor, whose elements share memory."""

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
def test_a_split_backward_equals_autograd_however_the_module_uses_its_weights(make):
    """Runs two micro-batches with both W after both I, and compares the sums with autograd's."""
    module = make()
    batches = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    expected = [torch.zeros_like(p) for p in module.parameters()]
    for x in batches:
        gradients = torch.autograd.grad(module(x).square().sum(), [*module.parameters(), x])
        x.expected = gradients[-1].clone()
        expected = [a + b for a, b in zip(expected, gradients, strict=False)]
    with Watch(module) as watch, torch.no_grad():
        module(batches[0])
    split = SplitBackward(module, watch.splittable)
    losses, calls = [], []
    for x in batches:
        with split.forward() as forward_calls:
            losses.append(module(x).square().sum())
        calls.append(forward_calls)
    parts = [
        split.input_gradients([loss], [torch.ones(())], [x], forward_calls)
        for loss, x, forward_calls in zip(losses, batches, calls, strict=True)
    ]
    for _, factors in parts:
        for each in factors:
            each.accumulate()
    split.close()
    for x, ((input_gradient,), _) in zip(batches, parts, strict=True):
        torch.testing.assert_close(input_gradient, x.expected)
    for (name, parameter), gradient in zip(module.named_parameters(), expected, strict=True):
        torch.testing.assert_close(
            parameter.grad, gradient, msg=lambda text, name=name: f"{name}: {text}"
        )
