"""Layouts against one process: loss, norm, every weight after SGD (so every gradient), optimizer
state under AdamW, and states that another layout goes on from.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.parallel.graphs import RunAgain
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepgauge.models.bert import NOT_MASKED
from stepgauge.parallel.fsdp.gradient_reductions import GradientReductions
from stepgauge.parallel.fsdp.unsharded_unit import UnshardedUnit
from stepgauge.parallel.layout import Network, spread
from stepgauge.parallel.pipeline.split import SplitLinear
from stepgauge.parallel.wrappers import Settings
from stepgauge.runtime.launch import launch
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan import tensor as plan
from stepgauge.train import layout as train_layout
from stepgauge.train.build import batch_for
from stepgauge.train.checkpoint import Checkpoints
from stepgauge.train.layout import build_layout_step

STEPS, BATCHES, CLIP = 2, 2, 0.05
NAMES = "parameters the names that they have in the whole network"
SHAPE = {"vocab_size": 11, "context_length": 8, "d_model": 16, "d_ff": 24}
NETWORKS = {
    "tied": ModelSpec(
        **SHAPE,
        num_layers=4,
        num_heads=4,
        num_kv_heads=1,
        tied_head=True,
        positions="learned",
        feed_forward_bias=True,
    ),
    "grouped": ModelSpec(
        **SHAPE, num_layers=4, num_heads=4, num_kv_heads=1, qk_norm=True, loss="fused"
    ),
    "ring": ModelSpec(
        **SHAPE,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        positions="learned",
        attention="triton",
    ),
    "windowed": ModelSpec(**SHAPE, num_layers=2, num_heads=4, window=3, full_attention_every=2),
    "bert": BertSpec(**SHAPE, num_positions=8, num_layers=4, num_heads=4, dropout=0.0),
}
ON_TWO = [
    ("tp2", "tied", "adamw"),
    ("dp2 bucketed", "bert", "sgd"),
    ("cp2", "ring", "adamw"),
    ("cp2 ulysses zero2", "windowed", "sgd"),
    ("pp2 1f1b m2", "tied", "adamw"),
    ("pp2 zbv m2", "tied", "sgd"),
    ("pp2 zb-h1 m4", "bert", "sgd"),
]
ON_FOUR = [
    ("dp2 bucketed tp2", "tied", "sgd"),
    ("dp2 zero1 tp2", "grouped", "adamw"),
    ("dp2 zero2 tp2", "bert", "adamw"),
    ("dp2 zero3 tp2", "tied", "adamw"),
    ("dp2 zero3 tp2 overlap", "grouped", "sgd"),
    ("cp2 tp2", "ring", "sgd"),
    ("dp2 cp2 zero1", "ring", "adamw"),
    ("cp2 ulysses tp2", "windowed", "adamw"),
    ("dp2 cp2 ulysses zero3", "ring", "sgd"),
    ("pp2 1f1b m2 cp2 ulysses", "windowed", "sgd"),
    ("dp2 cp2 zero3", "ring", "sgd"),
    ("pp2 1f1b m2 cp2", "ring", "adamw"),
    ("pp2 zb-h1 m2 cp2", "ring", "sgd"),
    ("pp2 interleaved m2 tp2", "grouped", "sgd"),
    ("cp2 tp2 overlap", "ring", "sgd"),
    ("pp2 1f1b m2 tp2 overlap", "tied", "adamw"),
    ("pp2 1f1b m2 dp2 bucketed", "tied", "sgd"),
    ("pp2 zbv m2 dp2 zero1", "tied", "adamw"),
    ("pp2 1f1b m2 dp2 zero2", "bert", "adamw"),
    ("pp2 zbv m2 dp2 zero2", "tied", "adamw"),
    ("pp2 zb-h1 m4 dp2 zero2", "bert", "sgd"),
    ("pp2 1f1b m2 dp2 zero3", "tied", "adamw"),
    ("pp2 interleaved m2 dp2 zero3", "grouped", "sgd"),
]
# Where ranks round where one process does the bound is 0 but for the order of sums. Under zero3 norms
# and the embedding are in bf16 too, which they are not in one process.
ROUNDED_ON_TWO = {
    "dp2 zero2": 0.01,
    "pp2 1f1b m2": 0.01,
    "tp2": 1.25,
    "tp2 overlap": 1.25,
    "cp2": 1.25,
    "cp2 ulysses zero2": 1.25,
}
ROUNDED_ON_FOUR = {"dp2 zero2 tp2": 1.25, "pp2 1f1b m2 tp2": 1.25}
ADDED_TO_MEANS = ("pp2 1f1b m2 dp2 zero2", "pp2 zb-h1 m2 dp2 zero2", "pp2 zbv m2 dp2 bucketed")
RECORDED = ("pp2 1f1b m2 dp2 bucketed", "pp2 1f1b m4 dp2 zero1")
CUT = (
    ("tp2", "grouped"),
    ("tp2 overlap", "grouped"),
    ("cp2", "ring"),
    ("cp2 ulysses", "windowed"),
)
ON_EIGHT = [
    ("pp2 1f1b m2 dp2 zero1 tp2", "tied", "adamw"),
    ("pp2 1f1b m2 dp2 zero3 tp2", "grouped", "sgd"),
    ("dp2 zero2 cp2 ulysses tp2", "windowed", "adamw"),
    ("pp2 1f1b m2 cp2 tp2 overlap", "ring", "sgd"),
    ("pp2 1f1b m2 dp2 cp2 zero1", "ring", "adamw"),
]


def test_two_ranks_are_one_process():
    checks = [(check, *case) for case in CUT for check in (work_of_backward, of_a_copy)]
    find_nothing(2, differences_of(ON_TWO) + checks + [(of_torchs_tensor_parallel,)])


def test_four_ranks_are_one_process():
    checks = [(gathers_of_sharded_stages,), (unwritten_where_parts_are_uneven,)]
    checks += [(recorded, layout) for layout in RECORDED]
    checks += [(sums_of_means, layout) for layout in ADDED_TO_MEANS]
    checks += [(with_blocks_compiled, "dp2 zero3 tp2 overlap", "grouped", "sgd")]
    find_nothing(4, differences_of(ON_FOUR) + checks)


def test_eight_ranks_are_one_process():
    find_nothing(8, differences_of(ON_EIGHT))


def differences_of(cases):
    return [(differences, *case) for case in cases]


def find_nothing(ranks, checks):
    """Runs all checks, a function and its arguments each, in one start of so many ranks."""
    for found in launch(run_checks, checks, ranks=ranks):
        assert found == {}


def run_checks(checks):
    """What each check found, in words, if it found anything."""
    torch.set_num_threads(1)
    plan.LEAST_OVERLAPPED_BYTES = 0  # in this process
    found = {(check.__name__, *arguments): check(*arguments) for check, *arguments in checks}
    return {check: told for check, told in found.items() if told}


def test_what_ranks_are_told():
    for minds, ways, name, rate in launch(what_they_are_told, ranks=3):
        assert ways == [
            "layout 'bucketed cp3' has a context axis; the network has no cut_sequences",
            "layout 'pp3 1f1b m3' has a pipeline axis; the network has no schedule",
            "layout 'tp3' has a tensor axis; the network has no table with rules",
        ]
        assert minds == "the ranks' layouts differ: rank 0 has 'tp2', rank 1 has 'dp2 bucketed'"
        assert name == "stages 0 and 1 both have a parameter weight; give each stage's " + NAMES
        assert rate == 1.0


def what_they_are_told():
    ranks = dist.get_world_size()
    return of_two_minds(), without_a_way(), of_one_name(ranks), rate_after_loading(ranks)


def without_a_way():
    """What is said where the network does not say how it is spread over an axis."""
    network = Network(build=lambda _: torch.nn.Linear(1, 1))
    layouts = map(Layout.parse, ("cp3", "pp3 1f1b m3", "tp3"))
    return [said_of(layout, network) for layout in layouts]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ROUNDED_ON_TWO), (4, ROUNDED_ON_FOUR)])
def test_mixed_precision_rounds_as_one_process_does(ranks, layouts):
    """What a layout's update differs by from one process in bf16, over what that one differs by from
    fp32: nothing where both round in the same places. Parts that are rounded before they are summed
    (tensor, keys of a ring) are as far from one process as rounding itself, not farther.
    """
    for layout, ratio in launch(rounding_of, layouts, ranks=ranks)[0].items():
        assert ratio < layouts[layout], (layout, ratio)


def rounding_of(layouts):
    torch.set_num_threads(1)
    plan.LEAST_OVERLAPPED_BYTES = 0  # in this process
    found = {}
    for layout in layouts:
        spec = LayoutSpec(
            model=NETWORKS["ring"], layout=layout, batch=8, optimizer="sgd", precision="bf16"
        )
        precise = dataclasses.replace(spec, precision="fp32")
        parts = spec.parsed_layout.data * spec.parsed_layout.microbatches
        asked = (spec, spec.parsed_layout, 1), (spec, Layout(), parts), (precise, Layout(), parts)
        ours, alone, exact = (update_of(*each) for each in asked)
        found[layout] = ((ours - alone).norm() / (alone - exact).norm()).item()
    return found


def update_of(spec, axes, parts):
    """What a step of SGD adds to all weights, on rank 0; its batch in so many, one after another."""
    step, place = build(spec, axes), axes.place(dist.get_rank())["data"]
    before = {name: x.clone() for name, x in weights_of(step).items()}
    own = [part.chunk(axes.data)[place] for part in batch_for(spec.model, spec.batch, 0)]
    for batch in zip(*(part.chunk(parts) for part in own), strict=True):
        step.gradients(batch, batches=parts)
    step.update()
    after = weights_of(step)
    return torch.cat([(after[name] - before[name]).flatten() for name in after])


def weights_of(step):
    whole = step.parallel.state()
    return whole["model"] if dist.get_rank() == 0 else {"": torch.zeros(1)}


def work_of_backward(layout, network):
    """What backward computes or sends again under a checkpointing that keeps attention: nothing of
    attention, of products beside which ranks send, or of what is sent. Gathers before other products
    are as large as what all ranks have together, and not kept.
    """
    told, expected = [], None
    for checkpointing in ("none", "feed-forward", "selective"):
        spec = LayoutSpec(
            model=NETWORKS[network], layout=layout, batch=8, checkpointing=checkpointing
        )
        step = build(spec, spec.parsed_layout)
        with Counting() as counting:
            step.gradients(batch_for(spec.model, spec.batch, 0))
        gradients = {name: p.grad for name, p in step.module.named_parameters()}
        expected = expected or (counting.operators, gradients)
        if checkpointing == "selective" or "tp" not in layout:
            told += differing(f"{checkpointing} {layout}", counting.operators, expected[0])
        told += differing(f"{checkpointing} {layout}", gradients, expected[1])
    return told


def of_a_copy(layout, network):
    """Gradients of a deep copy, after the first forward was one of inference: what is made in it
    and kept takes part in backward afterwards.
    """
    spec = LayoutSpec(model=NETWORKS[network], layout=layout, batch=8)
    batch, step = batch_for(spec.model, spec.batch, 0), build(spec, spec.parsed_layout)
    with torch.inference_mode():
        step.evaluate(batch)
    copied = copy.deepcopy(step.module)
    step.gradients(batch)
    copied(*batch).backward()
    modules = copied, step.module
    return differing("copy", *({n: p.grad for n, p in m.named_parameters()} for m in modules))


class Counting(TorchDispatchMode):
    """Of operators that send, or that compute attention or products beside what is sent."""

    def __init__(self):
        super().__init__()
        self.operators = collections.Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        counts = name.startswith(("stepgauge::", "c10d::", "_c10d_functional::"))
        if (counts or "attention" in name) and not name.endswith(
            ("wait_tensor", "all_gather_into_tensor")
        ):
            self.operators[name] += 1
        return operator(*args, **(kwargs or {}))


def recorded(layout):
    """With stages that are recorded, by a recorder that runs them again."""
    graphs, train_layout.CudaGraphs = train_layout.CudaGraphs, lambda device: RunAgain()
    try:
        return differences(layout, "tied", "sgd", device="cuda", cuda_graphs=True)
    finally:
        train_layout.CudaGraphs = graphs


def sums_of_means(layout):
    """Batches of which some are averaged, and others added to means under no_sync()."""
    spec = LayoutSpec(model=NETWORKS["tied"], layout="pp2 1f1b m2 dp2", batch=8, optimizer="sgd")
    parsed = Layout.parse(layout)
    ours, alone = build(spec, parsed), build(spec, Layout())
    place = parsed.place(dist.get_rank())["data"]
    for number, averages in enumerate((True, True, False, True)):
        batch = batch_for(spec.model, spec.batch, number)
        own = [part.chunk(parsed.data)[place] for part in batch]
        with contextlib.nullcontext() if averages else ours.parallel.no_sync():
            ours.gradients(own, batches=4)
        alone.gradients(batch, batches=4)
    told = differing("norm", *(step.parallel.clip_gradients(CLIP) for step in (ours, alone)))
    splits = any(isinstance(layer, SplitLinear) for layer in ours.parallel.module.modules())
    return told if splits or "1f1b" in layout else [*told, "no layer is split"]


def with_blocks_compiled(*case):
    """By a compiler that makes the graphs of forward and backward and no code of them."""
    inductor = torch.nn.Module.compile
    torch.nn.Module.compile = functools.partialmethod(inductor, backend="aot_eager")
    try:
        return differences(*case, compile="blocks")
    finally:
        torch.nn.Module.compile = inductor


def of_torchs_tensor_parallel():
    """Losses of some steps, and gradients, but of fused layers, whose rows torch has in an order of
    its own.
    """
    model = ModelSpec(**{**SHAPE, "vocab_size": 12}, num_layers=2, num_heads=4, num_kv_heads=2)
    spec = LayoutSpec(model=model, layout="tp2 torch-tp", batch=8, optimizer="sgd")
    theirs, alone = (build(spec, axes) for axes in (spec.parsed_layout, Layout()))
    told = []
    for number in range(STEPS):
        batch = batch_for(model, spec.batch, number)
        batch[1][0] = NOT_MASKED
        losses = [step.gradients(batch) for step in (theirs, alone)]
        told += differing(f"loss {number}", *losses)
        for name, parameter in theirs.module.named_parameters():
            gradient, expected = parameter.grad.full_tensor(), alone.module.get_parameter(name).grad
            if name.split(".")[-2] not in ("input", "gate_up"):
                told += differing(name, gradient, expected)
        theirs.update()
        alone.update()
        told += of_whole_logits()
    return told


def of_whole_logits():
    """torch's operators for logits in parts, which refuse whole ones, are gone after backward."""
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(1, 4, requires_grad=True), mesh, [Replicate()])
    loss = F.cross_entropy(logits, distribute_tensor(torch.tensor([1]), mesh, [Replicate()]))
    loss.backward()
    return differing("whole logits", loss.full_tensor(), torch.tensor(4.0).log())


