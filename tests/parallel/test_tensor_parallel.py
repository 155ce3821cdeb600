"""Tensor parallel on two and four ranks compared with one process, under SGD, in float64."""

import contextlib
import copy
import ctypes
import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.parallel.groups import in_turn
from tests.parallel.library_networks import (
    HEAD_WIDTH,
    CountingAttention,
    GPT2Model,
    LibraryModel,
    OneKeyHead,
    adapt,
)
from tests.parallel.library_networks import HEADS as NUM_HEADS
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from stepgauge.kernels.linear_cross_entropy.partial import partial_backward, partial_forward
from stepgauge.models.bert import BertForMaskedLM
from stepgauge.models.transformer import TransformerLM
from stepgauge.parallel.communication.peer_memory import MemoryOperation
from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.parallel.tensor_parallel.exchange import (
    captured_turns,
    exchange_of,
    part_sum_by_torch,
)
from stepgauge.parallel.tensor_parallel.overlapped import gathered_product, scattered_product
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.runtime.launch import launch
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.plan import tensor as plan
from stepgauge.spec.plan.tensor import LEAST_ROWS, Count, Rule, Section, grouped
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.plan.transformers_tables import table_of_config

PARTIAL_LOSS = PartialLoss(partial_forward, partial_backward)
STEPS, CLIP, VOCABULARY = 2, 0.05, 11  # the vocabulary is no multiple of 2 or 4
SHAPE = {
    "vocab_size": VOCABULARY,
    "context_length": 8,
    "d_model": 16,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
}
SPECS = {
    "default": ModelSpec(**SHAPE),
    "tied, learned, layernorm, gelu, biases": ModelSpec(
        **SHAPE,
        tied_head=True,
        positions="learned",
        norm="layernorm",
        feed_forward="gelu",
        attention_bias="all",
        feed_forward_bias=True,
    ),
    "two key heads, qk-norm, qkv biases": ModelSpec(
        **SHAPE, num_kv_heads=2, qk_norm=True, attention_bias="qkv", scaled_embedding=True
    ),
    "one key head, wide heads, parallel blocks": ModelSpec(
        **SHAPE, num_kv_heads=1, head_dim=8, block="parallel", feed_forward="geglu-tanh"
    ),
    "post-norm, full mask, eager": ModelSpec(
        **SHAPE,
        block="post-norm",
        mask="full",
        attention="eager",
        positions="none",
        feed_forward_bias=True,
    ),
    "window, partial rotary, relu": ModelSpec(
        **SHAPE, window=3, rope_fraction=0.5, feed_forward="relu", norm="rmsnorm-eager"
    ),
    "bert": BertSpec(num_positions=8, **SHAPE),
    **{f"norm {name}": ModelSpec(**SHAPE, norm=name) for name in NORMS},
}


class UserModel(nn.Module):
    """Has separate query, key and value layers, computes its own loss, and has a parameter that no
    rule names.
    """

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.scale = nn.Parameter(torch.rand(16))
        self.layers = nn.ModuleList(UserBlock() for _ in range(2))
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens, targets):
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), targets.flatten())


class UserBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.o = nn.Linear(16, 16)

    def forward(self, x):
        h = self.norm(x)
        heads = [
            each(h).unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)
        ]
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return x + self.o(mixed.transpose(1, 2).flatten(-2))


HEADS = Rule("column", (Section(16, unit=4),))
NORM, BY_TOKEN = Rule("sequence"), Rule("split", by_token=True)
SCALES = torch.tensor([[[0.5]], [[2.0]]], dtype=torch.float64)
USER_TABLE = {
    "embed": Rule("embedding"),
    "layers.0": Rule("split"),
    "layers.*.norm": NORM,
    "layers.*.[qkv]": HEADS,
    "layers.*.o": Rule("row"),
    "out": Rule("head"),
}


def table_by_sequence(model):
    """Returns the built-in table of a library network, changed to a stream cut by sequence."""
    table = table_of_config(model.config.to_dict(), [name for name, _ in model.named_modules()])
    norms = ("model.norm", "model.layers.*.*_layernorm")
    return {**table, "model.layers.0": Rule("split"), **dict.fromkeys(norms, Rule("sequence"))}


def counting_model():
    model = UserModel()
    for layer in model.layers:
        layer.q, layer.k, layer.v = (nn.Identity() for _ in range(3))
        layer.o = CountingAttention()
    return model


