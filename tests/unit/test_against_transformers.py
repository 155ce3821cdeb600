"""Compares the network of each family with the transformers library's, with the same weights. Skipped
if the library is not installed.
"""

import pytest
import torch

from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.hf_config import network_of

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": {**GROUPED, "attention_bias": True, "mlp_bias": True, "rope_scaling": SCALING},
    "llama linear": {**GROUPED, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "mistral": {**GROUPED, "sliding_window": 5, "rope_theta": 500.0},
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {
        **GROUPED,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3": {**GROUPED, "head_dim": 16, "tie_word_embeddings": True},
    "gemma": {**GROUPED, "head_dim": 16, "num_key_value_heads": 1},
    "gpt_neox": {**SHAPE, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 100.0}},
    "gpt2": {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_equal_those_of_transformers(name):
    kind = name.split()[0]
    fields = {"model_type": kind, **FAMILIES[name]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**fields, pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    # Biases are initially zero and gains one, which would hide swapped parameters.
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = TransformerLM(network_of(fields))
    ours.load_state_dict(renamed(theirs, ours.spec, kind))
    tokens = torch.randint(61, (2, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-3, atol=1e-3)


def renamed(theirs, spec, kind):
    """Returns the weights of the transformers network by the names of this package."""
    weights = theirs.state_dict()
    if kind == "gpt2":
        return renamed_gpt2(weights, spec)
    if kind == "gpt_neox":
        return renamed_gpt_neox(weights, spec)
    ours = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "norm.weight": gain(weights["model.norm.weight"], kind),
        "head.weight": weights["lm_head.weight"],
    }
    for number in range(spec.num_layers):
        layer, block = f"model.layers.{number}", f"blocks.{number}"
        ours |= {
            f"{block}.attention_norm.weight": gain(
                weights[f"{layer}.input_layernorm.weight"], kind
            ),
            f"{block}.feed_forward_norm.weight": gain(
                weights[f"{layer}.post_attention_layernorm.weight"], kind
            ),
        }
        if kind == "qwen3":
            for position, part in enumerate("qk"):
                norm = weights[f"{layer}.self_attn.{part}_norm.weight"]
                ours[f"{block}.attention.qk_norms.{position}.weight"] = norm
        if kind == "mixtral":
            experts = f"{layer}.mlp.experts"
            ours |= {
                f"{block}.feed_forward.router.weight": weights[f"{layer}.mlp.gate.weight"],
                f"{block}.feed_forward.up_weight": weights[f"{experts}.gate_up_proj"],
                f"{block}.feed_forward.down_weight": weights[f"{experts}.down_proj"],
            }
        fused = {
            "attention.input": [f"self_attn.{p}_proj" for p in "qkv"],
            "attention.output": ["self_attn.o_proj"],
            "feed_forward.down": ["mlp.down_proj"],
            "feed_forward.gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        }
        for end in ("weight", "bias"):
            for name, parts in fused.items():
                names = [f"{layer}.{part}.{end}" for part in parts]
                sections = [weights[each] for each in names if each in weights]
                if sections:
                    ours[f"{block}.{name}.{end}"] = torch.cat(sections)
    return ours


def gain(weight, kind):
    return weight + 1 if kind == "gemma" else weight


def renamed_gpt2(weights, spec):
    ours = {
        "embedding.weight": weights["transformer.wte.weight"],
        "head.weight": weights["transformer.wte.weight"],
        "positions.weight": weights["transformer.wpe.weight"],
    }
    names = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
    names |= {"attention.input": "attn.c_attn", "attention.output": "attn.c_proj"}
    names |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
    for end in ("weight", "bias"):
        ours[f"norm.{end}"] = weights[f"transformer.ln_f.{end}"]
        for layer in range(spec.num_layers):
            for name, part in names.items():
                value = weights[f"transformer.h.{layer}.{part}.{end}"]
                ours[f"blocks.{layer}.{name}.{end}"] = value.T if value.ndim == 2 else value
    return ours


def renamed_gpt_neox(weights, spec):
    ours = {
        "embedding.weight": weights["gpt_neox.embed_in.weight"],
        "head.weight": weights["lm_head.weight"],
    }
    names = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    names |= {"attention.output": "attention.dense"}
    names |= {"feed_forward.up": "mlp.dense_h_to_4h", "feed_forward.down": "mlp.dense_4h_to_h"}
    for end in ("weight", "bias"):
        ours[f"norm.{end}"] = weights[f"gpt_neox.final_layer_norm.{end}"]
        for number in range(spec.num_layers):
            layer = f"gpt_neox.layers.{number}"
            for name, part in names.items():
                ours[f"blocks.{number}.{name}.{end}"] = weights[f"{layer}.{part}.{end}"]
            # GPT-NeoX stores query, key and value of each head together.
            fused = weights[f"{layer}.attention.query_key_value.{end}"]
            by_head = fused.unflatten(0, (spec.num_heads, 3, spec.head_width))
            ours[f"blocks.{number}.attention.input.{end}"] = by_head.transpose(0, 1).flatten(0, 2)
    return ours
