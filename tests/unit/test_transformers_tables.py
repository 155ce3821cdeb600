"""Tables for networks of the transformers library, with the module names of version 5.23."""

import pytest

from stepgauge.spec.plan.tensor import Count, Section, matched
from stepgauge.spec.plan.transformers_tables import FAMILIES, table_of_config

SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"n_embd": 32, "n_head": 4}  # the same in GPT-2's config
ATTENTION = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
GATED = ["mlp", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
LLAMA = ["self_attn", *ATTENTION, *GATED]
BERT = [
    *("attention.self", "attention.self.query", "attention.self.key", "attention.self.value"),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
]
GPT2 = ["attn", "attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
NEOX = ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
# model_type -> (base network, its blocks, its embedding, modules of a block)
NAMES = {
    "llama": ("model", "layers", "embed_tokens", LLAMA),
    "gemma2": ("model", "layers", "embed_tokens", LLAMA),
    "qwen3": ("model", "layers", "embed_tokens", [*LLAMA, "self_attn.q_norm", "self_attn.k_norm"]),
    "opt": (
        *("model", "decoder.layers", "decoder.embed_tokens"),
        ["self_attn", *ATTENTION[:3], "self_attn.out_proj", "fc1", "fc2"],
    ),
    "gpt2": ("transformer", "h", "wte", GPT2),
    "gpt_neox": ("gpt_neox", "layers", "embed_in", NEOX),
    "bert": ("bert", "encoder.layer", "embeddings.word_embeddings", BERT),
}


def names_of(kind, base="", head=True):
    """Returns the names of the modules of a network with two blocks."""
    _, blocks, embedding, inside = NAMES[kind]
    names = [embedding, *(f"{blocks}.{i}.{name}" for i in range(2) for name in ["", *inside])]
    names = [f"{base}.{name}".strip(".") for name in names]
    return [*names, "lm_head"] if head else names


@pytest.mark.parametrize("kind", NAMES)
def test_a_network_and_its_base_have_the_same_rules(kind):
    base, _, _, inside = NAMES[kind]
    config = {**SHAPE, "model_type": kind}
    whole = names_of(kind, base)
    with_rule = {name for name, _ in matched(table_of_config(config, whole), whole)}
    assert {name for name in with_rule if ".0." in name} == {
        name for name in whole if any(name.endswith(f".0.{part}") for part in inside)
    }
    assert ("lm_head" in with_rule) == (FAMILIES[kind][1] != "")
    base_names = names_of(kind, head=False)
    base_with_rule = {name for name, _ in matched(table_of_config(config, base_names), base_names)}
    assert with_rule - {"lm_head"} == {f"{base}.{name}" for name in base_with_rule}


def test_heads_are_not_cut_and_their_counts_are_per_rank():
    names = names_of("llama", "model")
    table = table_of_config({**SHAPE, "model_type": "llama"}, names)
    attention = "model.layers.*.self_attn"
    assert table[f"{attention}.q_proj"].sections == (Section(32, unit=8),)
    assert table[f"{attention}.[kv]_proj"].sections == (Section(16, unit=8, shared=True),)
    (count,) = table[attention].counts
    assert [count.value(ranks) for ranks in (1, 2, 4)] == [2, 2, 1], "query heads per key head"
    assert Count("num_heads", Section(4)).value(2) == 2
    with pytest.raises(ValueError, match="4 rows cannot be cut into 8 equal parts"):
        count.value(8)


def test_a_nested_head_is_cut_unless_peft_keeps_two_copies_of_it():
    names = [f"base_model.model.{name}" for name in names_of("llama", "model")]
    table = table_of_config({**SHAPE, "model_type": "llama"}, names)
    assert table["base_model.model.lm_head"].kind == "head"
    kept = [*names, "base_model.model.lm_head.original_module"]
    assert set(table) - set(table_of_config({**SHAPE, "model_type": "llama"}, kept)) == {
        "base_model.model.lm_head"
    }


def test_a_network_without_a_table_is_refused():
    with pytest.raises(
        ValueError, match="model_type is 'bloom', whose networks have no table; give"
    ):
        table_of_config({"model_type": "bloom"}, [])
    with pytest.raises(ValueError, match=r"the module has no layers\.0, which networks of llama"):
        table_of_config({**SHAPE, "model_type": "llama"}, ["lm_head"])
