"""Compares a user's network under tensor and pipeline axes with one process: losses and all weights
after SGD, up to fp32 rounding.
"""

import functools

import pytest
import torch
from tests.parallel.groups import in_turn
from torch import nn

from stepgauge.runtime.launch import launch
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.plan.tensor import Rule
from stepgauge.spec.train import TrainSpec
from stepgauge.spec.user_model import UserModel
from stepgauge.train.rank_share import RankShare
from stepgauge.train.user_layout import UserCut, build_user_layout_step, uncut_axes
from stepgauge.train.user_model import UserParts
from stepgauge.train.user_task import user_task

CPU = torch.device("cpu")
MODEL = """
from collections import OrderedDict
import torch
from torch import nn
from stepgauge.spec.plan.tensor import Rule

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Pair(nn.Module):
    '''Returns two tensors; the second is passed on unchanged.'''
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, given):
        x, mean = given if isinstance(given, tuple) else (given, given.mean(-1, keepdim=True))
        return self.linear(x) + mean, mean

class Named(nn.Linear):
    def forward(self, given):
        return {"logits": super().forward(given[0]), "mean": given[1]}

class Contained(nn.Module):
    '''Computes differently for each type of input, and returns the given type of container.'''
    def __init__(self, container):
        super().__init__()
        self.linear, self.container = nn.Linear(6, 6), container
    def forward(self, given):
        if isinstance(given, dict):
            x = given["x"] - given["means"][0]
        elif isinstance(given, list):
            x = given[0] + 2 * given[1]
        else:
            x = given[0] * 3 if isinstance(given, tuple) else given
        x = torch.tanh(self.linear(x))
        mean = x.mean(-1, keepdim=True)
        return {list: [x, mean], tuple: (x,), dict: {"x": x, "means": (mean,)}}.get(self.container, x)

def drawn(number):
    return torch.Generator().manual_seed(number)

def text(number):
    tokens = torch.randint(11, (8, 5), generator=drawn(number))
    return tokens[:, :-1], tokens[:, 1:]

def cross_entropy(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

def tied():
    layers = [nn.Embedding(11, 8), *(Block(8) for _ in range(4)), nn.Linear(8, 11, bias=False)]
    layers[-1].weight = layers[0].weight
    return {"module": nn.Sequential(*layers), "batches": text, "loss": cross_entropy,
            "held_out": [text(100)], "table": {"*.up": Rule("column"), "*.down": Rule("row")}}

def named_loss(output, targets):
    loss = nn.functional.cross_entropy(output["logits"], targets["labels"])
    return loss + (output["mean"] * targets["weights"]).square().mean()

def pairs():
    def batch(number):
        x = torch.randn(8, 6, generator=drawn(number))
        return (x,), {"labels": x.argmax(1) % 3, "weights": x[:, :1]}
    module = nn.Sequential(*(Pair(6) for _ in range(4)), Named(6, 3))
    return {"module": module, "batches": batch, "loss": named_loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}

def matrices():
    '''The optimizer leaves the biases out, whose gradients count when all are clipped.'''
    chosen = lambda parameters: torch.optim.SGD([p for p in parameters if p.ndim > 1], lr=0.1)
    return {**containers(), "optimizer": chosen}

def containers():
    batches = lambda number: (([torch.randn(8, 6, generator=drawn(number))] * 2,), torch.ones(8, 6))
    kinds = {"structure": list, "output": tuple, "loss": dict, "targets": None}
    modules = OrderedDict((name, Contained(container)) for name, container in kinds.items())
    return {"module": nn.Sequential(modules), "batches": batches, "loss": nn.functional.mse_loss}

def without_loss():
    x = torch.randn(8, 6, generator=drawn(0))
    module = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3), nn.Tanh())
    return module, x
"""
STEPS, ROUNDING, CLIP = 3, 2e-6, 0.1
ON_TWO = [
    ("tied", "tp2"),
    ("tied", "pp2 1f1b m4"),
    ("tied", "pp2 zbv m2"),
    ("pairs", "pp2 zb-h1 m2"),
    ("pairs", "pp2 interleaved m2"),
    ("containers", "pp2 zbv m2"),
    ("without_loss", "pp2 1f1b m2"),
]
ON_FOUR = [
    ("tied", "dp2 zero1 tp2"),
    ("tied", "dp2 zero3 tp2"),
    ("tied", "pp2 1f1b m2 tp2"),
    ("tied", "dp2 zero2 pp2 1f1b m2"),
    ("matrices", "dp2 zero2 pp2 1f1b m2"),
    ("pairs", "dp2 zero1 pp2 zbv m2"),
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


@pytest.mark.parametrize(("ranks", "cases"), [(2, ON_TWO), (4, ON_FOUR)])
def test_ranks_equal_one_process(file, ranks, cases):
    for found in launch(differences, str(file), cases, ranks=ranks):
        assert found == {}


def differences(file, cases):
    """Returns a description of each case that differs from one process."""
    torch.set_num_threads(1)
    found = in_turn({case: functools.partial(difference, file, *case) for case in cases})
    return {case: text for case, text in found.items() if text}


def difference(file, factory, text):
    model, layout = UserModel.read(f"{file}:{factory}"), Layout.parse(text)
    place = RankShare.of(layout, torch.distributed.get_rank())
    spec = LayoutSpec(
        model=model, layout=text, optimizer="adamw" if factory in ("pairs", "matrices") else "sgd"
    )
    built = build_user_layout_step(spec, layout=layout, device=CPU, lr=0.1)
    alone = build_user_layout_step(spec, layout=Layout(), device=CPU, lr=0.1)
    for step in range(STEPS):
        loss = built.step.gradients(built.arguments(step * layout.data + place.data_rank))
        norm = built.step.parallel.clip_gradients(CLIP)
        built.step.update()
        every = [alone.arguments(step * layout.data + n) for n in range(layout.data)]
        expected = alone.step.accumulate(every, count=layout.data)
        expected_norm = alone.step.parallel.clip_gradients(CLIP)
        alone.step.update()
        if not torch.allclose(norm.float(), expected_norm, rtol=1e-5):
            return f"norm of step {step}: {norm} instead of {expected_norm}"
        if not torch.allclose(place.mean(loss.clone()), expected, atol=ROUNDING):
            return f"loss of step {step}: {place.mean(loss)} instead of {expected}"
    state = built.step.parallel.state().get("model")
    if place.rank == 0:
        wanted = alone.step.module.state_dict()
        if missing := set(wanted) ^ set(state):
            return f"names {sorted(missing)}"
        apart = {n: (state[n] - value).abs().max().item() for n, value in wanted.items()}
        return {n: most for n, most in apart.items() if most > ROUNDING}
    return ""


def test_a_run_resumes_under_other_axes(file):
    """The state has the names of the whole network, and the held-out loss is the same."""
    losses = launch(held_out_of, str(file), ranks=2)
    assert losses[0] == losses[1]
    first, *others = losses[0]
    assert others == [pytest.approx(first, abs=ROUNDING)] * len(others)


def held_out_of(file):
    torch.set_num_threads(1)
    found, state = [], None
    for text in ("tp2", "pp2 1f1b m2", "dp2 zero1"):
        layout = Layout.parse(text)
        spec = TrainSpec(model=UserModel.read(f"{file}:tied"), layout=text)
        place = RankShare.of(layout, torch.distributed.get_rank())
        task = user_task(spec, place=place, spread=over(spec, layout))
        if state is None:  # from which the other layouts resume
            task.step.accumulate(task.micro_batches(0), count=1)
            task.step.update()
            state = task.step.parallel.state()
            every = [None, None]
            torch.distributed.all_gather_object(every, state)
            state = every[0]
        task.step.parallel.load(state)
        found.append(task.evaluate())
    return found


def over(spec, layout):
    from stepgauge.train.user_layout import over_layout

    return over_layout(spec, layout, CPU)


def test_stages_have_about_equal_flops():
    layers = [nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 16), nn.Linear(16, 4)]
    parts = UserParts.of((nn.Sequential(*layers), torch.ones(4, 4)), "here")
    cut = UserCut.of(parts, Layout.parse("pp2 1f1b m2"), CPU)
    assert cut.stages == [range(4), range(4, 5)] or cut.stages == [range(3), range(3, 5)]
    assert [[*stage.state_dict()] for stage in cut.stages_of(parts.module)][1][0][0] in "34"


