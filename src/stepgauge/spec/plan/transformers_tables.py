"""The tensor parallel tables of networks of the transformers library, from their configs.

Such networks take lengths from what their layers are given, so that the residual stream stays whole
on every rank. What has no rule here is whole too: embeddings that scale, experts, heads of other
tasks.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from stepgauge.spec.plan.tensor import Count, Rule, Section, Table

Config = Mapping[str, Any]
COLUMN, ROW, GATHER, HEADS = Rule("column"), Rule("row"), Rule("gather"), Rule("heads")


def table_of_config(config: Config, names: Collection[str]) -> Table:
    """The table of a network with this config (config.to_dict()) and modules of these names: the
    whole network with or without its head, or one for another task.

    Raises ValueError for a model_type without a table, and for names that are not of its networks.
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
        # not a layer around others, as peft's modules_to_save are
        table |= {name: Rule("head") for name in heads if f"{name}.original_module" not in names}
    return table


def _attention(config: Config, module: str, output: str, *more: str) -> dict[str, Rule]:
    """Query, key and value apart; `more` are modules that work on each head alone."""
    heads, keys = _heads(config)
    queries = Section(heads.rows * _width(config), unit=_width(config))
    shared = Section(keys.rows * _width(config), unit=_width(config), shared=True)
    return {
        module: Rule("gather", counts=(Count("num_key_value_groups", heads, keys),)),
        f"{module}.q_proj": Rule("column", (queries,)),
        f"{module}.[kv]_proj": Rule("column", (shared,)),
        f"{module}.{output}": ROW,
        **{f"{module}.{name}": HEADS for name in more},
    }


def _heads(config: Config) -> tuple[Section, Section]:
    """Of queries and of keys."""
    heads = config["num_attention_heads"]
    return Section(heads), Section(config.get("num_key_value_heads") or heads, shared=True)


def _width(config: Config) -> int:
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


def _normed_heads(config: Config) -> dict[str, Rule]:
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
    heads, _ = _heads(config)
    rules = _attention(config, "self_attn", "out_proj") | {"fc1": COLUMN, "fc2": ROW}
    return rules | {"self_attn": Rule("gather", counts=(Count("num_heads", heads),))}


def _gpt_neox(config: Config) -> dict[str, Rule]:
    """The rows of its fused layer are of one head after the other: query, key and value of each."""
    fused = Section(3 * config["hidden_size"], unit=3 * _width(config))
    return {
        "attention.query_key_value": Rule("column", (fused,)),
        "attention.dense": ROW,
        "mlp.dense_h_to_4h": COLUMN,
        "mlp.dense_4h_to_h": ROW,
    }


def _gpt2(config: Config) -> dict[str, Rule]:
    """Its layers are transposed, which parallelize_tensor finds out by itself."""
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
    heads = Rule("column", (Section(config["hidden_size"], unit=_width(config)),))
    return {
        "attention.self": GATHER,
        **dict.fromkeys([f"attention.self.{name}" for name in ("query", "key", "value")], heads),
        "attention.output.dense": ROW,
        "intermediate.dense": COLUMN,
        "output.dense": ROW,
    }


# By model_type: where the blocks are, the embedding that is cut ("" where it cannot be: one that
# scales, or whose head has a bias that stands twice), and the rules of a block.
FAMILIES: Mapping[str, tuple[str, str, Callable[[Config], dict[str, Rule]]]] = {
    "llama": ("layers", "embed_tokens", _llama),
    "mistral": ("layers", "embed_tokens", _llama),
    "mixtral": ("layers", "embed_tokens", _mixtral),
    "qwen2": ("layers", "embed_tokens", _llama),
    "qwen3": ("layers", "embed_tokens", _normed_heads),
    "granite": ("layers", "embed_tokens", _llama),
    "smollm3": ("layers", "embed_tokens", _llama),
    "gemma": ("layers", "", _llama),
    "gemma2": ("layers", "", _llama),
    "gemma3_text": ("layers", "", _normed_heads),
    "starcoder2": ("layers", "embed_tokens", _starcoder2),
    "phi": ("layers", "embed_tokens", _phi),
    "opt": ("decoder.layers", "decoder.embed_tokens", _opt),
    "gpt2": ("h", "wte", _gpt2),
    "gpt_neox": ("layers", "embed_in", _gpt_neox),
    "bert": ("encoder.layer", "", _bert),
    "roberta": ("encoder.layer", "", _bert),
    "electra": ("encoder.layer", "", _bert),
}
