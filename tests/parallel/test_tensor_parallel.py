"""Tensor parallel on two and four ranks against one process, under SGD, in float64."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
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
from stepgauge.parallel.communication import peer_memory
from stepgauge.parallel.tensor_parallel import parallelize_tensor
from stepgauge.parallel.tensor_parallel.overlapped import gathered_product
from stepgauge.parallel.tensor_parallel.vocabulary_loss import PartialLoss
from stepgauge.runtime.launch import launch
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan import tensor as plan
from stepgauge.spec.plan.tensor import Count, Rule, Section
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.plan.transformers_tables import table_of_config

PARTIAL_LOSS = PartialLoss(partial_forward, partial_backward)
STEPS, CLIP, VOCABULARY = 2, 0.05, 11  # which neither 2 nor 4 divide
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
}


class UserModel(nn.Module):
    """Query, key and value apart, a loss of its own, and layers that no rule names."""

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
USER_TABLE = {
    "embed": Rule("embedding"),
    "layers.0": Rule("split"),
    "layers.*.norm": Rule("sequence"),
    "layers.*.[qkv]": HEADS,
    "layers.*.o": Rule("row"),
    "out": Rule("head"),
}


def by_sequence_too(model):
    """The built-in table of a library's network, on a residual stream in pieces."""
    table = table_of_config(model.config.to_dict(), [name for name, _ in model.named_modules()])
    norms = ("model.norm", "model.layers.*.*_layernorm")
    return {**table, "model.layers.0": Rule("split"), **dict.fromkeys(norms, Rule("sequence"))}


def counting_model():
    model = UserModel()
    for layer in model.layers:
        layer.q, layer.k, layer.v = (nn.Identity() for _ in range(3))
        layer.o = CountingAttention()
    return model


# Without "split" the stream is whole, and nobody has to say so.
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
    """A network with random values everywhere, and its table."""
    torch.manual_seed(1)
    if name == "user":
        model, table = UserModel(), USER_TABLE
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
        table = by_sequence_too(model) if "sequence" in name else None
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
    """Losses and norms of some steps; the gradients of the last are left."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):  # gradients add up
            loss = model(*batch(2 * step + micro)) / 2
            loss.backward()
            found.append(loss.item())
        found.append(clip(CLIP).item())
        optimizer.step()
    return torch.tensor(found, dtype=torch.float64)


def difference(name, by_sequence=None, partial_loss=None, overlap=False, prepare=None):
    """The largest difference from one process: of losses and norms, gradients, weights."""
    whole, table = build(name)
    whole_found = train(whole, lambda norm: nn.utils.clip_grad_norm_(whole.parameters(), norm))
    model, _ = build(name)
    if dist.get_rank():  # rank 0's values count
        nn.init.zeros_(next(model.parameters()))
    parallel = parallelize_tensor(
        model, table, by_sequence=by_sequence, overlap=overlap, partial_loss=partial_loss
    )
    if prepare is not None:
        prepare(parallel.module)
    found = train(parallel.module, parallel.clip_gradients)
    differences = [(found - whole_found).abs().max()]
    cut = 0
    for key, parameter in parallel.module.named_parameters():
        expected = whole.get_parameter(key)
        differences.append((parameter - parallel.part(key, expected)).abs().max())
        if expected.requires_grad:
            differences.append((parameter.grad - parallel.part(key, expected.grad)).abs().max())
        differences.append((parallel.whole(key, parameter.detach()) - expected).abs().max())
        cut += parameter.numel() < expected.numel()
    assert cut >= 4 * 2, "few layers were cut"
    return max(each.item() for each in differences)


def difference_of_penalties(name, by_sequence=None):
    """Of gradients of a loss that has the gradient of the embedding's output in it."""
    found = []
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
            found.append((parameter.grad - parallel.part(key, expected)).abs().max().item())
    return max(found)


def logits_differ():
    model, table = build("default")
    tokens = batch(0)[0]
    expected = copy.deepcopy(model)(tokens)
    parallel = parallelize_tensor(model, table)
    return (parallel.module(tokens) - expected).abs().max().item()