# Without the rule "split" the stream is whole, so by_sequence need not be given.
COUNTING_TABLE = {
    "layers.*.o": Rule("gather", counts=(Count("num_heads", Section(NUM_HEADS)),)),
    "layers.*.o.[qkv]": HEADS,
    "layers.*.o.o": Rule("row"),
}

ONE_KEY = Section(HEAD_WIDTH, unit=HEAD_WIDTH, shared=True)
ONE_KEY_TABLE = {
    "embed": Rule("embedding"),
    "out": Rule("head"),
    "layers.*.o.fused": Rule("column", (Section(16, unit=4), ONE_KEY, ONE_KEY)),
    "layers.*.o.out": Rule("row"),
}


def build(name):
    """Returns the network with that name, with random values everywhere, and its table."""
    torch.manual_seed(1)
    if name.startswith("user"):
        model, table = UserModel(), USER_TABLE
        if name == "user with a hook":
            model.embed.register_forward_hook(lambda layer, inputs, output: output * 2)
        if name == "user by token":
            table = {
                **table,
                "layers.0": BY_TOKEN,
                "layers.*.norm": dataclasses.replace(NORM, by_token=True),
            }
        if name == "user with a scale per sequence":  # which a stream by token would mix up
            model.layers[0].register_forward_hook(lambda *call: call[-1] * SCALES)
            table = {**table, "layers.0": BY_TOKEN}  # one rule is not enough
    elif name == "counting":
        model, table = counting_model(), COUNTING_TABLE
    elif name == "one key head, transposed":
        model, table = counting_model(), ONE_KEY_TABLE
        for layer in model.layers:
            layer.o = OneKeyHead()
    elif name.startswith("gpt2"):
        model, table = GPT2Model(VOCABULARY), None
    elif name.startswith("library"):
        model = LibraryModel(VOCABULARY)
        table = table_by_sequence(model) if "sequence" in name else None
    else:
        spec = SPECS[name]
        network = BertForMaskedLM if isinstance(spec, BertSpec) else TransformerLM
        model, table = network(spec), table_of(spec)
    if "adapted" in name:
        adapt(model.model.layers if name.startswith("library") else model.transformer.h)
    generator = torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=generator)
    return model.double(), table


def batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens, targets = torch.randint(VOCABULARY, (2, 2, 8), generator=generator)
    targets[0, step] = -100
    return tokens, targets


