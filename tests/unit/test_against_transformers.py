"""Each family's network against the transformers library's with the same weights, where that is
installed.
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
def test_logits_are_those_of_transformers(name):
    kind = name.split()[0]
    given = {"model_type": kind, **FAMILIES[name]}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**given, pad_token_id=None)
    theirs = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    # Biases are zero and gains one at first: a wrong place would not show.
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = TransformerLM(network_of(given))
    ours.load_state_dict(renamed(theirs, ours.spec, kind))
    tokens = torch.randint(61, (2, 12))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-3, atol=1e-3)


def renamed(theirs, spec, kind):
    """The weights of their network by our names."""
    given = theirs.state_dict()
    if kind == "gpt2":
        return of_gpt2(given, spec)
    if kind == "gpt_neox":
        return of_gpt_neox(given, spec)
    ours = {
        "embedding.weight": given["model.embed_tokens.weight"],
        "norm.weight": gain(given["model.norm.weight"], kind),
        "head.weight": given["lm_head.weight"],
    }
    for layer in range(spec.num_layers):
        one, other = f"model.layers.{layer}", f"blocks.{layer}"
        ours |= {
            f"{other}.attention_norm.weight": gain(given[f"{one}.input_layernorm.weight"], kind),
            f"{other}.feed_forward_norm.weight": gain(
                given[f"{one}.post_attention_layernorm.weight"], kind
            ),
        }
        if kind == "qwen3":
            for place, part in enumerate("qk"):
                norm = given[f"{one}.self_attn.{part}_norm.weight"]
                ours[f"{other}.attention.qk_norms.{place}.weight"] = norm
        if kind == "mixtral":
            experts = f"{one}.mlp.experts"
            ours |= {
                f"{other}.feed_forward.router.weight": given[f"{one}.mlp.gate.weight"],
                f"{other}.feed_forward.up_weight": given[f"{experts}.gate_up_proj"],
                f"{other}.feed_forward.down_weight": given[f"{experts}.down_proj"],
            }
        for end in ("weight", "bias"):
            fused = {"attention.input": [f"self_attn.{p}_proj" for p in "qkv"]}
            fused |= {
                "attention.output": ["self_attn.o_proj"],
                "feed_forward.down": ["mlp.down_proj"],
            }
            fused |= {"feed_forward.gate_up": ["mlp.gate_proj", "mlp.up_proj"]}
            for name, parts in fused.items():
                found = [given[f"{one}.{p}.{end}"] for p in parts if f"{one}.{p}.{end}" in given]
                if found:
                    ours[f"{other}.{name}.{end}"] = torch.cat(found)
    return ours


def gain(weight, kind):
    return weight + 1 if kind == "gemma" else weight


def of_gpt2(given, spec):
    ours = {
        "embedding.weight": given["transformer.wte.weight"],
        "head.weight": given["transformer.wte.weight"],
        "positions.weight": given["transformer.wpe.weight"],
    }
    names = {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"}
    names |= {"attention.input": "attn.c_attn", "attention.output": "attn.c_proj"}
    names |= {"feed_forward.up": "mlp.c_fc", "feed_forward.down": "mlp.c_proj"}
    for end in ("weight", "bias"):
        ours[f"norm.{end}"] = given[f"transformer.ln_f.{end}"]
        for layer in range(spec.num_layers):
            for name, theirs in names.items():
                value = given[f"transformer.h.{layer}.{theirs}.{end}"]
                ours[f"blocks.{layer}.{name}.{end}"] = value.T if value.ndim == 2 else value
    return ours


def of_gpt_neox(given, spec):
    ours = {
        "embedding.weight": given["gpt_neox.embed_in.weight"],
        "head.weight": given["lm_head.weight"],
    }
    names = {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"}
    names |= {"attention.output": "attention.dense"}
    names |= {"feed_forward.up": "mlp.dense_h_to_4h", "feed_forward.down": "mlp.dense_4h_to_h"}
    for end in ("weight", "bias"):
        ours[f"norm.{end}"] = given[f"gpt_neox.final_layer_norm.{end}"]
        for layer in range(spec.num_layers):
            theirs = f"gpt_neox.layers.{layer}"
            for name, part in names.items():
                ours[f"blocks.{layer}.{name}.{end}"] = given[f"{theirs}.{part}.{end}"]
            # Theirs has query, key and value of each head together.
            fused = given[f"{theirs}.attention.query_key_value.{end}"]
            by_head = fused.unflatten(0, (spec.num_heads, 3, spec.head_width))
            ours[f"blocks.{layer}.attention.input.{end}"] = by_head.transpose(0, 1).flatten(0, 2)
    return ours