def sums():
    """All-reduces of a backward that sums norms' gradients together, and where hooks see each; what
    differs there, in autograd.grad and after a backward into gradients that were there before.
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
        asked = torch.autograd.grad(parallel.module(*batch(0)), list(weights.values()))
        parallel.module(*batch(0)).backward()
        for (name, weight), gradient in zip(weights.items(), asked, strict=True):
            expected = whole.get_parameter(name).grad
            differences += [gradient - expected, weight.grad - 2 * expected]
            differences += [seen[name] - expected] if hooked else []
    return counts[1] - counts[0], len(norms), max(each.abs().max().item() for each in differences)


OVERLAPPED = ("tied, learned, layernorm, gelu, biases", "one key head, wide heads, parallel blocks")


def overlapped_differences():
    """The same of collectives beside products: of networks, of compiled blocks, of frozen weights,
    and of more turns than flags have values.
    """
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    found = {(name, "overlapped"): difference(name, overlap=True) for name in OVERLAPPED}
    if dist.get_world_size() == 2:  # the same for four
        found["compiled"] = difference("default", overlap=True, prepare=compile_blocks)
        found["frozen"] = difference_when_frozen()
    found["many turns"], found["many shapes"] = many_turns(), of_many_shapes()
    plan.LEAST_OVERLAPPED_BYTES = least
    return found


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def difference_when_frozen():
    """Of the other gradients, where the weights of columns and rows have none."""
    found = []
    for overlap in (False, True):
        model, table = build("default")
        for each in model.blocks[0].parameters():
            each.requires_grad_(each.ndim == 1)
        parallel = parallelize_tensor(model, table, overlap=overlap)
        parallel.module(*batch(0)).backward()
        found.append({n: p.grad for n, p in parallel.module.named_parameters()})
    plain, overlapped = found
    assert [n for n in plain if plain[n] is None] == [n for n in plain if overlapped[n] is None]
    return max((plain[n] - overlapped[n]).abs().max().item() for n in plain if plain[n] is not None)


def unfrozen(model):
    for each in model.parameters():
        each.requires_grad_(True)
    return model


def assigned(model):
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def differences_of_other_parameters():
    """Gradients of parameters that were frozen, or others, when the layers were cut."""
    found = {}
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
            found[name, change.__name__] = max(
                (p.grad - parallel.part(n, whole.get_parameter(n).grad)).abs().max().item()
                for n, p in changed.named_parameters()
            )
    return found


class Encoder(nn.Module):
    """torch's own layers, which read the weights of theirs where no gradients are asked for, and an
    embedding with a padding row.
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
    found = {}
    for mode in (torch.inference_mode, torch.enable_grad):
        whole.train(mode is torch.enable_grad)
        parallel.module.train(mode is torch.enable_grad)
        with mode():
            pair = parallel.module(tokens), whole(tokens)
        found["encoder", mode.__name__] = (pair[0] - pair[1]).abs().max().item()
    for output in pair:
        output.square().sum().backward()
    expected = parallel.part("embed.weight", whole.embed.weight.grad)
    difference = parallel.module.embed.weight.grad - expected
    return {**found, "padding row": difference.abs().max().item()}


def many_turns():
    """Of products of pieces that are others in each turn, while flags take the same values again."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    weight, largest = torch.eye(64, dtype=torch.float64)[: 64 // ranks], 0.0
    values, peer_memory.VALUES = peer_memory.VALUES, 8
    for turn in range(2 * peer_memory.VALUES + 3):
        x = torch.full((1, 1, 64), turn + rank, dtype=torch.float64)
        y = gathered_product(x, weight, group)
        expected = turn + torch.arange(ranks, dtype=torch.float64)
        largest = max(largest, (y - expected[None, :, None]).abs().max().item())
    peer_memory.VALUES = values
    return largest


def of_many_shapes():
    """Of products of pieces whose batch and length change: boxes grow, and are too large afterwards."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    generator, largest = torch.Generator().manual_seed(3), 0.0
    for batch_size, length in ((1, 1), (3, 5), (2, 1), (1, 9), (3, 3), (1, 1)):
        shape = batch_size, ranks * length, 12
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        weight = torch.randn(7, 12, generator=generator, dtype=torch.float64, requires_grad=True)
        own = whole.chunk(ranks, 1)[rank].clone().requires_grad_()
        expected_in = whole.clone().requires_grad_()
        expected = expected_in @ weight.detach().t()
        expected.square().sum().backward()
        y = gathered_product(own, weight, group)
        y.square().sum().div(ranks).backward()
        pairs = [(y, expected), (own.grad, expected_in.grad.chunk(ranks, 1)[rank])]
        pairs.append((weight.grad, 2 * expected.flatten(0, 1).t() @ whole.flatten(0, 1) / ranks))
        largest = max([largest, *((a - b).abs().max().item() for a, b in pairs)])
    return largest


