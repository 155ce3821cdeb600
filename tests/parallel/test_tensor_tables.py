"""Tables of tensor parallel rules that would give wrong gradients or losses: they are refused, or
summed correctly. Networks on two ranks are compared with one process, in float64.
"""

import copy
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import nn

from stepgauge.parallel.fsdp import FullyShardedDataParallel
from stepgauge.parallel.tensor_parallel import (
    check_tensor_parallel,
    parallelize_tensor,
    partial_gradients,
)
from stepgauge.parallel.tensor_parallel.partial_gradients import PartialGradientCheck
from stepgauge.parallel.tensor_parallel.residual_stream import ResidualStream
from stepgauge.runtime.launch import RankError, launch
from stepgauge.spec.plan.tensor import Rule, Section

WIDTH, HEAD_WIDTH = 8, 4


class Attention(nn.Module):
    """Attention with an additional whole parameter, which every rank uses on its own heads."""

    def __init__(self, extra):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q_norm = nn.LayerNorm(HEAD_WIDTH) if extra == "q_norm" else nn.Identity()
        self.gate = nn.Linear(WIDTH, 1) if extra == "gate" else None
        self.scale = nn.Parameter(torch.ones(1)) if extra == "scale" else None

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        q = self.q_norm(q)
        if self.scale is not None:
            q = q * self.scale
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        return self.o(mixed)


class FeedForward(nn.Module):
    """The features between `up` and `down` go through `function`, which is called with the module,
    its input and the features.
    """

    def __init__(self, function=lambda module, x, h: module.act(h), act=None):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.function, self.act = function, act or nn.GELU()

    def forward(self, x):
        return self.down(self.function(self, x, self.up(x)))


