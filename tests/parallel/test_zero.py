"""Compares the sharded optimizer, stages 1 and 2, with one process that has the whole state."""

import collections
import contextlib
import copy
import functools
import inspect
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.parallel.networks import MICRO_BATCHES, STEPS, batch, make, train_alone
from tests.parallel.test_data_parallel import CLIP, loss_of, mlp
from torch import nn

from stepgauge.measure import footprint
from stepgauge.parallel.data_parallel import BucketedDataParallel
from stepgauge.parallel.replicas import DifferentModelsError
from stepgauge.parallel.shares import as_plain, as_share
from stepgauge.parallel.zero import ShardedOptimizer
from stepgauge.parallel.zero.owned_gradients import OwnerDataParallel
from stepgauge.parallel.zero.separate_updates import require_separate_updates
from stepgauge.runtime.launch import launch

SETTINGS = {"sgd": (torch.optim.SGD, {"lr": 0.3}), "adamw": (torch.optim.AdamW, {"lr": 0.01})}
CASES = [
    (stage, network, optimizer, every)
    for stage in (1, 2)
    for network in ("toy", "transformer", "bert")
    for optimizer in SETTINGS
    for every in (False, True)
]


def test_training_equals_one_process(two_ranks):
    for case in CASES:
        for rank in two_ranks:
            assert rank[case] < 1e-12, case


@pytest.mark.parametrize(
    "norm",
    [
        lambda gradient: gradient.norm(),
        lambda gradient: gradient.data.norm(2),
        lambda gradient: gradient.detach().norm().item() ** 2,
        lambda gradient: torch.norm(gradient),
        lambda gradient: torch.linalg.norm(torch.cat([gradient.view(-1), gradient.flatten()])),
        lambda gradient: nn.utils.get_total_norm([gradient]),
        lambda gradient: gradient.float().norm(),
        lambda gradient: gradient.pow(2).sum(),
        lambda gradient: (gradient * gradient).sum().sqrt(),
        lambda gradient: (gradient.double() ** 2).sum(),
        lambda gradient: torch.mul(gradient, other=gradient).sum(),
        lambda gradient: gradient.abs().max(),
    ],
)
def test_a_norm_of_gradients_that_only_this_rank_has_is_refused(norm):
    gradient = as_share(torch.ones(2, 2))
    with pytest.raises(
        RuntimeError, match="this rank has gradients only of the parameters that it owns"
    ):
        norm(gradient)
    assert torch.mul(gradient, other=0.5).sum() == 2, "a sum of scaled values is no norm"
    gradient.data.mul_(0.5)
    assert gradient.clamp_(max=0.25).sum() == 1, "the owner may change single values"


def test_clipping_counts_the_gradient_of_an_untied_weight_once(two_ranks):
    norms = [rank["norm after untying"] for rank in two_ranks]
    assert norms[0][0] == norms[1][0] == pytest.approx(norms[0][1].item(), rel=1e-6)


def test_different_parameters_are_refused_at_the_start(two_ranks):
    message = "the ranks' optimizers differ: parameter 0 is float32 of 4 values on rank 0"
    assert all(message in rank["different"] for rank in two_ranks)


def test_state_is_divided_and_has_the_predicted_size(two_ranks):
    measured = [rank["bytes"][0] for rank in two_ranks]
    assert measured == [rank["bytes"][1] for rank in two_ranks]
    assert sum(measured) == two_ranks[0]["bytes"][2]
    assert max(measured) < 0.6 * sum(measured)


def test_a_state_of_two_ranks_loads_on_four_and_in_one_process(two_ranks):
    whole, weights = two_ranks[0]["gathered"]
    assert two_ranks[1]["gathered"][0] is None
    alone = mlp()
    alone.load_state_dict(weights)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    optimizer.load_state_dict(
        copy.deepcopy(whole)
    )  # torch would update the tensors that are loaded
    for parameter, gradient in zip(alone.parameters(), expected_of_two(alone), strict=True):
        parameter.grad = gradient
    optimizer.step()
    for rank in launch(resharded, whole, weights, ranks=4):
        for name, parameter in alone.named_parameters():
            assert torch.equal(rank[name], parameter), name