def train(model, clip):
    """Trains some steps. Returns losses and norms; the last step's gradients stay in `.grad`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    values = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):  # gradients add up
            loss = model(*batch(2 * step + micro)) / 2
            loss.backward()
            values.append(loss.item())
        values.append(clip(CLIP).item())
        optimizer.step()
    return torch.tensor(values, dtype=torch.float64)


def difference(name, by_sequence=None, partial_loss=None, overlap=False, prepare=None):
    """Returns the largest difference from one process in losses, norms, gradients and weights."""
    whole, table = build(name)
    expected_values = train(whole, lambda norm: nn.utils.clip_grad_norm_(whole.parameters(), norm))
    model, _ = build(name)
    if dist.get_rank():  # only the values of rank 0 are used
        nn.init.zeros_(next(model.parameters()))
    parallel = parallelize_tensor(
        model, table, by_sequence=by_sequence, overlap=overlap, partial_loss=partial_loss
    )
    if prepare is not None:
        prepare(parallel.module)
    values = train(parallel.module, parallel.clip_gradients)
    differences = [(values - expected_values).abs().max()]
    num_cut = 0
    for key, parameter in parallel.module.named_parameters():
        expected = whole.get_parameter(key)
        differences.append((parameter - parallel.part(key, expected)).abs().max())
        if expected.requires_grad:
            differences.append((parameter.grad - parallel.part(key, expected.grad)).abs().max())
        differences.append((parallel.whole(key, parameter.detach()) - expected).abs().max())
        num_cut += parameter.numel() < expected.numel()
    assert num_cut >= 4 * 2, "few layers were cut"
    return max(each.item() for each in differences)


def difference_of_penalties(name, by_sequence=None):
    """Returns the largest difference in gradients of a loss with a gradient penalty, which contains
    the gradient of the embedding's output.
    """
    differences = []
    whole, table = build(name)
    parallel = parallelize_tensor(copy.deepcopy(whole), table, by_sequence=by_sequence)
    for model in (whole, parallel.module):
        embeddings = []
        embedding = next(
            m for n, m in model.named_modules() if n.endswith(("embed", "embed_tokens", "wte"))
        )
        embedding.register_forward_hook(lambda *call, seen=embeddings: seen.append(call[-1]))
        head = model.get_submodule("out" if hasattr(model, "out") else "lm_head")
        head.register_forward_hook(lambda *call, seen=embeddings: seen.append(call[-1]))
        with sdpa_kernel(SDPBackend.MATH):
            model(*batch(0))
        x, logits = embeddings
        value = logits.square().mean()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        (value + gradient.square().sum() * 1e3).backward()
    for key, parameter in parallel.module.named_parameters():
        expected = whole.get_parameter(key).grad
        assert (expected is None) == (parameter.grad is None)
        if expected is not None:
            difference = parameter.grad - parallel.part(key, expected)
            differences.append(difference.abs().max().item())
    return max(differences)


def difference_of_logits():
    model, table = build("default")
    tokens = batch(0)[0]
    expected = copy.deepcopy(model)(tokens)
    parallel = parallelize_tensor(model, table)
    return (parallel.module(tokens) - expected).abs().max().item()


def gradient_sums():
    """Compares a backward that sums the gradients of norms in one all-reduce with one in which each
    parameter has a hook. Returns the additional all-reduces, the number of norms, and the largest
    difference in what hooks see, in autograd.grad and in gradients accumulated over two backwards.
    """
    counts, seen, differences = [], {}, []
    model, table = build("default")
    norms = [name for name, p in model.named_parameters() if p.ndim == 1]
    whole = copy.deepcopy(model)
    whole(*batch(0)).backward()
    for hooked in (False, True):
        parallel = parallelize_tensor(copy.deepcopy(model), table)
        weights = {name: parallel.module.get_parameter(name) for name in norms}
        for name, weight in weights.items() if hooked else ():
            weight.register_hook(functools.partial(seen.__setitem__, name))
        with CommDebugMode() as counter:
            parallel.module(*batch(0)).backward()
        counts.append(
            sum(n for op, n in counter.get_comm_counts().items() if "all_reduce" in str(op))
        )
        gradients = torch.autograd.grad(parallel.module(*batch(0)), list(weights.values()))
        parallel.module(*batch(0)).backward()
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            expected = whole.get_parameter(name).grad
            differences += [gradient - expected, weight.grad - 2 * expected]
            differences += [seen[name] - expected] if hooked else []
    return counts[1] - counts[0], len(norms), max(each.abs().max().item() for each in differences)


OVERLAPPED = ("tied, learned, layernorm, gelu, biases", "one key head, wide heads, parallel blocks")


def overlapped_differences():
    """Differences with overlapping collectives: of networks, with compiled blocks or frozen weights,
    over many turns, and with changing shapes.
    """
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    differences = {}
    for name, least_rows in zip(OVERLAPPED, (0, LEAST_ROWS), strict=True):
        plan.LEAST_ROWS = least_rows
        differences[name, "overlapped"] = difference(name, overlap=True)
    differences["by sequence", "overlapped"] = difference("user", overlap=True)
    if dist.get_world_size() == 2:  # nothing here depends on the number of ranks
        differences["compiled"] = difference("default", overlap=True, prepare=compile_blocks)
        differences["frozen"] = difference_when_frozen()
    differences["many turns"] = difference_over_many_turns()
    differences["many shapes"] = difference_over_many_shapes()
    begin_no_turn_if_memory_is_short()
    plan.LEAST_OVERLAPPED_BYTES = least
    return differences


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def difference_when_frozen():
    """Freezes the weights of columns and rows, and compares the other gradients with and without
    overlap.
    """
    gradients = []
    for overlap in (False, True):
        model, table = build("default")
        for each in model.blocks[0].parameters():
            each.requires_grad_(each.ndim == 1)
        parallel = parallelize_tensor(model, table, overlap=overlap)
        parallel.module(*batch(0)).backward()
        gradients.append({n: p.grad for n, p in parallel.module.named_parameters()})
    plain, found = gradients
    assert [n for n in plain if plain[n] is None] == [n for n in plain if found[n] is None]
    return max((plain[n] - found[n]).abs().max().item() for n in plain if plain[n] is not None)


def unfrozen(model):
    for each in model.parameters():
        each.requires_grad_(True)
    return model


def assigned(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def differences_after_changes():
    """Differences in gradients if parameters are unfrozen or replaced after the layers were cut."""
    differences = {}
    for name in ("two key heads, qk-norm, qkv biases", "user"):
        for change in (unfrozen, assigned, copy.deepcopy):
            whole, table = build(name)
            model, _ = build(name)
            for each in model.parameters() if change is unfrozen else ():
                each.requires_grad_(False)
            parallel = parallelize_tensor(model, table)
            changed = change(parallel.module)
            whole(*batch(0)).backward()
            changed(*batch(0)).backward()
            differences[name, change.__name__] = max(
                (p.grad - parallel.part(n, whole.get_parameter(n).grad)).abs().max().item()
                for n, p in changed.named_parameters()
            )
    return differences


class Encoder(nn.Module):
    """torch's own encoder, whose layers read their weights directly in inference, and an embedding
    with a padding row.
    """

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(VOCABULARY, 16, padding_idx=4)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        return self.encoder(self.embed(tokens))


ENCODER_TABLE = {
    "embed": Rule("embedding"),
    "encoder.layers.*.linear1": Rule("column"),
    "encoder.layers.*.linear2": Rule("row"),
}


def differences_of_torchs_encoder():
    torch.manual_seed(5)
    whole = Encoder().double()
    parallel = parallelize_tensor(copy.deepcopy(whole), ENCODER_TABLE, by_sequence=False)
    tokens = torch.arange(VOCABULARY)[None]
    differences = {}
    for mode in (torch.inference_mode, torch.enable_grad):
        whole.train(mode is torch.enable_grad)
        parallel.module.train(mode is torch.enable_grad)
        with mode():
            pair = parallel.module(tokens), whole(tokens)
        differences["encoder", mode.__name__] = (pair[0] - pair[1]).abs().max().item()
    for output in pair:
        output.square().sum().backward()
    expected = parallel.part("embed.weight", whole.embed.weight.grad)
    difference = parallel.module.embed.weight.grad - expected
    return {**differences, "padding row": difference.abs().max().item()}


def difference_over_many_turns():
    """Multiplies different pieces in each turn, some of them as if they were captured: these use the
    same boxes as the turn before or after. A captured block may also fail.
    """
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weight, largest = torch.eye(64, dtype=torch.float64)[: 64 // ranks], 0.0
    for turn in range(30):
        x = torch.full((1, 64), turn + rank, dtype=torch.float64)
        with captured_turns(group) if turn % 5 in (1, 2) else contextlib.nullcontext():
            y = gathered_product(x, weight, group)
            pieces = scattered_product(y[:, :2], torch.eye(2, dtype=torch.float64), group)
            if turn % 3 == 0:
                gathered_product(x, weight, group)
        expected = turn + torch.arange(ranks, dtype=torch.float64)
        errors = (y - expected[:, None], pieces - ranks * expected[rank])
        largest = max(largest, *(error.abs().max().item() for error in errors))
    turns = exchange_of(group.group_name, x.device, 0)._turns
    with contextlib.suppress(ZeroDivisionError), captured_turns(group):
        gathered_product(x, weight, group)
        raise ZeroDivisionError
    dist.barrier(group)  # unlike a capture that fails, this block has run
    assert exchange_of(group.group_name, x.device, 0)._turns == turns
    return largest


def begin_no_turn_if_memory_is_short():
    """A turn that was counted, but in which nothing was sent, would let the next one write a box that
    is still read.
    """
    group, ranks = dist.group.WORLD, dist.get_world_size()
    x = torch.ones(2, 64, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(64, dtype=torch.float64)[: 64 // ranks].requires_grad_()
    y = gathered_product(x, weight, group)
    rows = y.shape[0]
    exchange = exchange_of(group.group_name, x.device, 0)
    turns = dict(exchange._turns)

    def no_activations(tensor, shape):
        if shape[0] in (rows, rows // ranks):
            raise MemoryError
        return torch.empty(shape, dtype=tensor.dtype)

    for layer in (y.sum().backward, lambda: scattered_product(y, weight.t(), group)):
        with (
            mock.patch.object(torch.Tensor, "new_empty", no_activations),
            pytest.raises(MemoryError),
        ):
            layer()
        assert exchange._turns == turns


def difference_over_many_shapes():
    """Multiplies pieces whose length changes, so that boxes grow and are then too large."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    generator, largest = torch.Generator().manual_seed(3), 0.0
    for rows in (1, 15, 2, 9, 16, 1):
        shape = ranks * rows, 12
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight = torch.randn(7, 12, generator=generator, dtype=torch.float64, requires_grad=True)
        piece = whole.chunk(ranks)[rank].clone().requires_grad_()
        x = whole.clone().requires_grad_()
        expected = x @ weight.detach().t()
        expected.square().sum().backward()
        y = gathered_product(piece, weight, group)
        y.square().sum().div(ranks).backward()
        pairs = [(y, expected), (piece.grad, x.grad.chunk(ranks)[rank])]
        pairs.append((weight.grad, 2 * expected.t() @ whole / ranks))
        largest = max([largest, *((a - b).abs().max().item() for a, b in pairs)])
    return largest


