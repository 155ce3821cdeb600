"""Compares layouts with one process: loss, norm, every weight after SGD (so every gradient), the
optimizer state under AdamW, and states that another layout loads.
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
from tests.parallel.groups import in_turn
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
from stepgauge.spec.model_fields import NORMS
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
# Bounds of the ratio in `rounding_of`. It is near 0 if ranks round in the same places as one process. zero3
# is not here: it computes norms and the embedding in bf16, and one process does not.
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
    checks = [(check, *case) for case in CUT for check in (work_of_backward, gradients_of_a_copy)]
    norms = [name for name, norm in NORMS.items() if norm.torch_tp]
    checks += [(differences_of_torchs_tensor_parallel, norm) for norm in norms]
    require_no_differences(2, differences_of(ON_TWO) + checks)


def test_four_ranks_are_one_process():
    checks = [(gathers_of_sharded_stages,), (missing_in_shares_of_uneven_parts,)]
    checks += [(differences_of_recorded_steps, layout) for layout in RECORDED]
    recorded_steps = ("tp4 overlap", "dp2 zero1 tp2 overlap")
    checks += [(differences_of_recorded_steps, layout, 1) for layout in recorded_steps]
    checks += [(sums_of_means, layout) for layout in ADDED_TO_MEANS]
    checks += [(with_blocks_compiled, "dp2 zero3 tp2 overlap", "grouped", "sgd")]
    require_no_differences(4, differences_of(ON_FOUR) + checks)


def test_eight_ranks_are_one_process():
    require_no_differences(8, differences_of(ON_EIGHT))


def differences_of(cases):
    return [(differences, *case) for case in cases]


def require_no_differences(ranks, checks):
    """Runs all checks, each a function with its arguments, in one launch of ranks."""
    for differing in launch(run_checks, checks, ranks=ranks):
        assert differing == {}


def run_checks(checks):
    """Returns the differences that each check found, in text, if there are any."""
    torch.set_num_threads(1)
    plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_REPLAYED_BYTES = 0  # in this process
    results = in_turn({(c.__name__, *given): functools.partial(c, *given) for c, *given in checks})
    return {check: result for check, result in results.items() if result}


def test_refusals_and_a_loaded_learning_rate_on_three_ranks():
    for different, unsupported, same_names, rate in launch(messages_on_ranks, ranks=3):
        assert unsupported == [
            "layout 'bucketed cp3' has a context axis; the network has no cut_sequences",
            "layout 'pp3 1f1b m3' has a pipeline axis; the network has no schedule",
            "layout 'tp3' has a tensor axis; the network has no table with rules",
        ]
        assert different == "the ranks' layouts differ: rank 0 has 'tp2', rank 1 has 'dp2 bucketed'"
        assert (
            same_names == "stages 0 and 1 both have a parameter weight; give each stage's " + NAMES
        )
        assert rate == 1.0


def messages_on_ranks():
    ranks = dist.get_world_size()
    return (
        message_for_different_layouts(),
        messages_for_unsupported_axes(),
        message_for_stages_with_same_names(ranks),
        rate_after_loading(ranks),
    )


def messages_for_unsupported_axes():
    """Returns the messages for a network that has no way to be spread over an axis."""
    network = Network(build=lambda _: torch.nn.Linear(1, 1))
    layouts = map(Layout.parse, ("cp3", "pp3 1f1b m3", "tp3"))
    return [message_for(layout, network) for layout in layouts]


@pytest.mark.parametrize(("ranks", "layouts"), [(2, ROUNDED_ON_TWO), (4, ROUNDED_ON_FOUR)])
def test_mixed_precision_rounds_as_one_process_does(ranks, layouts):
    """Compares the update of a layout in bf16 with that of one process in bf16, relative to how much the
    latter differs from fp32. The ratio is 0 if both round in the same places. If parts are rounded
    before they are summed (tensor axis, keys of a ring), the difference is about as large as the
    rounding error itself.
    """
    for layout, ratio in launch(rounding_of, layouts, ranks=ranks)[0].items():
        assert ratio < layouts[layout], (layout, ratio)


def rounding_of(layouts):
    torch.set_num_threads(1)
    plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_REPLAYED_BYTES = 0  # in this process
    ratios = {}
    for layout in layouts:
        spec = LayoutSpec(
            model=NETWORKS["ring"], layout=layout, batch=8, optimizer="sgd", precision="bf16"
        )
        precise = dataclasses.replace(spec, precision="fp32")
        parts = spec.parsed_layout.data * spec.parsed_layout.microbatches
        spread_update = update_of(spec, spec.parsed_layout, 1)
        alone, exact = (update_of(each, Layout(), parts) for each in (spec, precise))
        ratios[layout] = ((spread_update - alone).norm() / (alone - exact).norm()).item()
    return ratios


def update_of(spec, axes, parts):
    """Returns what a step of SGD adds to all weights, on rank 0. The batch is split into parts, which
    are computed one after another.
    """
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
    """Checks which operators backward repeats under a checkpointing that keeps attention: none of
    attention, of matrix products that overlap with communication, or of communication. An exception
    are gathers before other products, whose results are not kept because they are as large as the
    parts of all ranks together.
    """
    differences, expected = [], None
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
            differences += differing(f"{checkpointing} {layout}", counting.operators, expected[0])
        differences += differing(f"{checkpointing} {layout}", gradients, expected[1])
    return differences


def gradients_of_a_copy(layout, network):
    """Compares the gradients of a deep copy with those of the original. The first forward is in
    inference mode: tensors that it caches must work in backward later.
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
    """Counts the operators that communicate, compute attention, or overlap both."""

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