def test_a_gradient_in_larger_memory_is_refused_on_ranks_that_do_not_get_its_mean(two_ranks):
    """Rank 0 owns the only weight, does not raise, and must not wait for rank 1."""
    assert two_ranks[0]["in larger memory"] == ""
    assert "the gradient of weight is part of larger memory" in two_ranks[1]["in larger memory"]


def test_an_error_of_a_failed_backward_is_not_raised_by_the_next(two_ranks):
    for rank in two_ranks:
        assert rank["after a failure"] == ""


def test_a_step_raises_versions_of_weights_on_all_ranks_and_can_be_compiled(two_ranks):
    """A graph that needs the weights from before the step then raises on every rank."""
    for rank in two_ranks:
        assert rank["written"] == [True] * 4 + [False]


def test_a_plain_optimizer_that_would_update_only_owned_weights_is_refused(two_ranks):
    for rank in two_ranks:
        assert rank["plain step"].endswith("step with the ShardedOptimizer")


def test_state_that_an_optimizer_makes_when_it_is_built_is_kept_by_the_owner(two_ranks):
    """As Adagrad did up to torch 2.12."""
    for rank in two_ranks:
        assert rank["momentum"] == ([-0.5, -0.5], 1)


def test_groups_are_those_that_the_optimizer_makes(two_ranks):
    """One that leaves parameters out or drops settings of a group does so as in one process."""
    groups = sgd_of_matrices([{"params": mlp().parameters(), "lr": 0.1}]).state_dict()
    for rank in two_ranks:
        assert rank["groups"] == groups["param_groups"]


def sgd_of_matrices(groups):
    return torch.optim.SGD([p for group in groups for p in group["params"] if p.ndim == 2], lr=0.5)


class Clipped(torch.optim.AdamW):
    """Clips in `step`, also parameters of different groups together."""

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return super().step(closure)


class StepsAnother(torch.optim.Optimizer):
    def __init__(self, groups, **settings):
        self.other = torch.optim.SGD(groups, **settings)
        super().__init__(self.other.param_groups, {})

    def step(self, closure=None):
        self.other.step()