def gathers_of_sharded_stages():
    """Weights of a stage are gathered and its gradients averaged once a step, not once a
    micro-batch, and what is gathered is what the schedule says.
    """
    counted = {}
    for micro_batches in (2, 4):
        spec = LayoutSpec(
            model=NETWORKS["tied"], layout=f"pp2 1f1b m{micro_batches} dp2 zero3", batch=8
        )
        step = build(spec, spec.parsed_layout)
        calls = counted[micro_batches] = {"gathers": 0, "means": 0}
        with counting(calls):
            train(step, spec, spec.parsed_layout, 0)
        if not all(isinstance(p, DTensor) for p in step.parallel.module.parameters()):
            return "weights are whole after the step"
    if counted[2] != counted[4] or not counted[2]["gathers"]:
        return str(counted)
    return ""


@contextlib.contextmanager
def counting(calls):
    """Counts groups of weights that are gathered, and that are averaged."""
    gather, average = UnshardedUnit.unshard, GradientReductions.reduce

    def gathered(self):
        calls["gathers"] += not self.is_unsharded
        gather(self)

    def averaged(self, *arguments):
        calls["means"] += 1
        average(self, *arguments)

    UnshardedUnit.unshard, GradientReductions.reduce = gathered, averaged
    try:
        yield
    finally:
        UnshardedUnit.unshard, GradientReductions.reduce = gather, average