@pytest.mark.parametrize(
    ("parts", "layout", "message"),
    [
        ((nn.Linear(4, 4), torch.ones(4, 4)), "pp2 1f1b", "module is a Linear; a pipeline cuts an"),
        ((nn.Linear(4, 4), torch.ones(4, 4)), "pp2 1f1b m3", "module is a Linear; a pipeline cuts an"),
        ((nn.Sequential(*[nn.Linear(4, 4)] * 3), torch.ones(4, 4)), "pp2 1f1b", "a module twice"),
        (
            (nn.Sequential(nn.Linear(4, 4), nn.GELU()), torch.ones(4, 4)), "pp2 zbv m2",
            "has 4 stages; the nn.Sequential has 2 modules",
        ),
        (
            (nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.ones(4, 4)),
            "pp2 1f1b m3", "shape (4, 4), whose first dimension cannot be divided into the 3",
        ),
        ((nn.Sequential(nn.Linear(4, 4)), {"x": 1}), "pp2 1f1b", "batch contains int; a pipeline"),
        ((nn.Sequential(nn.Linear(4, 4)), torch.ones(4, 4)), "tp2", "factory returns as 'table'"),
        (
            {"module": nn.Linear(4, 4), "batch": torch.ones(4, 4), "table": {"up": Rule("row")}},
            "tp2", "'up' matches no module",
        ),
    ],
)  # fmt: skip
def test_networks_that_cannot_be_cut_are_refused(parts, layout, message):
    with pytest.raises(ValueError) as error:
        UserCut.of(UserParts.of(parts, "here"), Layout.parse(layout), CPU)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_axes_along_which_a_network_can_never_be_cut_are_known_from_its_structure():
    pair = (torch.ones(4, 4), torch.ones(4, 4))
    uncut = uncut_axes(UserParts.of((nn.Bilinear(4, 4, 4), pair), "here"))
    assert "a pipeline cuts an nn.Sequential" in uncut["pipeline"] and "table" in uncut["tensor"]
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    both = {"module": layers, "table": {"0": Rule("column"), "1": Rule("row")}}
    assert uncut_axes(UserParts.of({**both, "batch": torch.ones(4, 4)}, "here")) == {}
    uncut = uncut_axes(UserParts.of({**both, "batch": pair}, "here"))
    assert uncut == {"pipeline": "the batch has 2 inputs; an nn.Sequential takes one"}


