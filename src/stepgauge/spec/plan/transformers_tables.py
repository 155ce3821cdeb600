"""Tensor parallel tables of networks from the transformers library, built from their configs.

These networks read the sequence length from the inputs of their layers, so the residual stream
stays whole on every rank. Modules without a rule stay whole too: embeddings that scale their
output, experts, heads for other tasks.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from stepgauge.spec.plan.tensor import Count, Rule, Section, Table

Config = Mapping[str, Any]
COLUMN, ROW, GATHER, HEADS = Rule("column"), Rule("row"), Rule("gather"), Rule("heads")


def table_of_config(config: Config, names: Collection[str]) -> Table:
    """Returns the table of a network. It may be the base network, the one with its language head,
    or one with a head for another task.

    config  config.to_dict()
    names   the names of the network's modules

    Raises ValueError for a model_type without a table, and if the names do not fit the model_type.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"model_type is {kind!r}, whose networks have no table; give a table, or choose one of "
            f"{', '.join(FAMILIES)}"
        )
    blocks, embedding, rules_of = FAMILIES[kind]
    first = next((name for name in names if f".{name}".endswith(f".{blocks}.0")), None)
    if first is None:
        raise ValueError(f"the module has no {blocks}.0, which networks of {kind} have")
    base = first.removesuffix(f"{blocks}.0")
    table = {f"{base}{blocks}.*.{name}": rule for name, rule in rules_of(config).items()}
    if embedding:
        table[f"{base}{embedding}"] = Rule("embedding")
        heads = [name for name in names if f".{name}".endswith(".lm_head")]
        # peft's modules_to_save wraps a head into a module with two copies, which cannot be cut
        table |= {name: Rule("head") for name in heads if f"{name}.original_module" not in names}
    return table


def _attention(config: Config, module: str, output: str, *per_head: str) -> dict[str, Rule]:
    """Returns the rules of attention with separate layers for query, key and value. `per_head` are
    modules that work on each head separately.
    """
    width, heads = _head_width(config), config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads") or heads
    queries = Section(heads * width, unit=width)
    keys = Section(key_heads * width, unit=width, shared=True)
    groups = Count("num_key_value_groups", Section(heads), Section(key_heads, shared=True))
    return {
        module: Rule("gather", counts=(groups,)),
        f"{module}.q_proj": Rule("column", (queries,)),
        f"{module}.[kv]_proj": Rule("column", (keys,)),
        f"{module}.{output}": ROW,
        **{f"{module}.{name}": HEADS for name in per_head},
    }


def _head_width(config: Config) -> int:
    width: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return width


GATED = {
    "mlp": GATHER,
    "mlp.gate_proj": COLUMN,
    "mlp.up_proj": COLUMN,
    "mlp.down_proj": ROW,
}


def _llama(config: Config) -> dict[str, Rule]:
    return _attention(config, "self_attn", "o_proj") | GATED


def _llama_with_qk_norms(config: Config) -> dict[str, Rule]:
    return _attention(config, "self_attn", "o_proj", "q_norm", "k_norm") | GATED


def _mixtral(config: Config) -> dict[str, Rule]:
    return _attention(config, "self_attn", "o_proj")


def _starcoder2(config: Config) -> dict[str, Rule]:
    mlp = {"mlp.c_fc": COLUMN, "mlp.c_proj": ROW}
    return _attention(config, "self_attn", "o_proj") | mlp


def _phi(config: Config) -> dict[str, Rule]:
    norms = ("q_layernorm", "k_layernorm") if config.get("qk_layernorm") else ()
    mlp = {"mlp.fc1": COLUMN, "mlp.fc2": ROW}
    return _attention(config, "self_attn", "dense", *norms) | mlp


def _opt(config: Config) -> dict[str, Rule]:
    num_heads = Count("num_heads", Section(config["num_attention_heads"]))
    rules = _attention(config, "self_attn", "out_proj") | {"fc1": COLUMN, "fc2": ROW}
    return rules | {"self_attn": Rule("gather", counts=(num_heads,))}


def _gpt_neox(config: Config) -> dict[str, Rule]:
    """The fused layer has query, key and value rows of one head after the other."""
    fused = Section(3 * config["hidden_size"], unit=3 * _head_width(config))
    return {
        "attention.query_key_value": Rule("column", (fused,)),
        "attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    }


def _gpt2(config: Config) -> dict[str, Rule]:
    """GPT-2's weights are transposed; parallelize_tensor detects that."""
    width = config["n_embd"]
    heads = Section(width, unit=width // config["n_head"])
    return {
        "attn": Rule("gather", counts=(Count("split_size", heads),)),
        "attn.c_attn": Rule("column", (heads,) * 3),
        "attn.c_proj": ROW,
        "mlp.c_fc": COLUMN,
        "mlp.c_proj": ROW,
    }


def _bert(config: Config) -> dict[str, Rule]:
    heads = Rule("column", (Section(config["hidden_size"], unit=_head_width(config)),))
    return {
        "attention.self": GATHER,
        **dict.fromkeys([f"attention.self.{name}" for name in ("query", "key", "value")], heads),
        "attention.output.dense": ROW,
        "intermediate.dense": COLUMN,
        "output.dense": ROW,
    }


# model_type -> (name of the blocks, name of the embedding, rules of a block). The embedding is "" if
# it cannot be cut, because it scales its output or because its head's bias occurs twice.
FAMILIES: Mapping[str, tuple[str, str, Callable[[Config], dict[str, Rule]]]] = {
    "llama": ("layers", "embed_tokens", _llama),
    "mistral": ("layers", "embed_tokens", _llama),
    "mixtral": ("layers", "embed_tokens", _mixtral),
    "qwen2": ("layers", "embed_tokens", _llama),
    "qwen3": ("layers", "embed_tokens", _llama_with_qk_norms),
    "granite": ("layers", "embed_tokens", _llama),
    "smollm3": ("layers", "embed_tokens", _llama),
    "gemma": ("layers", "", _llama),
    "gemma2": ("layers", "", _llama),
    "gemma3_text": ("layers", "", _llama_with_qk_norms),
    "starcoder2": ("layers", "embed_tokens", _starcoder2),
    "phi": ("layers", "embed_tokens", _phi),
    "opt": ("decoder.layers", "decoder.embed_tokens", _opt),
    "gpt2": ("h", "wte", _gpt2),
    "gpt_neox": ("layers", "embed_in", _gpt_neox),
    "bert": ("encoder.layer", "", _bert),
    "roberta": ("encoder.layer", "", _bert),
    "electra": ("encoder.layer", "", _bert),
}
