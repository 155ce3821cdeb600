"""The network against its equations, and its parts against each other."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from stepgauge.models import parts
from stepgauge.models.transformer import TransformerLM, rotary_tables, rotate
from stepgauge.spec import model as spec_model
from stepgauge.spec import step as spec_step
from stepgauge.spec.model import ModelSpec


def test_the_spec_names_the_parts_that_there_are():
    assert set(parts.NORMS) == set(spec_model.NORMS)
    assert set(parts.ATTENTIONS) == set(spec_model.ATTENTIONS)
    assert set(parts.LOSSES) == set(spec_model.LOSSES)
    assert set(parts.OPTIMIZERS) == set(spec_step.OPTIMIZERS)


def plain_forward(model, tokens):
    """The network once more, one head and one position pair at a time, as the papers write it."""
    spec = model.spec
    length, width = tokens.shape[1], spec.head_width
    x = model.embedding.weight[tokens]
    for block in model.blocks:
        h = F.rms_norm(x, (spec.d_model,), block.attention_norm.weight, eps=1e-5)
        q, k, v = (h @ w.T for w in block.attention.input.weight.chunk(3))
        heads = []
        for head in range(spec.num_heads):
            columns = slice(head * width, (head + 1) * width)
            qh, kh = turn(q[..., columns]), turn(k[..., columns])
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


def turn(x_BTW):
    """Rotary positions as complex numbers: pair (i, i + W/2) at position t turns by t ·
    10000^(-2i/W).
    """
    half = x_BTW.shape[-1] // 2
    pairs = torch.complex(x_BTW[..., :half], x_BTW[..., half:])
    angle = torch.arange(x_BTW.shape[1], dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_forward_is_the_papers_network(attention):
    torch.manual_seed(0)
    spec = ModelSpec.preset("nano", vocab_size=50, context_length=9, attention=attention)
    model = TransformerLM(spec).double()
    tokens = torch.randint(50, (2, 7))
    expected = plain_forward(model, tokens)
    # The rotary tables are fp32 by design, so this is not float64's own precision.
    assert (model(tokens) - expected).norm() / expected.norm() < 1e-6
    loss = model(tokens, tokens)
    assert loss.item() == pytest.approx(
        F.cross_entropy(expected.flatten(0, 1), tokens.flatten()).item(), rel=1e-6
    )


def test_rotation_depends_on_distance_only():
    cos, sin = (table.double() for table in rotary_tables(64, 16, None))
    q, k = torch.randn(2, 1, 1, 64, 16, dtype=torch.float64)
    # the same vectors at every position
    q, k = q[..., :1, :].expand_as(q), k[..., :1, :].expand_as(k)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2)
    for distance in (0, 3, 17):
        diagonal = scores[0, 0].diagonal(-distance)
        assert (diagonal - diagonal[0]).abs().max() < 1e-5


@pytest.mark.parametrize("name", [name for name in parts.NORMS if name.startswith("rmsnorm")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norms_follow_the_equation(name, dtype):
    norm = parts.NORMS[name](24, dtype=dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(5, 24, dtype=dtype)
    wide = x.double()
    expected = (
        wide
        / (wide.square().mean(-1, keepdim=True) + parts.NORM_EPSILON).sqrt()
        * norm.weight.double()
    )
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


@pytest.mark.parametrize("name", parts.OPTIMIZERS)
def test_optimizers_take_the_same_settings(name):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = parts.build_optimizer(
        name, [parameter], lr=0.1, weight_decay=0.0, betas=(0.9, 0.95)
    )
    parameter.grad = torch.tensor([1.0, -1.0, 1.0])
    optimizer.step()
    assert parameter.tolist() == pytest.approx([0.9, 1.1, 0.9])