def left_to_the_library():
    """Collectives that are not beside a product: of the head, of the first and last of the stream."""
    model, table = build("default")
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    parallel = parallelize_tensor(model, table, overlap=True)
    with CommDebugMode() as counter:
        parallel.module(*batch(0)).backward()
    plan.LEAST_OVERLAPPED_BYTES = least
    names = {str(operator): count for operator, count in counter.get_comm_counts().items()}
    return [sum(n for name, n in names.items() if each in name) for each in ("gather", "scatter")]


def message_of(call):
    try:
        call()
    except (ValueError, IndexError, RuntimeError) as error:
        return str(error)
    return "nothing was raised"


class Scaled(nn.Embedding):
    def forward(self, tokens):
        return 4 * super().forward(tokens)


def changed(**modules):
    """The user's model with other modules at those names."""
    model = UserModel()
    for name, module in modules.items():
        model.set_submodule(name, module)
    return model


def of_changed_models():
    """What is said about models of which a part would not be what it was."""
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
    found = {
        name: message_of(lambda model=model: parallelize_tensor(model, USER_TABLE))
        for name, model in models.items()
    }
    unsplit = {name: rule for name, rule in USER_TABLE.items() if rule.kind != "split"}
    return (
        found
        | of_hooked_models()
        | of_tables_of_the_library()
        | {
            "no split": message_of(lambda: parallelize_tensor(UserModel(), unsplit)),
        }
    )


def of_hooked_models():
    """What is said about hooks that would be lost or see a part, and about layers that forward reads
    otherwise.
    """
    hooked, seen, early, ours, halved = (UserModel() for _ in range(5))
    hooked.layers[0].q.register_forward_hook(lambda *_: None)
    seen.layers[0].q.weight.register_hook(lambda gradient: gradient)
    early.layers[0].norm.weight.register_hook(lambda gradient: gradient)
    ours.layers[0].q.forward = ours.layers[0].q.forward
    nn.utils.parametrize.register_parametrization(halved.layers[0].o, "bias", nn.Identity())
    models = {"hook": hooked, "weight's hook": seen, "early hook": early}
    models |= {"own forward": ours, "computed": halved}
    models["functional dropout"] = changed(**{"layers.0.norm": nn.LSTM(16, 16, 2, dropout=0.5)})
    return {
        name: message_of(lambda model=model: parallelize_tensor(model, USER_TABLE))
        for name, model in models.items()
    }


def of_tables_of_the_library():
    """And about tables that leave out what works on a part of the residual stream."""
    attending = UserModel()
    attending.layers[1].norm = nn.MultiheadAttention(16, 2)
    without = {name: rule for name, rule in USER_TABLE.items() if rule.kind != "sequence"}
    uncounted = COUNTING_TABLE | {"layers.*.o": Rule("gather")}
    half = {name: rule for name, rule in COUNTING_TABLE.items() if "q" not in name}
    calls = {
        "attends": (attending, USER_TABLE),
        "out_proj": (attending, {"layers.1.norm.out_proj": Rule("row")}),
        "no rule": (UserModel(), without),
        "uncounted": (counting_model(), uncounted),
        "half": (counting_model(), half),
        "no config": (UserModel(), None),
    }
    said = {
        name: message_of(lambda call=call: parallelize_tensor(*call))
        for name, call in calls.items()
    }
    flat = nn.Sequential(nn.Linear(4, 4))
    parallelize_tensor(flat, {"0": Rule("column")}, by_sequence=True)
    alone = message_of(lambda: parallelize_tensor(nn.Linear(4, 4), {"": Rule("column")}))
    return said | {"flat": message_of(lambda: flat(torch.ones(2, 4))), "alone": alone}


def adapt_with_magnitude():
    """As DoRA, of which a layer of rows would need the norms of whole ones."""
    model, _ = build("gpt2 adapted")
    model.transformer.h[0].mlp.c_fc.lora_magnitude_vector = nn.Parameter(torch.ones(24))
    parallelize_tensor(model)


def differentiated_again(overlap=None, partial_loss=None, targets=True):
    """What a penalty of gradients is told, of a loss or of logits: the first gradient is a constant."""
    least, plan.LEAST_OVERLAPPED_BYTES = plan.LEAST_OVERLAPPED_BYTES, 0
    model, table = build("default")
    module = parallelize_tensor(model, table, overlap=overlap, partial_loss=partial_loss).module
    value = module(*batch(0)[: 1 + targets]).sum()
    plan.LEAST_OVERLAPPED_BYTES = least
    weights = list(module.parameters())
    return message_of(lambda: torch.autograd.grad(value, weights, create_graph=True))