def collectives_without_overlap():
    """With overlap, counts the all-gathers and reduce-scatters that are not next to a product: those
    of the head and at the beginning of the stream.
    """
    model, table = build("default")
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    part_sum = mock.Mock(side_effect=part_sum_by_torch)
    parallel = parallelize_tensor(model, table, overlap=True, part_sum=part_sum)
    with CommDebugMode() as counter:
        parallel.module(*batch(0)).backward()
    assert part_sum.called
    plan.LEAST_OVERLAPPED_BYTES = least
    counts = {str(operator): count for operator, count in counter.get_comm_counts().items()}
    return [
        sum(count for name, count in counts.items() if kind in name)
        for kind in ("gather", "scatter")
    ]


def shape_for_an_empty_batch():
    """Returns the shape of the logits of no sequence of 4 tokens."""
    model, table = build("default")
    logits = parallelize_tensor(model, table).module(torch.zeros(0, 4, dtype=torch.long))
    logits.sum().backward()
    return tuple(logits.shape)


def message_of(call):
    """Returns the message of the error that the call raises."""
    try:
        call()
    except (ValueError, IndexError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return 4 * super().forward(tokens)


def changed(**modules):
    """Returns the user's model with some modules replaced."""
    model = UserModel()
    for name, module in modules.items():
        model.set_submodule(name, module)
    return model


def messages_for_changed_models():
    """Messages for parameters in several places and for layers that a rule cannot cut."""
    tied, twice = changed(), changed()
    tied.scale = tied.out.bias = nn.Parameter(torch.ones(VOCABULARY))
    twice.layers[0].k = twice.layers[0].q
    shared = changed(embed=nn.Embedding(16, 16))
    shared.layers[1].o.weight = shared.layers[0].q.weight = shared.embed.weight
    models = {
        "tied": tied,
        "twice": twice,
        "cut twice": shared,
        "scaled": changed(embed=Scaled(VOCABULARY, 16)),
        "sparse": changed(embed=nn.Embedding(VOCABULARY, 16, sparse=True)),
        "weight norm": changed(
            out=nn.utils.parametrizations.weight_norm(nn.Linear(16, VOCABULARY))
        ),
        "dropout": changed(**{"layers.0.norm": nn.Dropout(0.1)}),
    }
    messages = {
        name: message_of(lambda model=model: parallelize_tensor(model, USER_TABLE))
        for name, model in models.items()
    }
    without_split = {name: rule for name, rule in USER_TABLE.items() if rule.kind != "split"}
    return {
        **messages,
        **messages_for_hooks(),
        **messages_for_tables(),
        "no split": message_of(lambda: parallelize_tensor(UserModel(), without_split)),
    }


def messages_for_hooks():
    """Messages for hooks that would be lost or run too early, and for unusual layers."""
    with_hook, weight_hook, norm_hook, own_forward, computed = (UserModel() for _ in range(5))
    with_hook.layers[0].q.register_forward_hook(lambda *_: None)
    weight_hook.layers[0].q.weight.register_hook(lambda gradient: gradient)
    norm_hook.layers[0].norm.weight.register_hook(lambda gradient: gradient)
    own_forward.layers[0].q.forward = own_forward.layers[0].q.forward
    nn.utils.parametrize.register_parametrization(computed.layers[0].o, "bias", nn.Identity())
    models = {"hook": with_hook, "weight's hook": weight_hook, "norm's hook": norm_hook}
    models |= {"own forward": own_forward, "computed": computed}
    models["functional dropout"] = changed(**{"layers.0.norm": nn.LSTM(16, 16, 2, dropout=0.5)})
    return {
        name: message_of(lambda model=model: parallelize_tensor(model, USER_TABLE))
        for name, model in models.items()
    }


def messages_for_tables():
    """Messages for tables without rules that the network needs, and for inputs that do not fit."""
    attending = UserModel()
    attending.layers[1].norm = nn.MultiheadAttention(16, 2)
    without_norms = {name: rule for name, rule in USER_TABLE.items() if rule.kind != "sequence"}
    without_count = COUNTING_TABLE | {"layers.*.o": Rule("gather")}
    without_query = {name: rule for name, rule in COUNTING_TABLE.items() if "q" not in name}
    calls = {
        "attends": (attending, USER_TABLE),
        "out_proj": (attending, {"layers.1.norm.out_proj": Rule("row")}),
        "no rule": (UserModel(), without_norms),
        "no count": (counting_model(), without_count),
        "no query": (counting_model(), without_query),
        "no config": (UserModel(), None),
    }
    messages = {
        name: message_of(lambda call=call: parallelize_tensor(*call))
        for name, call in calls.items()
    }
    flat = nn.Sequential(nn.Linear(4, 4))
    parallelize_tensor(flat, {"0": Rule("column")}, by_sequence=True)
    layer = message_of(lambda: parallelize_tensor(nn.Linear(4, 4), {"": Rule("column")}))
    return messages | {"flat": message_of(lambda: flat(torch.ones(2, 4))), "layer": layer}


def adapt_with_magnitude():
    """Adds DoRA's magnitude vector, for which a row layer would need the norms of whole rows."""
    model, _ = build("gpt2 adapted")
    model.transformer.h[0].mlp.c_fc.lora_magnitude_vector = nn.Parameter(torch.ones(24))
    parallelize_tensor(model)


def message_for_second_derivative(overlap=None, partial_loss=None, targets=True):
    """Returns the message for create_graph=True, on the loss or, without targets, on the logits."""
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    model, table = build("default")
    module = parallelize_tensor(model, table, overlap=overlap, partial_loss=partial_loss).module
    value = module(*batch(0)[: 1 + targets]).sum()
    plan.LEAST_OVERLAPPED_BYTES = least
    weights = list(module.parameters())
    return message_of(lambda: torch.autograd.grad(value, weights, create_graph=True))


def messages_for_mistakes():
    """Returns the error messages for tables, shapes and networks that do not fit."""
    model, table = build("default")
    parallel = parallelize_tensor(copy.deepcopy(model), table)
    wrong = nn.Linear(2 + dist.get_rank(), 2)
    fused = parallelize_tensor(copy.deepcopy(model), table, partial_loss=PARTIAL_LOSS)
    tokens, targets = batch(0)
    beyond = torch.full_like(tokens, VOCABULARY)
    return {
        "odd sequence": message_of(lambda: parallel.module(torch.zeros(1, 5, dtype=torch.int64))),
        "no module": message_of(lambda: parallelize_tensor(model, {"nobody": Rule("row")})),
        "of another library": message_of(
            lambda: parallelize_tensor(
                nn.Sequential(type("Linear", (nn.Identity,), {"__module__": "other.layers"})()),
                {"0": Rule("column")},
            )
        ),
        "no linear": message_of(lambda: parallelize_tensor(model, {"norm": Rule("column")})),
        "heads": message_of(
            lambda: parallelize_tensor(
                model, {"head": Rule("column", (Section(VOCABULARY, unit=VOCABULARY),))}
            )
        ),
        "overlap": message_of(
            lambda: parallelize_tensor(model, table, by_sequence=False, overlap=True)
        ),
        "token": message_of(lambda: parallel.module(beyond, targets)),
        "target": message_of(lambda: parallel.module(tokens, beyond)),
        "fused target": message_of(lambda: fused.module(tokens, torch.full_like(tokens, -1))),
        "different": message_of(lambda: parallelize_tensor(wrong, {"": Rule("column")})),
        "second derivative": message_for_second_derivative(),
        "second derivative, fused": message_for_second_derivative(partial_loss=PARTIAL_LOSS),
        "second derivative, overlap": message_for_second_derivative(overlap=True, targets=False),
        "magnitude": message_of(adapt_with_magnitude),
        **messages_for_changed_models(),
    }


def all_differences():
    torch.set_num_threads(1)
    is_two = dist.get_world_size() == 2
    checks = {
        (name, by_sequence): functools.partial(difference, name, by_sequence)
        for name in (*SPECS, "user")
        for by_sequence in ((True, False) if is_two else (True,))
    }
    adapted = ("library adapted", "library by sequence, adapted", "gpt2 adapted")
    other = ("library", "library by sequence", "counting", "gpt2", "one key head, transposed")
    other += ("user with a hook", "user by token", "user with a scale per sequence")
    checks |= {name: functools.partial(difference, name) for name in (*other, *adapted)}
    for name in ("user", "library by sequence", "gpt2"):
        checks[name, "penalty"] = functools.partial(difference_of_penalties, name)
    checks["user", "penalty", "whole"] = functools.partial(difference_of_penalties, "user", False)
    checks["fused loss"] = functools.partial(difference, OVERLAPPED[0], True, PARTIAL_LOSS)
    differences = in_turn(checks) | overlapped_differences()
    if is_two:
        differences |= differences_after_changes() | {"logits": difference_of_logits()}
        differences |= differences_of_torchs_encoder()
    return differences


def on_two_ranks():
    return all_differences(), {
        "without overlap": collectives_without_overlap(),
        "empty": shape_for_an_empty_batch(),
        "messages": messages_for_mistakes(),
        "sums": gradient_sums(),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return launch(on_two_ranks, ranks=2)


def test_training_on_two_ranks_equals_one_process(two_ranks):
    for differences, _ in two_ranks:
        assert {case: value for case, value in differences.items() if value >= 1e-10} == {}


def test_training_on_four_ranks_equals_one_process():
    for differences in launch(all_differences, ranks=4):
        assert {case: value for case, value in differences.items() if value >= 1e-10} == {}


def test_gradients_of_norms_share_an_all_reduce_and_only_collectives_next_to_products_overlap(
    two_ranks,
):
    for _, results in two_ranks:
        assert results["without overlap"] == [2, 1]
        assert results["empty"] == (0, 4, VOCABULARY)
        additional, norms, largest = results["sums"]
        assert additional == norms - 1 == 4 and largest < 1e-10


def test_a_memory_operation_has_the_size_that_the_driver_expects():
    assert ctypes.sizeof(MemoryOperation) == 48


def test_small_pieces_of_neighbours_are_multiplied_together():
    def of(ranks, rows):
        return [list(group) for group in grouped(ranks, rows=rows)]

    assert of([3, 2, 1], 2048) == [[2, 3], [1]]
    assert of([0, 3, 2], 2048) == [[0], [2, 3]]
    assert of([2, 1, 0], 1024) == [[0, 1, 2]]
    assert of([1, 2, 3], 4096) == [[1], [2], [3]]


@pytest.mark.gpu
def test_overlap_under_autocast_keeps_bf16_on_gpus():
    """Autocast on a GPU, unlike on a CPU, makes a sum fp32 unless the sum is given a dtype."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    for row_dtype, difference in launch(under_autocast, "cuda", ranks=2, device="cuda"):
        assert row_dtype == torch.bfloat16
        assert difference < 0.02


def under_autocast(device):
    """Returns the dtype of a row's output, and the largest difference that overlap makes to gradients,
    relative to the largest gradient.
    """
    plan.LEAST_OVERLAPPED_BYTES = 0
    gradients, dtypes = [], set()
    for overlap in (False, True):
        model, table = build("default")
        parallel = parallelize_tensor(model.to(device).float(), table, overlap=overlap)
        for block in parallel.module.blocks:
            block.feed_forward.register_forward_hook(lambda *call: dtypes.add(call[-1].dtype))
        with torch.autocast(device, torch.bfloat16):
            loss = parallel.module(*(each.to(device) for each in batch(0)))
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in parallel.module.parameters()]))
    (dtype,) = dtypes
    plain, found = gradients
    return dtype, ((found - plain).abs().max() / plain.abs().max()).item()


def test_error_messages(two_ranks):
    for _, results in two_ranks:
        messages = results["messages"]
        assert messages["odd sequence"].startswith("the sequence has 5 tokens, which 2 ranks")
        assert messages["no module"] == "'nobody' matches no module"
        assert messages["no linear"] == (
            "norm is a RMSNorm; the rule column cuts nn.Linear and transformers' Conv1D"
        )
        assert messages["of another library"].startswith(
            "0 is a other.layers.Linear; the rule column"
        )
        assert messages["heads"].startswith("head.weight: 1 units of 11 rows cannot be cut into")
        assert messages["overlap"] == "overlap is True, which needs by_sequence=True"
        assert messages["token"] == "a token is not in the vocabulary of 11 words: 11"
        assert messages["target"] == "a target is not in the vocabulary of 11 words: 11"
        assert messages["fused target"] == "a target is not in the vocabulary of 11 words: -1"
        assert "the ranks' models differ: parameter or buffer weight" in messages["different"]
        again = "has no second derivative (create_graph=True)"
        assert messages["second derivative"] == f"the vocabulary-parallel loss {again}"
        assert messages["second derivative, fused"] == f"the vocabulary-parallel loss {again}"
        assert messages["magnitude"] == (
            "transformer.h.0.mlp.c_fc is peft's LoRA with lora_magnitude_vector, whose outputs cannot "
            "be cut; choose plain LoRA, or leave the layer whole"
        )
        assert messages["second derivative, overlap"] == f"a layer that overlaps {again}"
        part = "give its module a rule that cuts it in the same way, or a separate parameter"
        assert messages["tied"] == f"scale is the parameter out.bias, which is cut; {part}"
        assert messages["twice"] == (
            f"layers.0.k.weight is the parameter layers.0.q.weight, which is cut; {part}"
        )
        assert messages["cut twice"] == (
            f"layers.1.o.weight is the parameter embed.weight, which is cut; {part}"
        )
        assert messages["scaled"] == (
            "embed is a Scaled that overrides forward; the rule embedding cuts nn.Embedding"
        )
        assert messages["sparse"] == "embed has sparse, which a cut embedding does not support"
        assert messages["weight norm"] == "out has no parameter named weight to cut"
        assert messages["dropout"] == (
            "layers.0.norm has dropout of 0.1, which would drop different values on each rank; set its "
            "p to 0"
        )
        assert messages["hook"] == (
            "layers.0.q has forward_hooks, which would be lost; register hooks after the layers are "
            "cut: they then see this rank's part"
        )
        assert messages["weight's hook"].startswith(
            "layers.0.q.weight has a hook, which would be lost;"
        )
        assert messages["norm's hook"] == (
            "layers.0.norm.weight has a hook, which would see the gradient before it is summed over "
            "ranks; register hooks after the layers are cut"
        )
        assert messages["own forward"] == (
            "layers.0.q is a Linear that overrides forward; the rule column cuts nn.Linear and "
            "transformers' Conv1D"
        )
        assert messages["computed"] == (
            "layers.0.o has a parameter that is computed from others; the rule row cuts nn.Linear "
            "and transformers' Conv1D"
        )
        assert messages["functional dropout"] == (
            "layers.0.norm has dropout of 0.5, which would drop different values on each rank; set its "
            "dropout to 0"
        )
        assert messages["attends"] == (
            "layers.1.norm is a MultiheadAttention, which would only see its rank's piece of the "
            "sequence; choose by_sequence=False"
        )
        assert messages["out_proj"] == (
            "layers.1.norm.out_proj is in an nn.MultiheadAttention, which reads its weight instead of "
            "calling it; leave it whole"
        )
        no_rule = (
            "has no rule: each rank would only compute a part of its gradients; give it one of "
            "sequence, heads, whole"
        )
        assert (
            messages["no rule"] == f"layers.0.norm works on a piece of the sequence and {no_rule}"
        )
        assert messages["no query"] == (
            f"layers.0.o.q is in layers.0.o, which has the rule gather, and {no_rule}"
        )
        assert messages["no count"] == (
            "layers.0.o reads its num_heads, 4, but each rank has only a part of them; give it a rule "
            "with counts=(Count('num_heads', Section(4)),)"
        )
        assert messages["no config"] == (
            "a UserModel has no config of the transformers library to make a table from; give a "
            "table of names and rules"
        )
        assert messages["flat"] == (
            "the residual stream is cut along dim 1 of batch, sequence and width, but a layer gets an "
            "input of shape (2, 4); choose by_sequence=False"
        )
        assert messages["layer"] == (
            "the rule column replaces a layer inside a module, but the layer was passed itself"
        )
        assert messages["no split"] == (
            "by_sequence is True, and the table cuts the embedding embed but has no rule split; give "
            "the first module of the residual stream the rule split, or choose by_sequence=False"
        )