class Network(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.out(x).square().mean()


COLUMN, ROW, GATHER, HEADS, WHOLE = map(Rule, ("column", "row", "gather", "heads", "whole"))
ATTENTION = {
    "blocks.*.[qkv]": Rule("column", (Section(WIDTH, unit=HEAD_WIDTH),)),
    "blocks.*.o": ROW,
}
FEED_FORWARD = {"blocks.*.up": COLUMN, "blocks.*.down": ROW}


def build(block):
    torch.manual_seed(1)
    return Network(block).double()


def batch():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(2, 4, WIDTH, generator=generator, dtype=torch.float64)


def difference(block, table, prepare=lambda module: None):
    """Returns the largest difference in loss and gradients between two ranks and one process."""
    whole = build(block)
    parallel = parallelize_tensor(copy.deepcopy(whole), table)
    prepare(parallel.module)
    expected, loss = whole(batch()), parallel.module(batch())
    expected.backward()
    loss.backward()
    differences = [(loss - expected).abs().item()]
    for name, parameter in whole.named_parameters():
        gradient = parallel.module.get_parameter(name).grad
        differences.append((gradient - parallel.part(name, parameter.grad)).abs().max().item())
    return max(differences)


def differences_of_nested_rules():
    around = {"blocks.*": GATHER, "blocks.[01]": HEADS}
    return {
        "scale": difference(lambda: Attention("scale"), ATTENTION | around),
        "gate": difference(lambda: Attention("gate"), ATTENTION | around),
        "whole inside heads": difference(
            lambda: nn.Sequential(FeedForward(), nn.LayerNorm(WIDTH)),
            {
                "blocks.*": HEADS,
                "blocks.*.1": WHOLE,
                "blocks.*.0.up": COLUMN,
                "blocks.*.0.down": ROW,
            },
        ),
    }


def test_heads_around_a_row_sums_only_gradients_of_which_a_rank_has_a_part():
    for differences in launch(differences_of_nested_rules, ranks=2):
        assert {name: value for name, value in differences.items() if value >= 1e-12} == {}


def message_of(block, table, prepare=lambda module: None):
    """Returns the message of the error in the first training forward; "" if there is none."""
    return message_of_network(build(block), table, prepare)


def message_of_network(network, table, prepare=lambda module: None):
    module = parallelize_tensor(network, table).module
    prepare(module)
    with torch.no_grad():
        module(batch())
    try:
        module(batch()).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def messages_for_partial_gradients():
    prelu, frozen = (lambda: FeedForward(act=nn.PReLU())), nn.PReLU().requires_grad_(False)
    gathered = {"blocks.*": GATHER, "blocks.[01]": WHOLE}
    read = functools.partial(FeedForward, lambda module, x, h: h + x.repeat(1, 1, 2)[..., :8])
    return {
        "q_norm": message_of(lambda: Attention("q_norm"), ATTENTION),
        "scale": message_of(lambda: Attention("scale"), ATTENTION),
        "gate": message_of(lambda: Attention("gate"), ATTENTION),
        "gate without gather": message_of(
            lambda: Attention("gate"), ATTENTION | {"blocks.*.gate": HEADS}
        ),
        "prelu": message_of(prelu, FEED_FORWARD),
        "whole": message_of(prelu, FEED_FORWARD | gathered),
        "stream": message_of(read, FEED_FORWARD, without_whole_parameters),
        "with a rule": message_of(prelu, FEED_FORWARD | {"blocks.*.act": HEADS}),
        "frozen": message_of(lambda: FeedForward(act=copy.deepcopy(frozen)), FEED_FORWARD),
        "summed by a hook": message_of(prelu, FEED_FORWARD, sum_by_hooks),
        "sharded": message_of(prelu, FEED_FORWARD, shard),
        "replaced": message_of(FeedForward, FEED_FORWARD, replace_cut_weights),
        "compiled": message_of(prelu, FEED_FORWARD, compile_blocks),
        "copied": message_of(prelu, FEED_FORWARD | {"blocks.*.act": HEADS}, copy.deepcopy),
    }


def without_whole_parameters(module):
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(".up." in name or ".down.weight" in name)


def sum_by_hooks(module):
    for block in module.blocks:
        block.act.weight.register_hook(lambda gradient: gradient)


def shard(module):
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    FullyShardedDataParallel(module, group=groups[dist.get_rank()])


def replace_cut_weights(module):
    first, second = module.blocks
    nn.utils.parametrizations.weight_norm(first.up)
    nn.utils.prune.identity(second.up, "weight")


def compile_blocks(module):
    for block in module.blocks:
        block.compile(backend="aot_eager")


RIGHT = ("with a rule", "frozen", "summed by a hook", "compiled", "copied", "replaced")


def test_a_gradient_of_which_a_rank_has_a_part_raises_unless_it_is_summed():
    for messages in launch(messages_for_partial_gradients, ranks=2):
        for case in RIGHT:
            assert messages.pop(case) == "", case
        assert "each rank has only its part of the gradient of" in messages["q_norm"]
        for case, name in {
            "q_norm": "blocks.0.q_norm.bias, blocks.0.q_norm.weight, blocks.1.q_norm.bias and 1 more",
            "scale": "blocks.0.scale, blocks.1.scale",
            "gate": "blocks.0.gate.bias, blocks.0.gate.weight, blocks.0.o.bias and 2 more",
            "gate without gather": "blocks.0.o.bias",
            "prelu": "blocks.0.act.weight, blocks.1.act.weight",
            "whole": "blocks.0.act.weight, blocks.1.act.weight",
            "sharded": "blocks.0.act.weight, blocks.1.act.weight",
            "stream": "the output of a row or embedding layer",
        }.items():
            assert f"its part of the gradient of {name}, " in messages[case], case


def test_a_parameter_on_pieces_of_the_sequence_with_the_rule_whole_raises():
    for message in launch(message_for_whole_on_pieces, ranks=2):
        assert "its part of the gradient of 1.bias, 1.weight, " in message
        assert "the rule sequence" in message


def message_for_whole_on_pieces():
    network = nn.Sequential(nn.Identity(), nn.LayerNorm(WIDTH), FeedForward()).double()
    table = {"0": Rule("split"), "1": WHOLE, "2.up": COLUMN, "2.down": ROW}
    return message_of_network(network, table)


class Unregistered(nn.Module):
    """Its parameter is not in `named_parameters`, as under torch's FSDP while forward runs."""

    def __init__(self):
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x):
        return x * self.weights[0]