def rate_after_loading(ranks):
    """Of plain SGD under zero3, whose state is nothing but its groups."""
    spec = LayoutSpec(
        model=NETWORKS["tied"], layout=f"dp{ranks} zero3", batch=ranks, optimizer="sgd"
    )
    state = [build(spec, spec.parsed_layout).parallel.state()]
    dist.broadcast_object_list(state)
    other = build_layout_step(spec, layout=spec.parsed_layout, device=torch.device("cpu"), lr=0.5)
    other.parallel.load(state[0])
    return other.optimizer.param_groups[0]["lr"]


def of_one_name(ranks):
    """What every rank is told of a network whose stages have parameters of the same names."""
    layout = Layout.parse(f"pp{ranks} 1f1b m{ranks}")
    network = Network(
        build=lambda stage: torch.nn.Linear(2, 2, bias=False), schedule=schedule_of(layout)
    )
    return said_of(layout, network)


def said_of(layout, network):
    """What is said about a network that cannot be spread like this."""
    device = torch.device("cpu")
    try:
        spread(layout, network, list, torch.optim.SGD, settings=Settings(), device=device)
    except ValueError as error:
        return str(error)
    return "nothing"


def of_two_minds():
    """What ranks are told that were given different layouts: all of them, at the start."""
    layout = ("tp2", "dp2", "pp2 1f1b m2")[dist.get_rank() % 3]
    spec = LayoutSpec(model=NETWORKS["tied"], layout=layout)
    try:
        build(spec, spec.parsed_layout)
    except ValueError as error:
        return str(error)
    return "nothing"