class CountsSteps(torch.optim.SGD):
    """Does something in every tenth step, and counts the steps in an attribute."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.num_steps += 1
        if self.num_steps % 10 == 0:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.zero_()


class WithNoise(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p))


def groups_of(dtype=torch.float32, **settings):
    """Returns a group of a matrix and one of a vector, because optimizers may look across groups."""
    return [
        {"params": [nn.Parameter(torch.ones(shape, dtype=dtype))], **settings}
        for shape in ((3, 4), (4,))
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lr", [0.0, 1e-5, 1.0, torch.tensor(0.01)])
@pytest.mark.parametrize("optimizer", [Clipped, StepsAnother, CountsSteps])
def test_an_optimizer_that_needs_all_parameters_together_is_refused(optimizer, lr, dtype):
    message = f"{optimizer.__name__} needs all parameters together"
    with pytest.raises(ValueError, match=message):
        require_separate_updates(optimizer, groups_of(dtype, lr=lr))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optimizer",
    [
        *(each for each in vars(torch.optim).values() if inspect.isclass(each)),
        functools.partial(torch.optim.AdamW, fused=True, amsgrad=True),
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=False),
        WithNoise,
        sgd_of_matrices,
    ],
)
def test_an_optimizer_that_updates_each_parameter_separately_is_not_refused(optimizer, dtype):
    """LBFGS, and Muon for the vector, raise in the trial; ShardedOptimizer or they say why."""
    require_separate_updates(optimizer, groups_of(dtype))
    require_separate_updates(optimizer, groups_of(dtype)[:1])


class ClipsMatrices(torch.optim.SGD):
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_([p for p in parameters if p.ndim == 2], 1.0)
        return super().step(closure)


def test_a_norm_over_the_matrices_of_a_layer_with_biases_is_found():
    parameters = [*nn.Linear(3, 3).parameters(), *nn.Linear(3, 3).parameters()]
    with pytest.raises(ValueError, match="ClipsMatrices needs all parameters together"):
        require_separate_updates(ClipsMatrices, [{"params": parameters, "lr": 0.1}])


def test_the_trial_has_few_parameters_and_none_that_are_frozen():
    seen = []

    def build(groups):
        seen.extend(len(group["params"]) for group in groups)
        assert all(p.requires_grad for group in groups for p in group["params"])
        return torch.optim.SGD(groups)

    frozen = nn.Linear(3, 3).requires_grad_(False)
    many = [p for _ in range(100) for p in nn.Linear(3, 3).parameters()]
    require_separate_updates(build, [{"params": [*frozen.parameters(), *many]}])
    assert seen and max(seen) <= 8


def test_the_trial_compiles_nothing():
    """Shapes of the trial would count for the limit of recompilations, which ends the training of a
    function that is compiled as one graph.
    """
    compiled = []

    def backend(graph, _):
        compiled.append(graph)
        return graph.forward

    @torch.compile(backend=backend, dynamic=False, fullgraph=True)
    def update(p):
        p.sub_(p.grad)

    class Compiled(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for p in (p for group in self.param_groups for p in group["params"]):
                update(p)

    (group, _) = groups_of()
    require_separate_updates(Compiled, [group])
    assert not compiled
    group["params"][0].grad = torch.ones(3, 4)
    Compiled([group]).step()
    assert len(compiled) == 1


def test_the_trial_changes_neither_parameters_nor_groups_nor_random_numbers():
    groups = groups_of(lr=torch.tensor(0.5))
    before = copy.deepcopy(groups)
    random_state = torch.get_rng_state()
    require_separate_updates(WithNoise, groups)
    assert torch.equal(torch.get_rng_state(), random_state)
    for group, unchanged in zip(groups, before, strict=True):
        assert group == unchanged | {"params": group["params"]}
        assert torch.equal(group["params"][0], unchanged["params"][0])
        assert group["params"][0].grad is None


def step_with_ones(optimizer, module):
    """Takes a step with gradients of one."""
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def with_momentum(module):
    if not dist.is_initialized():
        return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)


def weights_after_two_steps(change):
    """Calls change(optimizer) between two steps with momentum, and returns the weights."""
    module = mlp()
    optimizer = with_momentum(module)
    step_with_ones(optimizer, module)
    change(optimizer)
    step_with_ones(optimizer, module)
    return module.state_dict()


def load_with_hooks(optimizer):
    """The hooks change the momentum before it is loaded, and after."""

    def halve_loaded(_, state_dict):
        state = {
            index: {"momentum_buffer": values["momentum_buffer"] / 2}
            for index, values in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def add_one(_):
        for values in optimizer.state.values():
            values["momentum_buffer"] += 1

    optimizer.register_load_state_dict_pre_hook(halve_loaded)
    optimizer.register_load_state_dict_post_hook(add_one)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def assign_a_new_state(optimizer):
    optimizer.state = collections.defaultdict(dict)


def move_to_another_group(optimizer):
    """The momentum of a parameter stays with it, whichever group it is in."""
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.add_param_group({"params": [moved], "lr": 0.01})


def read_the_state(optimizer):
    """Reading the state of a parameter that another rank owns leaves an empty entry."""
    for parameter in optimizer.param_groups[0]["params"]:
        optimizer.state[parameter].get("momentum_buffer")
    if dist.is_initialized():
        states = [optimizer.gathered_state_dict()]
        dist.broadcast_object_list(states)
    else:
        states = [optimizer.state_dict()]
    optimizer.load_state_dict(states[0])


def steps_of_a_copy_with_a_schedule():
    module = mlp()
    optimizer = with_momentum(module)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_with_ones(optimizer, module)
    copied, optimizer_of_copy = copy.deepcopy((module, optimizer))
    step_with_ones(optimizer_of_copy, copied)
    originals = {f"original {name}": weight for name, weight in module.state_dict().items()}
    return originals | copied.state_dict()


CHANGES = (load_with_hooks, assign_a_new_state, move_to_another_group, read_the_state)
TWO_STEPS = {each.__name__: functools.partial(weights_after_two_steps, each) for each in CHANGES}
TWO_STEPS["step a copy"] = steps_of_a_copy_with_a_schedule


@pytest.mark.parametrize("name", TWO_STEPS)
def test_state_and_groups_that_a_user_changes_count_as_in_one_process(two_ranks, name):
    expected = TWO_STEPS[name]()
    for rank in two_ranks:
        for parameter, weight in expected.items():
            torch.testing.assert_close(rank[name][parameter], weight, rtol=1e-12, atol=1e-12)


class BuiltWithState(torch.optim.SGD):
    def __init__(self, params, **settings):
        super().__init__(params, momentum=0.5, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)


@pytest.fixture(scope="module")
def two_ranks():
    return launch(all_checks, ranks=2)


def all_checks():
    found = {case: difference_from_one_process(*case) for case in CASES}
    found["different"] = different()
    found["bytes"] = state_bytes()
    found["gathered"] = gathered()
    found["in larger memory"] = gradient_in_larger_memory()
    found["after a failure"] = after_a_failure()
    found["written"] = versions_raised()
    found["plain step"] = step_of_a_plain_optimizer()
    found["norm after untying"] = norm_after_untying()
    found["momentum"] = step_by_momentum()
    found |= {name: steps() for name, steps in TWO_STEPS.items()}
    groups = [{"params": mlp().parameters(), "lr": 0.1}]
    found["groups"] = ShardedOptimizer(groups, sgd_of_matrices).state_dict()["param_groups"]
    return found


def step_by_momentum():
    """Takes a step from zero without gradients: by half of the momentum that the state began with.
    Returns the weights, and the number of parameters with state on this rank.
    """
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = ShardedOptimizer(parameters, BuiltWithState, lr=1.0)
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    optimizer.step()
    return [parameter.item() for parameter in parameters], len(optimizer.state)


def norm_after_untying():
    """load_state_dict(assign=True) gives the first of two tied layers a new weight without a
    gradient.
    """
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    parallel = OwnerDataParallel(module, owners={"0.weight": 0})
    parallel(torch.ones(1, 2)).sum().backward()
    gradient = module[1].weight.grad
    expected = as_plain(gradient).norm() if dist.get_rank() == 0 else None
    module.load_state_dict({"0.weight": torch.ones(2, 2)}, strict=False, assign=True)
    return parallel.clip_gradients(1e9), expected


def gradient_in_larger_memory():
    module, rank = nn.Linear(2, 2, bias=False), dist.get_rank()
    parallel = OwnerDataParallel(module, owners={"weight": 0})
    buffer = torch.zeros(6)
    module.weight.grad = buffer[:4].view(2, 2)
    message = ""
    try:
        parallel(torch.full((1, 2), 1.0 + rank)).sum().backward()
    except RuntimeError as error:
        message = str(error)
    assert buffer.tolist() == ([1.5] * 4 if rank == 0 else [0.0] * 4) + [0.0] * 2
    return message


def after_a_failure():
    module = nn.Linear(2, 2, bias=False)
    parallel = OwnerDataParallel(module, owners={"weight": 0})
    module.weight.grad = torch.zeros(6)[:4].view(2, 2)
    finish = BucketedDataParallel.finish_synchronizing

    def fails(self, failed=False):
        finish(self, failed)
        raise ValueError

    with (
        mock.patch.object(BucketedDataParallel, "finish_synchronizing", fails),
        pytest.raises(ValueError),
    ):
        parallel(torch.ones(1, 2)).sum().backward()
    module.weight.grad = None
    try:
        parallel(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def difference_from_one_process(stage, network, optimizer, every):
    """every: gradients are averaged after every micro-batch instead of once for their sum."""
    _, gradients, weights = train_alone(network, optimizer, 2, clip=CLIP)
    module = make(network, seed=dist.get_rank())
    build, settings = SETTINGS[optimizer]
    sharded = ShardedOptimizer(
        [p for p in module.parameters() if p.requires_grad], build, stage=stage, **settings
    )
    owners = {"owners": sharded.owners_of(module)} if stage == 2 else {}
    parallel = (OwnerDataParallel if owners else BucketedDataParallel)(module, 0.001, **owners)
    for step in range(STEPS):
        sharded.zero_grad()
        for micro in range(MICRO_BATCHES):
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last or every else parallel.no_sync():
                loss = parallel(*batch(step, micro, dist.get_rank())) / MICRO_BATCHES
                loss.backward()
        parallel.clip_gradients(CLIP)
        if stage == 2:
            for parameter, owner in sharded.owners.items():
                assert owner == dist.get_rank() or parameter.grad is None
        sharded.step()
    differences = [0.0]
    for name, parameter in module.named_parameters():
        differences.append((parameter.detach() - weights[name]).abs().max().item())
        if parameter.grad is not None:
            differences.append((parameter.grad - gradients[name]).abs().max().item())
    return max(differences)


def different():
    try:
        ShardedOptimizer(nn.Linear(2, 2 + dist.get_rank()).parameters(), torch.optim.SGD, lr=0.1)
    except DifferentModelsError as error:
        return str(error)


def trained():
    parallel = BucketedDataParallel(mlp())
    optimizer = ShardedOptimizer(parallel.parameters(), torch.optim.AdamW, lr=0.1)
    loss_of(parallel, dist.get_rank()).backward()
    optimizer.step()
    return parallel.module, optimizer


def versions_raised():
    """Returns whether a step raised the version of each parameter; the last one has no gradient."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(5)]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    for parameter in parameters[:-1]:
        parameter.grad = torch.ones(2)
    before = [parameter._version for parameter in parameters]
    torch.compile(optimizer.step, backend="eager")()
    return [p._version > version for p, version in zip(parameters, before, strict=True)]


