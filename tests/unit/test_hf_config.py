"""Published networks: each config.json gives the published number of parameters.

The values are from the files on the hub, 2024 to 2025, without fields that do not affect parameters.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.models.bert import BertForMaskedLM
from stepgauge.models.transformer import TransformerLM
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.hf_config import name_of, network_of, read_network
from stepgauge.spec.options import expand
from stepgauge.spec.step import StepSpec


def shape(vocab_size, width, d_ff, layers, heads, **more):
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": d_ff,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PYTHIA = {
    "model_type": "gpt_neox",
    "rotary_pct": 0.25,
    "rotary_emb_base": 10000,
    "use_parallel_residual": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768}
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "rope_theta": 1e6, "num_key_value_heads": 8}
PUBLISHED = {
    "llama-3-8b": (
        {
            "model_type": "llama",
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-05,
            **shape(128256, 4096, 14336, 32, 32, num_key_value_heads=8),
        },
        8_030_261_248,
    ),
    "llama-3.2-1b": (
        {
            "model_type": "llama",
            "rope_theta": 500000.0,
            "rope_scaling": LLAMA3_SCALING,
            "tie_word_embeddings": True,
            **shape(128256, 2048, 8192, 16, 32, num_key_value_heads=8, head_dim=64),
        },
        1_235_814_400,
    ),
    "llama-2-7b": ({"model_type": "llama", **shape(32000, 4096, 11008, 32, 32)}, 6_738_415_616),
    "mistral-7b": (
        {
            "model_type": "mistral",
            "sliding_window": 4096,
            **shape(32000, 4096, 14336, 32, 32, num_key_value_heads=8),
        },
        7_241_732_096,
    ),
    "mixtral-8x7b": (
        {
            "model_type": "mixtral",
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            **shape(32000, 4096, 14336, 32, 32, num_key_value_heads=8),
        },
        46_702_792_704,
    ),
    "gpt2": ({**GPT2, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "gpt2-xl": ({**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
    "pythia-160m": ({**PYTHIA, **shape(50304, 768, 3072, 12, 12)}, 162_322_944),
    "pythia-1b": ({**PYTHIA, **shape(50304, 2048, 8192, 16, 8)}, 1_011_781_632),
    "qwen2-0.5b": (
        {
            **QWEN2,
            "tie_word_embeddings": True,
            **shape(151936, 896, 4864, 24, 14, num_key_value_heads=2),
        },
        494_032_768,
    ),
    "qwen2.5-7b": (
        {**QWEN2, **shape(152064, 3584, 18944, 28, 28, num_key_value_heads=4)},
        7_615_616_512,
    ),
    "qwen3-0.6b": (
        {**QWEN3, "tie_word_embeddings": True, **shape(151936, 1024, 3072, 28, 16)},
        596_049_920,
    ),
    "qwen3-8b": ({**QWEN3, **shape(151936, 4096, 12288, 36, 32)}, 8_190_735_360),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_act": "gelu",
            "hidden_activation": None,
            "head_dim": 256,
            **shape(256000, 2048, 16384, 18, 8, num_key_value_heads=1),
        },
        2_506_172_416,
    ),
    "bert-base": (
        {
            "model_type": "bert",
            "max_position_embeddings": 512,
            "type_vocab_size": 2,
            **shape(30522, 768, 3072, 12, 12),
        },
        109_514_298,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    config, parameters = PUBLISHED[name]
    spec = network_of(config)
    assert spec.num_parameters == parameters
    network = BertForMaskedLM if isinstance(spec, BertSpec) else TransformerLM
    module = network(spec, device=torch.device("meta"))
    assert sum(p.numel() for p in module.parameters()) == parameters


@pytest.mark.parametrize("name", ["llama-3-8b", "mixtral-8x7b", "pythia-160m", "qwen3-0.6b"])
def test_flops_equal_those_of_the_flop_counter(name):
    spec = network_of(PUBLISHED[name][0])
    spec = dataclasses.replace(spec, attention="eager", context_length=64)
    meta = torch.device("meta")
    module, tokens = TransformerLM(spec, device=meta), torch.zeros(2, 64, dtype=int, device=meta)
    with FlopCounterMode(display=False) as counter:
        module(tokens)
    unmasked = dataclasses.replace(spec, mask="full", window=0, full_attention_every=0)
    expected = unmasked.forward_flops(batch=2, sequence=64)
    assert counter.get_total_flops() == expected


def test_rotary_settings_are_read_in_the_format_of_all_library_versions():
    older = {**PUBLISHED["llama-3.2-1b"][0]}
    newer = {**older, "rope_parameters": {**older.pop("rope_scaling"), "rope_theta": 500000.0}}
    del newer["rope_scaling"], newer["rope_theta"]
    assert network_of(newer) == network_of(PUBLISHED["llama-3.2-1b"][0])
    assert network_of(newer).rope_scaling == "llama3:32:1:4:8192"
    assert network_of(PUBLISHED["pythia-160m"][0]).rotary_width == 16


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (None, [0, 8, 8, 8]),
        (["sliding_attention", "full_attention"] * 2, [8, 0, 8, 0]),
        (["full_attention"] * 4, [0, 0, 0, 0]),
    ],
)
def test_windows_of_layers(types, expected):
    config = {
        **QWEN2,
        **shape(100, 64, 128, 4, 4, num_key_value_heads=4),
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": types,
        "max_window_layers": 1,
    }
    if types is None:
        with pytest.raises(ValueError, match=r"full attention in blocks \[0\]; only every n-th"):
            network_of(config)
        config["max_window_layers"], expected = 0, [8, 8, 8, 8]
    spec = network_of(config)
    assert [spec.window_of(layer) for layer in range(4)] == expected


LLAMA = {"model_type": "llama", **shape(100, 64, 128, 2, 4)}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; choose one of gpt2, "),
        ({}, "model_type is 'None'; choose one of"),
        (LLAMA | {"num_experts": 4}, "num_experts is not supported in a config of"),
        ({"model_type": "llama"}, "'vocab_size' is missing from the config of llama"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size is '64'; it must be a whole number"),
        (LLAMA | {"hidden_act": "mish"}, "hidden_act is 'mish'; choose one of silu"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "new"}},
            "rope_type is 'new'; choose one of default",
        ),
        (LLAMA | {"num_key_value_heads": 3}, "num_kv_heads is 3, which does not divide"),
        (
            PUBLISHED["bert-base"][0] | {"type_vocab_size": 3},
            "type_vocab_size is 3; only 2 is supported",
        ),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "rope_parameters has {'rope_theta': 500000.0} as full_attention; settings of each kind",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": "8"}},
            "factor is '8'; it must be a number",
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": ["linear"]}},
            "rope_type is ['linear']; it must be a text",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
            "rope_theta is None; it must be a number",
        ),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        (LLAMA | {"rope_theta": None}, "rope_theta is None; it must be a number"),
        (LLAMA | {"rope_theta": -1.0}, "rope_theta is -1.0; it must be above 0"),
        (
            LLAMA | {"sliding_window": 4, "layer_types": ["sliding_attention"]},
            "layer_types has 1 layers; num_hidden_layers is 2",
        ),
        *(
            (
                LLAMA | {"sliding_window": 4, "layer_types": ["sliding_attention", kind]},
                f"layer_types has {kind!r}; choose from full_attention, sliding_attention",
            )
            for kind in ("linear_attention", "chunked_attention", 3, None)
        ),
        (
            LLAMA | {"layer_types": ["sliding_attention"] * 2},
            "layer_types has 'sliding_attention', but sliding_window is None",
        ),
        (
            LLAMA
            | {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 4,
                "use_sliding_window": False,
            },
            "layer_types has 'sliding_attention', but use_sliding_window is False",
        ),
        (
            LLAMA | {"layer_types": "full_attention"},
            "layer_types is 'full_attention'; it must be a",
        ),
        (LLAMA | {"sliding_window": "4"}, "sliding_window is '4'; it must be a whole number"),
        (LLAMA | {"num_key_value_heads": 1.5}, "num_key_value_heads is 1.5; it must be a whole"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads is 0; it must be at least 1"),
        (LLAMA | {"head_dim": True}, "head_dim is True; it must be a whole number"),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole"),
        (
            LLAMA | {"tie_word_embeddings": "false"},
            "tie_word_embeddings is 'false'; it must be True or False",
        ),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps is None; it must be a number"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; it must be a number"),
        (LLAMA | {"hidden_act": ["silu"]}, "hidden_act is ['silu']; it must be a text"),
        (
            PUBLISHED["bert-base"][0] | {"max_position_embeddings": None},
            "max_position_embeddings is None; it must be a whole number",
        ),
    ],
)
def test_unsupported_values_are_refused(config, words):
    with pytest.raises(ValueError) as error:
        network_of(config)
    assert words in str(error.value)


def test_a_feature_that_is_turned_off_needs_no_support():
    assert network_of(LLAMA | {"use_mrope": False}) == network_of(LLAMA)
    with pytest.raises(ValueError, match="use_mrope is not supported"):
        network_of(LLAMA | {"use_mrope": True})
    with pytest.raises(ValueError, match="is_causal is not supported"):  # another network
        network_of(LLAMA | {"is_causal": False})


def test_null_means_the_librarys_default_where_the_library_has_one():
    nulls = ("num_key_value_heads", "head_dim", "sliding_window", "layer_types", "rope_scaling")
    assert network_of(LLAMA | dict.fromkeys(nulls)) == network_of(LLAMA)
    mistral = {**PUBLISHED["mistral-7b"][0], "sliding_window": None}
    assert network_of(mistral).window == 0


def test_long_contexts_of_a_scaling_are_kept_exactly():
    context = {"original_max_position_embeddings": 1048577}
    spec = network_of(LLAMA | {"rope_scaling": {**LLAMA3_SCALING, **context}})
    assert spec.rope_scaling == "llama3:32:1:4:1048577"


def test_an_unsupported_file_is_refused_by_name(tmp_path):
    file = tmp_path / "new.json"
    file.write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match=r"^hf_config is '.*new.json': model_type is 't5'; choose"):
        read_network(file)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("llama-8b.json", "llama-8b"),
        ("Llama-3-8B/config.json", "Llama-3-8B"),
        ("checkpoint/config.json", "llama-checkpoint"),
        ("a/../checkpoint/config.json", "llama-checkpoint"),
        ("config.json", "llama-work"),  # in the working folder
        ("models--meta-llama--Llama-3.2-1B/snapshots/4e20de/config.json", "Llama-3.2-1B"),
    ],
)
def test_the_name_says_which_network_it_is(path, name, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    blob = tmp_path / "5e2d"  # the cache of the hub has links to such files
    blob.write_text(json.dumps({**LLAMA, "_name_or_path": "other/one"}))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).symlink_to(blob)
    assert name_of(path) == name


def test_a_file_replaces_a_preset_size(tmp_path):
    file = tmp_path / "little" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(LLAMA))
    assert read_network(file).d_model == 64
    values = {"size": ("small",), "hf_config": (str(file),), "context_length": (16, 32)}
    specs = list(expand(StepSpec, values))
    assert [(spec.size, spec.model.context_length) for spec in specs] == [
        ("llama-little", 16),
        ("llama-little", 32),
    ]
    with pytest.raises(ValueError, match="No such file"):
        read_network(tmp_path / "other.json")
    file.write_text("no")
    with pytest.raises(ValueError, match="which is not JSON"):
        read_network(file)