def differences(layout, network, optimizer, **more):
    """What differs from one process, in words, on rank 0."""
    spec = LayoutSpec(
        model=NETWORKS[network],
        layout=layout,
        batch=8,
        accumulation=BATCHES,
        optimizer=optimizer,
        **more,
    )
    ours = build(spec, spec.parsed_layout)
    alone = build(dataclasses.replace(spec, cuda_graphs=False, compile="off"), Layout())
    told = []
    for number in range(STEPS):
        loss, norm = train(ours, spec, spec.parsed_layout, number)
        their_loss, their_norm = train(alone, spec, Layout(), number)
        told += differing(f"loss {number}", loss, their_loss)
        told += differing(f"norm {number}", norm, their_norm)
    held_out = batch_for(spec.model, 3, 99)
    told += differing(
        "held out", mean(ours.evaluate(held_out), spec.parsed_layout), alone.evaluate(held_out)
    )
    expected, state = alone.parallel.state(), ours.parallel.state()
    if ours.parallel.shares is not None:
        told += written_by_nobody(ours.parallel.shares(), expected)
    if dist.get_rank() == 0:
        told += differing("state", state, expected)
    another = build(dataclasses.replace(spec, seed=1), spec.parsed_layout)
    with opened(expected) as stored:  # read by name, as a run that goes on does
        another.parallel.load(stored if another.parallel.loads_by_name else expected)
    loaded = another.parallel.state()
    if dist.get_rank() == 0:
        told += differing("loaded", loaded, expected)
        alone.parallel.load(state)
    train(another, spec, spec.parsed_layout, STEPS)  # with what was loaded
    train(alone, spec, Layout(), STEPS)
    expected, state = alone.parallel.state(), another.parallel.state()
    return told + (
        differing("state after loading", state, expected) if dist.get_rank() == 0 else []
    )