class Doubles(nn.Sequential):
    def __call__(self, x):
        return 2 * super().__call__(x)


class ReturnsText(nn.Linear):
    def forward(self, x):
        return super().forward(x), "text"


class TakesText(nn.Linear):
    def forward(self, given):
        return super().forward(given[0])


def with_method(name, *arguments):
    """Returns an nn.Sequential on which a method was called."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    getattr(module, name)(*arguments)
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (with_method("register_forward_hook", print), "has hooks, which no stage would run"),
        (with_method("register_forward_pre_hook", print), "has hooks"),
        (with_method("register_full_backward_hook", print), "has hooks"),
        (with_method("register_full_backward_pre_hook", print), "has hooks"),
        (with_method("__setattr__", "forward", print), "with its own forward"),
        (Doubles(nn.Linear(4, 4), nn.Linear(4, 4)), "a Doubles with its own __call__"),
        (
            with_method("register_parameter", "scale", nn.Parameter(torch.ones(4))),
            "has 'scale' itself, which no stage would have",
        ),
        (with_method("register_buffer", "mean", torch.ones(4)), "has 'mean' itself"),
        (
            nn.Sequential(ReturnsText(4, 4), TakesText(4, 4)),
            "module '0' of the nn.Sequential returns str",
        ),
    ],
)
def test_a_sequential_that_does_more_than_call_its_modules_is_refused(module, message):
    with pytest.raises(ValueError) as error:
        UserCut.of(
            UserParts.of((module, torch.ones(4, 4)), "here"), Layout.parse("pp2 1f1b m2"), CPU
        )
    assert message in str(error.value) and "\n" not in str(error.value)


def test_inside_a_stage_modules_may_return_anything():
    module = nn.Sequential(ReturnsText(4, 4), TakesText(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    parts = UserParts.of((module, torch.ones(4, 4)), "here")
    assert UserCut.of(parts, Layout.parse("pp2 1f1b m2"), CPU).stages == [range(2), range(2, 4)]