def differences_of_recorded_steps(layout, accumulation=BATCHES):
    """Runs with recorded stages, or a recorded step; the recorder runs their functions again."""
    graphs, train_layout.CudaGraphs = train_layout.CudaGraphs, lambda device: RunAgain()
    try:
        recorded = {"device": "cuda", "cuda_graphs": True, "accumulation": accumulation}
        return differences(layout, "tied", "sgd", **recorded)
    finally:
        train_layout.CudaGraphs = graphs


def losses_of_recorded_and_eager_steps(layout):
    """Returns the losses of three steps on GPUs, replayed from a CUDA graph and launched one by one."""
    device, losses = torch.device("cuda", dist.get_rank()), []
    plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_REPLAYED_BYTES = 0  # in this process
    for recorded in (True, False):
        spec = LayoutSpec(
            model=NETWORKS["tied"], layout=layout, batch=8, device="cuda", cuda_graphs=recorded
        )
        step = build_layout_step(spec, layout=spec.parsed_layout, device=device, lr=0.1)
        for number in range(3):
            batch = [part.to(device) for part in batch_for(spec.model, spec.batch, number)]
            losses.append(step.gradients(batch).item())
            step.update()
        del step  # a graph must be destroyed before its communicator
    return losses[:3], losses[3:]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_replayed_tensor_parallel_step_equals_the_launched_one():
    for replayed, launched in launch(
        losses_of_recorded_and_eager_steps, "tp2 overlap", ranks=2, device="cuda"
    ):
        assert len(set(launched)) == 3 and replayed == pytest.approx(launched, rel=1e-4)


def sums_of_means(layout):
    """Accumulates batches: some are averaged at once, and one is added to means under no_sync()."""
    spec = LayoutSpec(model=NETWORKS["tied"], layout="pp2 1f1b m2 dp2", batch=8, optimizer="sgd")
    parsed = Layout.parse(layout)
    spread_step, alone = build(spec, parsed), build(spec, Layout())
    place = parsed.place(dist.get_rank())["data"]
    for number, averages in enumerate((True, True, False, True)):
        batch = batch_for(spec.model, spec.batch, number)
        own = [part.chunk(parsed.data)[place] for part in batch]
        with contextlib.nullcontext() if averages else spread_step.parallel.no_sync():
            spread_step.gradients(own, batches=4)
        alone.gradients(batch, batches=4)
    norms = (step.parallel.clip_gradients(CLIP) for step in (spread_step, alone))
    differences = differing("norm", *norms)
    splits = any(isinstance(layer, SplitLinear) for layer in spread_step.parallel.module.modules())
    return differences if splits or "1f1b" in layout else [*differences, "no layer is split"]


def with_blocks_compiled(*case):
    """Runs with blocks compiled by aot_eager, which makes graphs but generates no code."""
    inductor = torch.nn.Module.compile
    torch.nn.Module.compile = functools.partialmethod(inductor, backend="aot_eager")
    try:
        return differences(*case, compile="blocks")
    finally:
        torch.nn.Module.compile = inductor