@contextlib.contextmanager
def opened(state):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        yield checkpoints.open(checkpoints.save(0, {**state, "scaler": {}}, {}, keep=1))


def unwritten_where_parts_are_uneven():
    """Ranks have 11 and 12 rows of the embedding, of which 12 are as large as another weight."""
    model = dataclasses.replace(NETWORKS["tied"], vocab_size=23)
    spec = LayoutSpec(model=model, layout="dp2 zero1 tp2", batch=8)
    step = build(spec, spec.parsed_layout)
    train(step, spec, spec.parsed_layout, 0)
    whole = [step.parallel.state()]
    dist.broadcast_object_list(whole)
    return written_by_nobody(step.parallel.shares(), whole[0])


def written_by_nobody(share, expected):
    """What is in no rank's share of a checkpoint."""
    told = []
    for place in (("model",), ("optimizer", "state")):
        of_this_rank, of_all = share, expected
        for key in place:
            of_this_rank, of_all = of_this_rank[key], of_all[key]
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, list(of_this_rank))
        told += [f"{place[-1]} {name} unwritten" for name in set(of_all).difference(*shares)]
    return told


def build(spec, layout):
    settings = {"weight_decay": 0.1} if spec.optimizer == "adamw" else {}
    lr = 1.0 if spec.optimizer == "sgd" else 0.003
    return build_layout_step(spec, layout=layout, device=torch.device("cpu"), lr=lr, **settings)


