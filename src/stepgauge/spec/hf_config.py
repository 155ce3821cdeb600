"""Converts a config.json of the transformers library to a spec with the same parameters.

Missing fields get the library's defaults. Dropout, initialisation and generation settings are
ignored, because they do not change the network. Any other unknown field is an error, so that the
spec never differs from the file without notice.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stepgauge.spec.bert import NUM_TYPES, BertSpec
from stepgauge.spec.fields import option
from stepgauge.spec.hf_values import REQUIRED, Config, check_values, rope_of, windows_of
from stepgauge.spec.model import ModelSpec


@dataclasses.dataclass(frozen=True)
class HfConfig:
    """The option that may be given instead of `size`."""

    hf_config: str = option("", "config.json of the transformers library, instead of a preset")


@dataclasses.dataclass(frozen=True)
class Family:
    """A model_type: the config fields that shape the network, and the function that reads them.

    defaults  field -> the library's default
    build     makes the spec from a complete config
    """

    defaults: Mapping[str, Any]
    build: Callable[[Config], ModelSpec | BertSpec]


def read_network(file: str | Path, **changes: Any) -> ModelSpec | BertSpec:
    """Reads the network of a config.json and applies changes to its spec.

    Raises ValueError for an invalid file, an unknown model_type or field, and an unsupported value.
    """
    config = _read(file)
    try:
        network = network_of(config)
    except ValueError as error:
        raise ValueError(f"hf_config is {str(file)!r}: {error}") from None
    known = {field.name for field in dataclasses.fields(network)}
    if unknown := [name for name in changes if name not in known]:
        raise ValueError(f"{unknown[0]} has no effect on a network of {config['model_type']}")
    return dataclasses.replace(network, **changes)


def _read(file: str | Path) -> Config:
    try:
        config = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"hf_config is {str(file)!r}: {error.strerror}") from None
    except ValueError:
        raise ValueError(f"hf_config is {str(file)!r}, which is not JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"hf_config is {str(file)!r}, which is not a JSON object")
    return config


def network_of(given: Config) -> ModelSpec | BertSpec:
    """Returns the network of a parsed config.json. Raises ValueError as `read_network`."""
    kind = str(given.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(f"model_type is {kind!r}; choose one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    extra = given.keys() - family.defaults.keys() - IGNORED
    unknown = sorted(name for name in extra if name not in SWITCHES or given[name])
    if unknown:
        raise ValueError(f"{unknown[0]} is not supported in a config of {kind}")
    config = {**family.defaults, **given}
    missing = [name for name, value in config.items() if value is REQUIRED]
    if missing:
        raise ValueError(f"{missing[0]!r} is missing from the config of {kind}")
    check_values(config, family.defaults)
    return family.build(config)


def name_of(file: str | Path) -> str:
    """Returns the name of the network in rows: the file's stem or, for a config.json, its folder, after
    the model_type if the folder does not contain it: "Llama-3-8B", "llama-checkpoint".

    In the cache of the hub the folder is that of the repository, models--OWNER--NAME. The config's
    _name_or_path is not used, because it is often that of the network from which one was derived.
    """
    # Only the folder is resolved: in the cache the file is a link to a blob.
    path = Path(file).parent.resolve() / Path(file).name
    if path.stem != "config":
        return path.stem
    of_hub = (part.rpartition("--")[2] for part in path.parts if part.startswith("models--"))
    folder = next(of_hub, path.parent.name)
    kind = str(_read(file)["model_type"]).replace("_", "-")
    has_kind = kind in folder.lower().replace("_", "-")
    return folder if has_kind else f"{kind}-{folder}".rstrip("-")


def _decoder(config: Config, **fields: Any) -> ModelSpec:
    """Builds the spec of Llama or one of the families derived from it."""
    return ModelSpec(
        **_shape(config),
        **rope_of(config),
        **windows_of(config),
        num_kv_heads=_kv_heads(config),
        head_dim=_head_dim(config),
        feed_forward=_choice(config, "hidden_act", GATED),
        norm_epsilon=config["rms_norm_eps"],
        tied_head=config["tie_word_embeddings"],
        **fields,
    )


def _llama(config: Config) -> ModelSpec:
    return _decoder(
        config,
        attention_bias="all" if config["attention_bias"] else "none",
        feed_forward_bias=config["mlp_bias"],
    )


def _mixtral(config: Config) -> ModelSpec:
    return _decoder(
        config,
        num_experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
    )


def _qwen2(config: Config) -> ModelSpec:
    return _decoder(config, attention_bias="qkv")


def _qwen3(config: Config) -> ModelSpec:
    bias = "all" if config["attention_bias"] else "none"
    return _decoder(config, attention_bias=bias, qk_norm=True)


def _gemma(config: Config) -> ModelSpec:
    """Gemma's norms multiply by 1 + weight. That changes only the initial value of the weight."""
    _require(config, "use_bidirectional_attention", None, False)
    # The library reads "gelu" as the tanh approximation, with which these networks were trained.
    act = config["hidden_activation"] or config["hidden_act"]
    config = {**config, "hidden_act": "gelu_pytorch_tanh" if act == "gelu" else act}
    bias = "all" if config["attention_bias"] else "none"
    return _decoder(config, attention_bias=bias, scaled_embedding=True)


def _gpt2(config: Config) -> ModelSpec:
    _require(config, "scale_attn_weights", True)
    _require(config, "scale_attn_by_inverse_layer_idx", False)
    _require(config, "add_cross_attention", False)
    return ModelSpec(
        vocab_size=config["vocab_size"],
        d_model=config["n_embd"],
        d_ff=config["n_inner"] or 4 * config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        context_length=min(ModelSpec.context_length, config["n_positions"]),
        positions="learned",
        num_positions=config["n_positions"],
        feed_forward=_choice(config, "activation_function", PLAIN),
        norm_epsilon=config["layer_norm_epsilon"],
        tied_head=config["tie_word_embeddings"],
        **LAYERNORM_AND_BIASES,
    )