def differences_of_torchs_tensor_parallel(norm):
    """Compares losses and gradients of some steps, except of fused layers, whose rows torch orders
    differently.
    """
    shape = {**SHAPE, "vocab_size": 12, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = ModelSpec(**shape, norm=norm)
    spec = LayoutSpec(model=model, layout="tp2 torch-tp", batch=8, optimizer="sgd")
    by_torch, alone = (build(spec, axes) for axes in (spec.parsed_layout, Layout()))
    differences = []
    for number in range(STEPS):
        batch = batch_for(model, spec.batch, number)
        batch[1][0] = NOT_MASKED
        losses = [step.gradients(batch) for step in (by_torch, alone)]
        differences += differing(f"loss {number}", *losses)
        for name, parameter in by_torch.module.named_parameters():
            gradient, expected = parameter.grad.full_tensor(), alone.module.get_parameter(name).grad
            if name.split(".")[-2] not in ("input", "gate_up"):
                differences += differing(name, gradient, expected)
        by_torch.update()
        alone.update()
        differences += differences_of_whole_logits()
    return differences


def differences_of_whole_logits():
    """torch replaces operators for sharded logits, which refuse whole ones, only until backward ends."""
    mesh = init_device_mesh("cpu", (2,))
    logits = distribute_tensor(torch.zeros(1, 4, requires_grad=True), mesh, [Replicate()])
    loss = F.cross_entropy(logits, distribute_tensor(torch.tensor([1]), mesh, [Replicate()]))
    loss.backward()
    return differing("whole logits", loss.full_tensor(), torch.tensor(4.0).log())


def gathers_of_sharded_stages():
    """Weights of a stage are gathered, and its gradients averaged, once per step and not once per
    micro-batch.
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
    """Counts the units that are gathered, and those whose gradients are averaged."""
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
    """Returns the loaded learning rate of plain SGD under zero3, which has no state except its groups."""
    spec = LayoutSpec(
        model=NETWORKS["tied"], layout=f"dp{ranks} zero3", batch=ranks, optimizer="sgd"
    )
    state = [build(spec, spec.parsed_layout).parallel.state()]
    dist.broadcast_object_list(state)
    other = build_layout_step(spec, layout=spec.parsed_layout, device=torch.device("cpu"), lr=0.5)
    other.parallel.load(state[0])
    return other.optimizer.param_groups[0]["lr"]


def message_for_stages_with_same_names(ranks):
    """Returns the message for a network whose stages have parameters of the same name."""
    layout = Layout.parse(f"pp{ranks} 1f1b m{ranks}")
    network = Network(
        build=lambda stage: torch.nn.Linear(2, 2, bias=False), schedule=schedule_of(layout)
    )
    return message_for(layout, network)


def message_for(layout, network):
    """Returns the message that `spread` raises."""
    device = torch.device("cpu")
    try:
        spread(layout, network, list, torch.optim.SGD, settings=Settings(), device=device)
    except ValueError as error:
        return str(error)
    return "nothing"


def message_for_different_layouts():
    """Returns the message if the ranks have different layouts."""
    layout = ("tp2", "dp2", "pp2 1f1b m2")[dist.get_rank() % 3]
    spec = LayoutSpec(model=NETWORKS["tied"], layout=layout)
    try:
        build(spec, spec.parsed_layout)
    except ValueError as error:
        return str(error)
    return "nothing"


def differences(layout, network, optimizer, **more):
    """Returns the differences from one process, in text, on rank 0."""
    common = {"batch": 8, "accumulation": BATCHES, "optimizer": optimizer}
    spec = LayoutSpec(model=NETWORKS[network], layout=layout, **common | more)
    spread_step = build(spec, spec.parsed_layout)
    alone = build(dataclasses.replace(spec, cuda_graphs=False, compile="off"), Layout())
    found = []
    for number in range(STEPS):
        loss, norm = train(spread_step, spec, spec.parsed_layout, number)
        expected_loss, expected_norm = train(alone, spec, Layout(), number)
        found += differing(f"loss {number}", loss, expected_loss)
        found += differing(f"norm {number}", norm, expected_norm)
    held_out = batch_for(spec.model, 3, 99)
    loss = mean(spread_step.evaluate(held_out), spec.parsed_layout)
    found += differing("held out", loss, alone.evaluate(held_out))
    expected, state = alone.parallel.state(), spread_step.parallel.state()
    if spread_step.parallel.shares is not None:
        found += missing_in_shares(spread_step.parallel.shares(), expected)
    if dist.get_rank() == 0:
        found += differing("state", state, expected)
    # not compiled, because the compilation of another copy is slow and the same
    another = build(dataclasses.replace(spec, seed=1, compile="off"), spec.parsed_layout)
    with saved_and_opened(expected) as stored:  # read by name, as a resumed run does
        another.parallel.load(stored if another.parallel.loads_by_name else expected)
    loaded = another.parallel.state()
    if dist.get_rank() == 0:
        found += differing("loaded", loaded, expected)
        alone.parallel.load(state)
    train(another, spec, spec.parsed_layout, STEPS)  # with the loaded state
    train(alone, spec, Layout(), STEPS)
    expected, state = alone.parallel.state(), another.parallel.state()
    return found + (
        differing("state after loading", state, expected) if dist.get_rank() == 0 else []
    )


@contextlib.contextmanager
def saved_and_opened(state):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        yield checkpoints.open(checkpoints.save(0, {**state, "scaler": {}}, {}, keep=1))


def missing_in_shares_of_uneven_parts():
    """The ranks have 11 and 12 rows of the embedding; 12 rows are as large as another weight."""
    model = dataclasses.replace(NETWORKS["tied"], vocab_size=23)
    spec = LayoutSpec(model=model, layout="dp2 zero1 tp2", batch=8)
    step = build(spec, spec.parsed_layout)
    train(step, spec, spec.parsed_layout, 0)
    whole = [step.parallel.state()]
    dist.broadcast_object_list(whole)
    return missing_in_shares(step.parallel.shares(), whole[0])


def missing_in_shares(share, expected):
    """Returns the values of a state that are in no rank's share of a checkpoint."""
    missing = []
    for place in (("model",), ("optimizer", "state")):
        of_this_rank, of_all = share, expected
        for key in place:
            of_this_rank, of_all = of_this_rank[key], of_all[key]
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, list(of_this_rank))
        missing += [f"{place[-1]} {name} missing" for name in set(of_all).difference(*shares)]
    return missing