def mistakes():
    """What is said about tables, shapes and networks that do not fit."""
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
        "whole": message_of(
            lambda: parallelize_tensor(model, table, by_sequence=False, overlap=True)
        ),
        "token": message_of(lambda: parallel.module(beyond, targets)),
        "target": message_of(lambda: parallel.module(tokens, beyond)),
        "fused target": message_of(lambda: fused.module(tokens, torch.full_like(tokens, -1))),
        "different": message_of(lambda: parallelize_tensor(wrong, {"": Rule("column")})),
        "loss again": differentiated_again(),
        "fused loss again": differentiated_again(partial_loss=PARTIAL_LOSS),
        "overlapped again": differentiated_again(overlap=True, targets=False),
        "magnitude": message_of(adapt_with_magnitude),
        **of_changed_models(),
    }


def everything():
    torch.set_num_threads(1)
    is_two = dist.get_world_size() == 2
    found = {
        (name, by_sequence): difference(name, by_sequence)
        for name in (*SPECS, "user")
        for by_sequence in ((True, False) if is_two else (True,))
    }
    adapted = ("library adapted", "library by sequence, adapted", "gpt2 adapted")
    other = ("library", "library by sequence", "counting", "gpt2", "one key head, transposed")
    for name in (*other, *adapted):
        found[name] = difference(name)
    for name in ("user", "library by sequence", "gpt2"):
        found[name, "penalty"] = difference_of_penalties(name)
    found["user", "penalty", "whole"] = difference_of_penalties("user", False)
    found["no logits held"] = difference(OVERLAPPED[0], True, PARTIAL_LOSS)
    found |= overlapped_differences()
    if is_two:
        found |= differences_of_other_parameters() | {"logits": logits_differ()}
        found |= differences_of_torchs_encoder()
    return found


def checks():
    return {"left": left_to_the_library(), "mistakes": mistakes(), "sums": sums()}


def on_two_ranks():
    return everything(), checks()


@pytest.fixture(scope="module")
def two_ranks():
    return launch(on_two_ranks, ranks=2)


def test_training_on_two_ranks_equals_that_of_one_process(two_ranks):
    for found, _ in two_ranks:
        assert {case: most for case, most in found.items() if most >= 1e-10} == {}


def test_training_on_four_ranks_equals_that_of_one_process():
    for found in launch(everything, ranks=4):
        assert {case: most for case, most in found.items() if most >= 1e-10} == {}


def test_collectives_are_summed_together_and_left_to_the_library(two_ranks):
    for _, found in two_ranks:
        assert found["left"] == [2, 1]
        more, norms, largest = found["sums"]
        assert more == norms - 1 == 4 and largest < 1e-10


@pytest.mark.gpu
def test_overlapped_under_autocast_sends_what_plain_sends_on_gpus():
    """Autocast on a GPU, unlike a CPU's, makes every sum fp32 that is not told its type."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs; this machine has {torch.cuda.device_count()}")
    for type_of_a_row, difference in launch(under_autocast, "cuda", ranks=2, device="cuda"):
        assert type_of_a_row == torch.bfloat16
        assert difference < 0.02


def under_autocast(device):
    """The type of what a row gives, and the gradients' difference from plain, of the largest one."""
    plan.LEAST_OVERLAPPED_BYTES = 0
    gradients, types = [], set()
    for overlap in (False, True):
        model, table = build("default")
        parallel = parallelize_tensor(model.to(device).float(), table, overlap=overlap)
        for block in parallel.module.blocks:
            block.feed_forward.register_forward_hook(lambda *seen: types.add(seen[-1].dtype))
        with torch.autocast(device, torch.bfloat16):
            loss = parallel.module(*(each.to(device) for each in batch(0)))
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in parallel.module.parameters()]))
    (kind,) = types
    plain, overlapped = gradients
    return kind, ((overlapped - plain).abs().max() / plain.abs().max()).item()