def test_the_check_runs_once_even_if_no_registered_parameter_is_reached():
    group = mock.create_autospec(dist.ProcessGroup, instance=True)
    network = Unregistered()
    network.register_forward_hook(PartialGradientCheck(set(), ResidualStream(group)))
    with mock.patch.object(partial_gradients, "_reached", wraps=partial_gradients._reached) as walk:
        for _ in range(3):
            network(torch.ones(WIDTH))
    assert walk.call_count == 1


class CoarseHeads(nn.Module):
    """Computes in float32, as norms of the transformers library do, for each head."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEAD_WIDTH))

    def forward(self, h):
        heads = h.unflatten(-1, (-1, HEAD_WIDTH)).float()
        return (F.rms_norm(heads, heads.shape[-1:]) * self.weight.float()).flatten(-2).type_as(h)


class WithAuxiliaryLoss(FeedForward):
    def forward(self, x):
        return super().forward(x) + self.up(x).abs().mean()


def result_of_check(block, dtype=torch.float64, table=FEED_FORWARD, autocast=False):
    """Returns the message of the check; "" if it finds no difference. Ranks have different weights
    and random numbers before it.
    """
    torch.manual_seed(dist.get_rank())
    network = Network(block).to(dtype)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    try:
        with torch.autocast("cpu", enabled=autocast):
            check_tensor_parallel(
                network, table, lambda module: module(torch.randn(2, 4, WIDTH, dtype=dtype))
            )
    except ValueError as error:
        return str(error)
    assert torch.equal(torch.get_rng_state(), state)
    after = network.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    return ""


FAILING_TABLES = {
    "blocks.0.down": {"blocks.*.up": COLUMN},
    "out": FEED_FORWARD | {"out": ROW},
}


def compiled_feed_forward():
    return torch.compile(FeedForward(), backend="eager")


def failures_of_checks():
    failures = {name: result_of_check(FeedForward, table=t) for name, t in FAILING_TABLES.items()}
    compiled = result_of_check(compiled_feed_forward, table={"blocks.*._orig_mod.up": COLUMN})
    assert compiled == failures["blocks.0.down"]
    return failures


def test_the_check_names_the_module_that_fails_under_a_wrong_table():
    for rank in launch(failures_of_checks, ranks=2):
        for name, message in rank.items():
            assert message.startswith(f"with this table {name} fails: RuntimeError: mat1 and mat2")


def fail_on_rank_1():
    def compute_loss(module):
        if dist.get_rank() == 1 and not isinstance(module.blocks[0].up, nn.Linear):
            raise KeyError("tokens")
        return module(torch.ones(2, 4, WIDTH))

    check_tensor_parallel(Network(FeedForward), FEED_FORWARD, compute_loss)


def test_a_check_that_fails_on_one_rank_does_not_leave_the_other_waiting():
    with pytest.raises(
        RankError, match="rank 1 of 2: ValueError: with this table the network fails"
    ):
        launch(fail_on_rank_1, ranks=2)


def results_of_checks():
    functions = {
        "softmax": lambda module, x, h: h.softmax(-1),
        "norm": lambda module, x, h: F.rms_norm(h, h.shape[-1:]),
        "plain": lambda module, x, h: module.act(h),
    }
    results = {
        (name, dtype): result_of_check(functools.partial(FeedForward, function), dtype)
        for name, function in functions.items()
        for dtype in (torch.float64, torch.float32)
    }
    for dtype in (torch.float64, torch.float32):
        results["attention", dtype] = result_of_check(lambda: Attention(""), dtype, ATTENTION)
        results["auxiliary", dtype] = result_of_check(WithAuxiliaryLoss, dtype)
    results["plain", "autocast"] = result_of_check(FeedForward, torch.float32, autocast=True)
    coarse = functools.partial(FeedForward, lambda module, x, h: module.act(h), CoarseHeads())
    results["plain", "norm in float32"] = result_of_check(
        coarse, table=FEED_FORWARD | {"blocks.*.act": HEADS}
    )
    return results


def test_a_table_that_mixes_features_differs_from_the_whole_network_in_the_check():
    ranks = launch(results_of_checks, ranks=2)
    assert ranks[0] == ranks[1]
    for (case, _), message in ranks[0].items():
        if case in ("plain", "attention"):
            assert message == ""
        else:
            assert message.startswith("with this table the loss and the gradients of blocks.0.")