def build(spec, layout):
    settings = {"weight_decay": 0.1} if spec.optimizer == "adamw" else {}
    lr = 1.0 if spec.optimizer == "sgd" else 0.003
    return build_layout_step(spec, layout=layout, device=torch.device("cpu"), lr=lr, **settings)


def train(step, spec, layout, number):
    """Trains one step of several batches, of which each data rank has its rows; returns loss and norm."""
    place = layout.place(dist.get_rank())["data"]
    total = torch.zeros(())
    for index in range(spec.accumulation):
        batch = batch_for(spec.model, spec.batch, 10 * number + index)
        # Some tokens do not count: whole micro-batches, and more on some ranks. Not with AdamW, which would
        # turn the rounding errors of their zero gradients into whole steps.
        if spec.optimizer == "sgd":
            batch[1][:2], batch[1][2, :5] = NOT_MASKED, NOT_MASKED
        own = [part.chunk(layout.data)[place] for part in batch]
        with (
            contextlib.nullcontext() if index == spec.accumulation - 1 else step.parallel.no_sync()
        ):
            total += step.gradients(own, batches=spec.accumulation)
    norm = step.parallel.clip_gradients(CLIP)
    step.update()
    return mean(total, layout), norm


def mean(loss, layout):
    if layout.ranks == 1:
        return loss
    loss = loss.clone()
    dist.all_reduce(loss)
    return loss / (layout.num_replicas * layout.tensor)


def differing(name, actual, expected):
    """Returns a text for each tensor that differs, anywhere in two nested values."""
    if isinstance(expected, dict):
        if actual.keys() != expected.keys():
            return [f"{name} has {sorted(actual)}, not {sorted(expected)}"]
        return [
            text
            for key in expected
            for text in differing(f"{name} {key}", actual[key], expected[key])
        ]
    if isinstance(expected, torch.Tensor):
        close = torch.allclose(actual.double(), expected.double(), rtol=1e-4, atol=2e-6)
        return [] if close else [f"{name} by {(actual - expected).abs().max():.2g}"]
    if isinstance(expected, list):
        if len(actual) != len(expected):
            return [f"{name} has {actual}, not {expected}"]
        if all(isinstance(each, str) for each in expected):
            is_same = set(actual) == set(expected)
            return [] if is_same else [f"{name} has {actual}, not {expected}"]
        return [
            text
            for number, pair in enumerate(zip(actual, expected, strict=True))
            for text in differing(f"{name} {number}", *pair)
        ]
    return [] if actual == expected else [f"{name} is {actual}, not {expected}"]