def _gpt_neox(config: Config) -> ModelSpec:
    # Names of older versions of the library.
    names = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    older = {name: config[old] for old, name in names.items() if config[old] is not None}
    config = {**config, **older}
    return ModelSpec(
        **_shape(config),
        **rope_of(config),
        feed_forward=_choice(config, "hidden_act", PLAIN),
        norm_epsilon=config["layer_norm_eps"],
        tied_head=config["tie_word_embeddings"],
        block="parallel" if config["use_parallel_residual"] else "pre-norm",
        **{
            **LAYERNORM_AND_BIASES,
            "attention_bias": "all" if config["attention_bias"] else "none",
        },
    )


def _bert(config: Config) -> BertSpec:
    _require(config, "hidden_act", "gelu")
    _require(config, "type_vocab_size", NUM_TYPES)
    _require(config, "position_embedding_type", "absolute")
    _require(config, "layer_norm_eps", 1e-12)
    for name in ("is_decoder", "add_cross_attention"):
        _require(config, name, False)
    _require(config, "tie_word_embeddings", True)
    positions = config["max_position_embeddings"]
    shape = {"num_positions": positions, "context_length": min(positions, BertSpec.context_length)}
    return BertSpec(**_shape(config), **shape)


def _shape(config: Config) -> dict[str, Any]:
    return {
        "vocab_size": config["vocab_size"],
        "d_model": config["hidden_size"],
        "d_ff": config["intermediate_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
    }


def _kv_heads(config: Config) -> int:
    """Returns the number of key heads; 0 if it equals the number of query heads."""
    heads = config["num_key_value_heads"]
    return 0 if heads in (None, config["num_attention_heads"]) else heads


def _head_dim(config: Config) -> int:
    """Returns the width of a head; 0 if it is hidden_size / num_attention_heads."""
    width = config["head_dim"]
    is_default = width is None or width * config["num_attention_heads"] == config["hidden_size"]
    return 0 if is_default else width


def _choice(config: Config, name: str, known: Mapping[str, str]) -> str:
    if config[name] not in known:
        raise ValueError(f"{name} is {config[name]!r}; choose one of {', '.join(known)}")
    return known[config[name]]


def _require(config: Config, name: str, *accepted: Any) -> None:
    if config[name] not in accepted:
        raise ValueError(f"{name} is {config[name]!r}; only {accepted[0]!r} is supported")


PLAIN = {
    "gelu": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "silu": "silu",
}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu-tanh", "relu": "reglu"}
LAYERNORM_AND_BIASES: Mapping[str, Any] = {
    "norm": "layernorm",
    "attention_bias": "all",
    "feed_forward_bias": True,
}

_SIZES = ("vocab_size", "hidden_size", "intermediate_size")
_SHAPE = dict.fromkeys((*_SIZES, "num_hidden_layers", "num_attention_heads"), REQUIRED)
_ROPE = {
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "partial_rotary_factor": 1.0,
}
_DECODER = {
    **_SHAPE,
    **_ROPE,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "use_sliding_window": True,
    "max_window_layers": 0,
    "layer_types": None,
}
_QWEN = {**_DECODER, "use_sliding_window": False, "max_window_layers": 28}

# The defaults of the configuration classes in transformers 5.23.
FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        {
            **dict.fromkeys(("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"), REQUIRED),
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        _gpt2,
    ),
    "gpt_neox": Family(
        {
            **_SHAPE,
            **_ROPE,
            "partial_rotary_factor": 0.25,
            "rotary_pct": None,
            "rotary_emb_base": None,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
            "attention_bias": True,
        },
        _gpt_neox,
    ),
    "llama": Family({**_DECODER, "attention_bias": False, "mlp_bias": False}, _llama),
    "mistral": Family({**_DECODER, "num_key_value_heads": 8, "sliding_window": 4096}, _decoder),
    "mixtral": Family(
        {
            **_DECODER,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        _mixtral,
    ),
    "qwen2": Family({**_QWEN, "num_key_value_heads": 32}, _qwen2),
    "qwen3": Family(
        {**_QWEN, "num_key_value_heads": 32, "head_dim": 128, "attention_bias": False}, _qwen3
    ),
    "gemma": Family(
        {
            **_DECODER,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": None,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "use_bidirectional_attention": None,
        },
        _gemma,
    ),
    "bert": Family(
        {
            **_SHAPE,
            "hidden_act": "gelu",
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "position_embedding_type": "absolute",
            "is_decoder": False,
            "add_cross_attention": False,
            "tie_word_embeddings": True,
        },
        _bert,
    ),
}

# Fields that do not change the network. (Rotary networks have no parameters that depend on
# max_position_embeddings.)
_IGNORED = """model_type architectures _name_or_path transformers_version torch_dtype dtype auto_map
bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
use_cache max_position_embeddings n_ctx initializer_range pretraining_tp
gradient_checkpointing reorder_and_upcast_attn output_attentions output_hidden_states
return_dict is_encoder_decoder chunk_size_feed_forward id2label label2id problem_type
task_specific_params finetuning_task directionality
pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_type
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob
classifier_dropout is_decoder resid_pdrop embd_pdrop attn_pdrop
output_router_logits router_aux_loss_coef router_jitter_noise"""
IGNORED = frozenset(_IGNORED.split())
SWITCHES = {"use_mrope"}  # features that are not supported, but change nothing when they are off