def train(step, spec, layout, number):
    """Loss and norm of one step of several batches, of which each data rank has its rows."""
    place = layout.place(dist.get_rank())["data"]
    total = torch.zeros(())
    for index in range(BATCHES):
        batch = batch_for(spec.model, spec.batch, 10 * number + index)
        # Tokens that do not count: whole micro-batches, and more of some ranks'. AdamW would magnify
        # what rounding leaves of them.
        if spec.optimizer == "sgd":
            batch[1][:2], batch[1][2, :5] = NOT_MASKED, NOT_MASKED
        own = [part.chunk(layout.data)[place] for part in batch]
        with contextlib.nullcontext() if index == BATCHES - 1 else step.parallel.no_sync():
            total += step.gradients(own, batches=BATCHES)
    norm = step.parallel.clip_gradients(CLIP)
    step.update()
    return mean(total, layout), norm


def mean(loss, layout):
    if layout.ranks == 1:
        return loss
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / (layout.num_replicas * layout.tensor)


def differing(name, ours, theirs):
    """The names of the tensors that differ, anywhere in two nested values."""
    if isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{name} has {sorted(ours)}, not {sorted(theirs)}"]
        return [
            said for key in theirs for said in differing(f"{name} {key}", ours[key], theirs[key])
        ]
    if isinstance(theirs, torch.Tensor):
        close = torch.allclose(ours.double(), theirs.double(), rtol=1e-4, atol=2e-6)
        return [] if close else [f"{name} by {(ours - theirs).abs().max():.2g}"]
    if isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{name} has {ours}, not {theirs}"]
        if all(isinstance(each, str) for each in theirs):
            return [] if set(ours) == set(theirs) else [f"{name} has {ours}, not {theirs}"]
        return [
            s
            for n, pair in enumerate(zip(ours, theirs, strict=True))
            for s in differing(f"{name} {n}", *pair)
        ]
    return [] if ours == theirs else [f"{name} is {ours}, not {theirs}"]
