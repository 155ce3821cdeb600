"""The counts of ModelSpec, compared with the module and torch's FLOP counter."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.kinds import completed
from stepgauge.spec.model import SIZES, ModelSpec
from stepgauge.spec.model_fields import FEED_FORWARD_MATRICES, NORMS, nearest_divisor
from stepgauge.spec.step import StepSpec

META = torch.device("meta")
VARIANTS = [
    {},
    {"norm": "layernorm", "block": "post-norm", "mask": "full"},
    {"positions": "learned", "num_positions": 64},
    {"tied_head": True, "scaled_embedding": True, "positions": "none"},
    {"feed_forward": "gelu", "norm": "layernorm", "positions": "learned", "tied_head": True},
    {"num_kv_heads": 1, "head_dim": 48, "qk_norm": True, "attention_bias": "qkv"},
    {"num_heads": 3, "head_dim": 20, "norm": "layernorm", "qk_norm": True, "rope_fraction": 0.5},
    {"feed_forward": "relu", "feed_forward_bias": True, "attention_bias": "all"},
    {"feed_forward": "geglu-tanh", "feed_forward_bias": True, "block": "parallel"},
    {"window": 8, "full_attention_every": 2},
    {"num_experts": 5, "experts_per_token": 2},
    {"num_experts": 3, "experts_per_token": 1, "feed_forward": "silu"},
    *({"feed_forward": name} for name in FEED_FORWARD_MATRICES),
    *({"norm": name} for name in NORMS),
]


@pytest.mark.parametrize("size", SIZES)
def test_presets_count_the_parameters_of_the_module(size):
    spec = ModelSpec.preset(size)
    assert (
        sum(p.numel() for p in TransformerLM(spec, device=META).parameters()) == spec.num_parameters
    )


# 2VD + 3LDF + 4LD² + (2L+1)D, computed by hand.
@pytest.mark.parametrize(
    ("size", "parameters"), [("small", 128_625_408), ("xl", 1_998_235_200), ("2.7b", 3_406_809_600)]
)
def test_presets_have_known_parameters(size, parameters):
    assert ModelSpec.preset(size).num_parameters == parameters


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_parameters_and_flops_equal_those_of_the_module(changes):
    spec = ModelSpec.preset("nano", vocab_size=96, context_length=32, attention="eager", **changes)
    tokens = torch.randint(96, (3, 32))
    model = TransformerLM(spec)
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens)
    # torch counts the whole score matrix, masked or not.
    unmasked = dataclasses.replace(spec, mask="full", window=0, full_attention_every=0)
    expected = unmasked.forward_flops(batch=3, sequence=32)
    assert counter.get_total_flops() == expected
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * expected


def test_a_causal_mask_only_halves_attention():
    spec = ModelSpec.preset("small")
    whole = dataclasses.replace(spec, mask="full").forward_flops(batch=2, sequence=512)
    half = spec.forward_flops(batch=2, sequence=512)
    assert whole - half == 2 * 2 * 512 * 512 * spec.d_model * spec.num_layers
    assert spec.step_flops(batch=2, sequence=512) == 3 * half


def test_a_window_counts_only_visible_pairs():
    whole = ModelSpec.preset("nano", context_length=64)
    windowed = ModelSpec.preset("nano", context_length=64, window=16, full_attention_every=2)
    hidden_pairs = (64 - 16) ** 2 / 2  # a triangle; without a window 64² / 2 pairs are visible
    saved = whole.forward_flops(batch=1, sequence=64) - windowed.forward_flops(batch=1, sequence=64)
    assert saved == 4 * 64 * hidden_pairs  # in one of two blocks
    assert windowed.forward_flops(batch=1, sequence=16) == whole.forward_flops(batch=1, sequence=16)


def test_a_record_without_new_fields_describes_the_same_network():
    old_model = {"vocab_size": 10_000, "context_length": 512, "d_model": 768, "d_ff": 3072}
    spec = {"model": old_model, "size": "small", "batch": 4}
    now = StepSpec(model=ModelSpec.preset("small"), size="small")
    assert completed("step", spec) == dataclasses.asdict(now)


def test_residual_stream_bytes():
    assert (
        ModelSpec.preset("2.7b").residual_stream_bytes(batch=4, sequence=128) == 4 * 128 * 2560 * 4
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 7}, ["num_heads is 7", "768", "nearest divisor is 6"]),
        ({"d_model": -1}, ["d_model is -1", "at least 1"]),
        ({"num_layers": 0}, ["num_layers is 0", "at least 1"]),
        ({"vocab_size": 10**9}, ["vocab_size is 1,000,000,000", "at most"]),
        ({"norm": "batchnorm"}, ["norm is 'batchnorm'", "rmsnorm", "layernorm"]),
        ({"d_model": 36, "num_heads": 12}, ["odd width 3", "rotary positions"]),
        ({"num_kv_heads": 5}, ["num_kv_heads is 5", "divide num_heads 12", "divisor is 4"]),
        ({"rope_fraction": 0.08}, ["rope_fraction is 0.08, which rotates 5 of 64 features"]),
        ({"rope_scaling": "llama3:8"}, ["write it as llama3:FACTOR:LOW_FREQ_FACTOR"]),
        ({"rope_scaling": "new"}, ["rope_scaling is 'new'; choose one of none, linear"]),
        (
            {"positions": "learned", "num_positions": 9},
            ["context_length is 512", "at most num_positions, 9"],
        ),
        ({"window": 4, "mask": "full"}, ["window is 4, which needs the causal mask"]),
        ({"num_experts": 4}, ["num_experts is 4; give experts_per_token too"]),
        ({"experts_per_token": 1}, ["experts_per_token is 1; it must be at most"]),
    ],
)
def test_an_invalid_shape_is_refused_with_the_reason(changes, words):
    with pytest.raises(ValueError) as error:
        ModelSpec.preset("small", **changes)
    assert all(word in str(error.value) for word in words)


def test_an_unknown_size_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"size is 'huge'; choose one of nano, .*2\.7b"):
        ModelSpec.preset("huge")


def test_nearest_divisor():
    assert [nearest_divisor(768, wanted) for wanted in (1, 5, 7, 1000)] == [1, 4, 6, 768]


def test_architecture_ignores_only_implementations():
    spec = ModelSpec.preset("nano")
    same = ModelSpec.preset("nano", norm="rmsnorm-eager", attention="eager")
    other = ModelSpec.preset("nano", norm="layernorm")
    assert spec.architecture() == same.architecture() != other.architecture()


def test_fields_that_a_caller_does_not_support_are_refused():
    spec = ModelSpec.preset("nano", norm="layernorm", num_kv_heads=1)
    spec.require_defaults("norm num_kv_heads", "is not known")
    with pytest.raises(ValueError, match="num_kv_heads is 1, which has no cost model yet"):
        spec.require_defaults("norm", "has no cost model yet")
