"""Compares the network with its equations, and implementations of its parts with each other."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from stepgauge.kernels.rotary import rotate
from stepgauge.models import feed_forward, parts
from stepgauge.models.bert import BertForMaskedLM
from stepgauge.models.feed_forward import ACTIVATIONS, build_feed_forward
from stepgauge.models.rotary import rotary_tables
from stepgauge.models.transformer import Attention, TransformerLM
from stepgauge.spec import model_fields
from stepgauge.spec import step as spec_step
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.stages import parts_of


def test_the_names_in_the_spec_are_those_of_the_tables():
    assert set(parts.NORMS) == set(model_fields.NORMS)
    assert set(parts.ATTENTIONS) == set(model_fields.ATTENTIONS)
    assert set(ACTIVATIONS) == set(model_fields.FEED_FORWARD_MATRICES)
    assert set(parts.LOSSES) == set(model_fields.LOSSES)
    assert set(parts.OPTIMIZERS) == set(spec_step.OPTIMIZERS)


def plain_forward(model, tokens):
    """Computes the network as in the papers, one head and one pair of positions at a time."""
    spec = model.spec
    length, width = tokens.shape[1], spec.head_width
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        h = F.rms_norm(x, (spec.d_model,), block.attention_norm.weight, eps=1e-5)
        q, k, v = (h @ w.T for w in block.attention.input.weight.chunk(3))
        heads = []
        for head in range(spec.num_heads):
            columns = slice(head * width, (head + 1) * width)
            qh, kh = rotated(q[..., columns]), rotated(k[..., columns])
            scores = qh @ kh.transpose(1, 2) / math.sqrt(width)
            for t, s in itertools.product(range(length), repeat=2):
                if s > t:
                    scores[:, t, s] = -math.inf
            heads.append(scores.softmax(-1) @ v[..., columns])
        x = x + torch.cat(heads, -1) @ block.attention.output.weight.T
        h = F.rms_norm(x, (spec.d_model,), block.feed_forward_norm.weight, eps=1e-5)
        gate, up = (h @ w.T for w in block.feed_forward.gate_up.weight.chunk(2))
        x = x + (gate * gate.sigmoid() * up) @ block.feed_forward.down.weight.T
    return F.rms_norm(x, (spec.d_model,), model.norm.weight, eps=1e-5) @ model.head.weight.T


def rotated(x_BTW):
    """Rotary positions with complex numbers: at position t, the pair (i, i + W/2) is rotated by the
    angle t · 10000^(-2i/W).
    """
    half = x_BTW.shape[-1] // 2
    pairs = torch.complex(x_BTW[..., :half], x_BTW[..., half:])
    angle = torch.arange(x_BTW.shape[1], dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    rotated_pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((rotated_pairs.real, rotated_pairs.imag), -1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forward_follows_the_equations(attention):
    torch.manual_seed(0)
    spec = ModelSpec.preset("nano", vocab_size=50, context_length=9, attention=attention)
    model = TransformerLM(spec).double()
    tokens = torch.randint(50, (2, 7))
    expected = plain_forward(model, tokens)
    # The rotary tables are fp32, so the error is larger than float64's.
    assert (model(tokens) - expected).norm() / expected.norm() < 1e-6
    loss = model(tokens, tokens)
    assert loss.item() == pytest.approx(
        F.cross_entropy(expected.flatten(0, 1), tokens.flatten()).item(), rel=1e-6
    )


def test_rotated_scores_depend_only_on_the_distance():
    spec = ModelSpec(context_length=64, d_model=16, num_heads=1)
    cos, sin = (table.double() for table in rotary_tables(spec, None))
    q, k = torch.randn(2, 1, 1, 64, 16, dtype=torch.float64)
    # the same vectors at every position
    q, k = q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2)
    for distance in (0, 3, 17):
        diagonal = scores[0, 0].diagonal(-distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [{}, {"num_kv_heads": 2}, {"rope_fraction": 0.5}, {"qk_norm": True}, {"positions": "none"}],
)
def test_rotating_queries_and_keys_together_or_separately_has_the_same_gradients(
    changes, monkeypatch
):
    shape = {"vocab_size": 16, "context_length": 9, "d_model": 32, "d_ff": 16, "num_layers": 1}
    spec = ModelSpec(**shape, num_heads=4, **changes)
    model, tokens = TransformerLM(spec).double(), torch.randint(16, (2, 7))

    def gradients():
        return torch.autograd.grad(model(tokens, tokens), list(model.parameters()))

    together = gradients()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for one, other in zip(together, gradients(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_compiling", [False, True])
def test_all_tokens_are_rotated_if_the_input_layer_gathers_them(is_compiling, monkeypatch):
    """Under tensor parallelism, attention gets a shard of the sequence and its input layer gathers."""
    spec = ModelSpec(d_model=16, d_ff=32, num_layers=1, num_heads=2, context_length=8)
    attention = Attention(spec, 0, torch.device("cpu"))
    x, rotation = torch.randn(1, 8, 16), rotary_tables(spec, None)
    expected = attention(x, rotation)
    attention.input.register_forward_pre_hook(lambda *_: (x,))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    torch.testing.assert_close(attention(x[:, :4], rotation), expected)


@pytest.mark.parametrize("name", [name for name in parts.NORMS if name.startswith("rmsnorm")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_follow_the_equation(name, dtype):
    norm = parts.NORMS[name](24, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 24, dtype=dtype)
    exact_x = x.double()
    root_mean_square = (exact_x.square().mean(-1, keepdim=True) + parts.NORM_EPSILON).sqrt()
    expected = exact_x / root_mean_square * norm.weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert norm(x).dtype == dtype
    assert (norm(x).double() - expected).norm() / expected.norm() < tolerance


def test_attention_is_causal():
    spec = ModelSpec.preset("nano", vocab_size=50, context_length=16)
    model = TransformerLM(spec)
    tokens = torch.randint(50, (1, 16))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def visible_to_last(**changes):
    """Returns which of eight tokens are visible to the last one through one block."""
    spec = ModelSpec.preset("nano", vocab_size=50, context_length=8, num_layers=1, **changes)
    model, tokens = TransformerLM(spec), torch.randint(50, (1, 8))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    before = model(tokens)[0]
    visible = []
    for position in range(8):
        changed = tokens.clone()
        changed[0, position] = (changed[0, position] + 1) % 50
        after = model(changed)[0]
        visible.append(not torch.equal(before[-1], after[-1]))
        if spec.mask == "full":
            assert not torch.equal(before[0], after[0])
    return visible


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_masks_and_windows(attention):
    assert visible_to_last(attention=attention, mask="full") == [True] * 8
    assert visible_to_last(attention=attention, window=3) == [False] * 5 + [True] * 3
    assert visible_to_last(attention=attention, window=3, full_attention_every=1) == [True] * 8


@pytest.mark.parametrize(
    "changes",
    [{"num_kv_heads": 1}, {"window": 3}, {"mask": "full"}, {"num_kv_heads": 1, "head_dim": 24}],
    ids=str,
)
def test_implementations_of_attention_agree(changes):
    logits = []
    for attention in ("sdpa", "eager", "triton"):
        if attention == "triton" and "window" in changes:
            continue
        spec = ModelSpec.preset(
            "nano", vocab_size=50, context_length=8, attention=attention, **changes
        )
        logits.append(TransformerLM(spec, seed=1).double()(torch.arange(16).view(2, 8)))
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])


def test_grouped_experts_equal_experts_one_by_one(monkeypatch):
    """A GPU uses grouped products in bf16. One expert gets no token."""
    spec = ModelSpec.preset("nano", d_model=64, d_ff=160, num_experts=4, experts_per_token=2)
    torch.manual_seed(0)
    layer = build_feed_forward(spec, torch.device("cpu")).bfloat16()
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    x = torch.randn(3, 50, 64, dtype=torch.bfloat16)
    x[..., 0] = 10.0
    with torch.no_grad():
        layer.router.weight[3, 0] = -10.0
    results = []
    for is_grouped in (False, True):
        monkeypatch.setattr(feed_forward, "_can_be_grouped", lambda *_, value=is_grouped: value)
        y = layer(x.requires_grad_())
        leaves = [x, *layer.parameters()]
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert results[0][3][3].abs().max() == 0, "no token goes to the last expert"
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() <= 0.01 * one.float().norm()


def test_tokens_go_to_the_experts_that_the_router_chooses():
    spec = ModelSpec.preset("nano", num_experts=3, experts_per_token=2, num_layers=1)
    layer = TransformerLM(spec).double().blocks[0].feed_forward
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    scores = layer.router(x)
    expected = torch.zeros_like(x)
    for b, t in itertools.product(range(2), range(5)):
        best = scores[b, t].argsort(descending=True)[:2]
        for share, expert in zip(scores[b, t][best].softmax(-1), best, strict=True):
            gate, up = (layer.up_weight[expert] @ x[b, t]).chunk(2)
            hidden = F.silu(gate) * up
            expected[b, t] += share * (layer.down_weight[expert] @ hidden)
    torch.testing.assert_close(layer(x), expected, rtol=1e-6, atol=1e-6)


STAGES = [
    [parts_of(blocks, 4) for blocks in (range(1), range(1, 3), range(3, 4))],
    [range(1), range(1, 4), range(4, 9), range(9, 10)],  # embeddings, 1.5 blocks, 2.5, the head
]
NETWORKS = {
    "tied": (TransformerLM, ModelSpec.preset("nano", num_layers=4, tied_head=True)),
    "learned": (TransformerLM, ModelSpec.preset("nano", num_layers=4, positions="learned")),
    "bert": (BertForMaskedLM, BertSpec.preset("bert-tiny", num_layers=4, vocab_size=100)),
}


@pytest.mark.parametrize("cuts", STAGES)
@pytest.mark.parametrize("name", NETWORKS)
def test_separately_built_stages_equal_the_whole_network(name, cuts):
    network, spec = NETWORKS[name]
    whole = network(spec, seed=3)
    stages = [network(spec, parts=parts, seed=3) for parts in cuts]
    named = dict(whole.named_parameters(remove_duplicate=False))
    for stage in stages:
        for key, parameter in stage.named_parameters(remove_duplicate=False):
            assert torch.equal(parameter, named.pop(key, parameter)), key
    assert set(named) <= {"head.weight"}  # a tied head is built by the first and the last stage
    x = tokens = torch.randint(100, (2, 6))
    for stage in stages[:-1]:
        x = stage(x)
        with pytest.raises(ValueError, match="a stage without the head; it has no loss"):
            stage(x if stage is not stages[0] else tokens, tokens)
    assert torch.equal(stages[-1](x, tokens), whole(tokens, tokens))


def test_weights_depend_on_the_seed_and_the_name():
    spec = ModelSpec.preset("nano")
    torch.manual_seed(5)
    first = TransformerLM(spec)
    same, other = TransformerLM(spec, seed=5), TransformerLM(spec, seed=6)
    assert torch.equal(first.head.weight, same.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    blocks = first.blocks
    assert not torch.equal(blocks[0].attention.input.weight, blocks[1].attention.input.weight)
    assert blocks[0].attention.input.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert blocks[0].feed_forward.down.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_fused_layers_have_the_sections_of_the_spec():
    spec = ModelSpec.preset("nano", num_kv_heads=1)
    block = TransformerLM(spec).blocks[0]
    assert block.attention.input.sections == (64, 32, 32)
    assert block.feed_forward.gate_up.sections == (256, 256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 8, "attention": "sdpa-cudnn"}, "attention sdpa-cudnn does not have; choose"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn', which cannot be run yet"),
    ],
)
def test_building_a_network_that_cannot_be_run_raises_an_error(changes, words):
    spec = ModelSpec.preset("nano", **changes)
    with pytest.raises(ValueError, match=words):
        TransformerLM(spec)


@pytest.mark.parametrize("name", parts.OPTIMIZERS)
def test_all_optimizers_accept_the_same_settings(name):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = parts.build_optimizer(
        name, [parameter], lr=0.1, weight_decay=0.0, betas=(0.9, 0.95)
    )
    parameter.grad = torch.tensor([1.0, -1.0, 1.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9, 1.1, 0.9])