def test_mistakes_are_said(two_ranks):
    for _, found in two_ranks:
        said = found["mistakes"]
        assert said["odd sequence"].startswith("the sequence has 5 tokens, which 2 ranks")
        assert said["no module"] == "'nobody' matches no module"
        assert said["no linear"] == (
            "norm is a RMSNorm; the rule column cuts nn.Linear and transformers' Conv1D"
        )
        assert said["of another library"].startswith("0 is a other.layers.Linear; the rule column")
        assert said["heads"].startswith("head.weight: 1 units of 11 rows cannot be cut into")
        assert said["whole"] == (
            "overlap is True and by_sequence False; only pieces are overlapped"
        )
        assert said["token"] == "a token is not in the vocabulary of 11 words: 11"
        assert said["target"] == "a target is not in the vocabulary of 11 words: 11"
        assert said["fused target"] == "a target is not in the vocabulary of 11 words: -1"
        assert "the ranks' models differ: parameter or buffer weight" in said["different"]
        again = "has no second derivative (create_graph=True)"
        assert said["loss again"] == f"the loss that is cut over the vocabulary {again}"
        assert said["fused loss again"] == f"the loss that is cut over the vocabulary {again}"
        assert said["magnitude"] == (
            "transformer.h.0.mlp.c_fc is peft's LoRA with lora_magnitude_vector, whose outputs cannot "
            "be cut; choose plain LoRA, or leave the layer whole"
        )
        assert said["overlapped again"] == f"a layer that overlaps {again}"
        part = "give its module a rule that cuts it alike, or a parameter of its own"
        assert said["tied"] == f"scale is the parameter out.bias, which is cut; {part}"
        assert said["twice"] == (
            f"layers.0.k.weight is the parameter layers.0.q.weight, which is cut; {part}"
        )
        assert said["cut twice"] == (
            f"layers.1.o.weight is the parameter embed.weight, which is cut; {part}"
        )
        assert said["scaled"] == (
            "embed is a Scaled with a forward of its own; the rule embedding cuts nn.Embedding"
        )
        assert said["sparse"] == "embed has sparse, which an embedding that is cut does not do"
        assert said["weight norm"] == "out has no parameter weight of its own to cut"
        assert said["dropout"] == (
            "layers.0.norm has dropout of 0.1, which would drop other values on each rank; set its p "
            "to 0"
        )
        assert said["hook"] == (
            "layers.0.q has forward_hooks, which would be lost; register hooks after the layers are "
            "cut: they then see this rank's part"
        )
        assert said["weight's hook"].startswith(
            "layers.0.q.weight has a hook, which would be lost;"
        )
        assert said["early hook"] == (
            "layers.0.norm.weight has a hook, which would see the gradient of a part; register hooks "
            "after the layers are cut"
        )
        assert said["own forward"] == (
            "layers.0.q is a Linear with a forward of its own; the rule column cuts nn.Linear and "
            "transformers' Conv1D"
        )
        assert said["computed"] == (
            "layers.0.o has a parameter that is computed from others; the rule row cuts nn.Linear "
            "and transformers' Conv1D"
        )
        assert said["functional dropout"] == (
            "layers.0.norm has dropout of 0.5, which would drop other values on each rank; set its "
            "dropout to 0"
        )
        assert said["attends"] == (
            "layers.1.norm is a MultiheadAttention, which would see its rank's piece of the sequence "
            "alone; choose by_sequence=False"
        )
        assert said["out_proj"] == (
            "layers.1.norm.out_proj is read by its nn.MultiheadAttention, which does not call it; "
            "leave it whole"
        )
        part = "has no rule: the gradients of its weights would be those of one part alone; give it one of"
        assert said["no rule"] == (
            f"layers.0.norm works on a piece of the sequence and {part} sequence, heads, whole"
        )
        assert said["half"] == (
            f"layers.0.o.q is in layers.0.o, which gathers for its columns, and {part} sequence, heads, "
            "whole"
        )
        assert said["uncounted"] == (
            "layers.0.o reads its num_heads, 4, and each rank has only a part of them; give it a rule "
            "with counts=(Count('num_heads', Section(4)),)"
        )
        assert said["no config"] == (
            "a UserModel has no config of the transformers library to make a table from; give a "
            "table of names and rules"
        )
        assert said["flat"] == (
            "the residual stream is cut along dim 1 of batch, sequence and width, and a layer is "
            "given (2, 4); choose by_sequence=False"
        )
        assert (
            said["alone"] == "the rule column replaces a layer of a module, and was given it alone"
        )
        assert said["no split"] == (
            "by_sequence is True, and the table cuts the embedding embed and splits nothing; give "
            "the first module of the residual stream the rule split, or choose by_sequence=False"
        )