def step_of_a_plain_optimizer():
    module = mlp()
    sharded = ShardedOptimizer(module.parameters(), torch.optim.SGD, stage=2, lr=0.1)
    parallel = OwnerDataParallel(module, owners=sharded.owners_of(module))
    loss_of(parallel, 0).backward()
    try:
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    except RuntimeError as error:
        return str(error)
    return "stepped"


def state_bytes():
    """Returns bytes of state as measured, as predicted from the plan, and on all ranks together, without
    the step counts of 4 bytes.
    """
    module, optimizer = trained()
    counts = sum(
        p.element_size() // 2 for p, owner in optimizer.owners.items() if owner == dist.get_rank()
    )
    predicted = optimizer.elements[dist.get_rank()] * 2 * 8
    return (
        footprint.state_bytes(optimizer) - counts,
        predicted,
        sum(p.numel() for p in module.parameters()) * 16,
    )


def gathered():
    module, optimizer = trained()
    return optimizer.gathered_state_dict(), module.state_dict()


def resharded(whole, weights):
    module = mlp()
    module.load_state_dict(weights)
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.load_state_dict(whole)
    for parameter, gradient in zip(module.parameters(), expected_of_two(module), strict=True):
        parameter.grad = gradient
    optimizer.step()
    return dict(module.state_dict())


def expected_of_two(module):
    total = sum(loss_of(module, rank) for rank in range(2)) / 2
    return torch.autograd.grad(total, list(module.parameters()))
