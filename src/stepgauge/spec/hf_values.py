"""Values in a config.json of the transformers library: their types, and the settings with a structure
of their own, rotary angles and windows.
"""

import math
from collections.abc import Mapping
from typing import Any

from stepgauge.spec.fields import check_type
from stepgauge.spec.rope import SCALINGS, RopeScaling

Config = dict[str, Any]
REQUIRED = object()  # marks a field without a default: a whole number
# Fields that may be null, and the type of other values.
NULLABLE: Mapping[str, type] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "n_inner": int,
    "sliding_window": int,
    "rotary_pct": float,
    "rotary_emb_base": float,
    "hidden_activation": str,
    "use_bidirectional_attention": bool,
    "rope_scaling": dict,
    "rope_parameters": dict,
    "layer_types": list,
}
WINDOWED, FULL = "sliding_attention", "full_attention"


def check_values(config: Config, defaults: Mapping[str, Any]) -> None:
    """Raises ValueError for a value of another type than the library's default, and for a number that
    no network can have. Fields without a default are ignored.
    """
    for name, default in defaults.items():
        value = config[name]
        if value is None and name in NULLABLE:
            continue
        required = int if default is REQUIRED else NULLABLE.get(name, type(default))
        _check_value(name, required, value, least=0 if name == "max_window_layers" else 1)


def _check_value(name: str, required: type, value: Any, *, least: int = 1) -> None:
    check_type(name, required, value)
    if required is int and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")
    if required is float and not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be above 0")


def rope_of(config: Config) -> dict[str, Any]:
    """Returns base, rotated fraction and scaling; accepts the names of all library versions."""
    parameters: Config = config["rope_parameters"] or config["rope_scaling"] or {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            raise ValueError(
                f"rope_parameters has {value} as {name}; settings of each kind of layer are not "
                "supported"
            )
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    check_type("rope_type", str, kind)
    kind = "none" if kind == "default" else kind
    if kind not in SCALINGS:
        raise ValueError(f"rope_type is {kind!r}; choose one of default, {', '.join(SCALINGS)}")
    if config["rope_scaling"] and not {"rope_type", "type"} & parameters.keys():
        raise ValueError("rope_scaling has no rope_type; give one")
    names = {"original_context": "original_max_position_embeddings"}
    required = [names.get(name, name) for name in SCALINGS[kind]]
    if missing := [name for name in required if name not in parameters]:
        raise ValueError(f"{missing[0]} is missing from the rope scaling {kind}")
    outer = {name: config[name] for name in ("rope_theta", "partial_rotary_factor")}
    angles = {**outer, **parameters}
    for name in (*outer, *required):
        _check_value(name, float, angles[name])
    return {
        "rope_base": float(angles["rope_theta"]),
        "rope_fraction": float(angles["partial_rotary_factor"]),
        "rope_scaling": str(RopeScaling(kind, tuple(parameters[name] for name in required))),
    }


def windows_of(config: Config) -> dict[str, Any]:
    """Returns the attention window and which blocks have none.

    Raises ValueError for other kinds of layers, and unless full attention is in every n-th block.
    """
    window, layers = config["sliding_window"], config["num_hidden_layers"]
    kinds = config["layer_types"]
    if kinds is not None:
        _check_layer_types(config)
    if not window or not config["use_sliding_window"]:
        return {}
    if kinds is None:
        first = config["max_window_layers"]
        kinds = [WINDOWED if layer >= first else FULL for layer in range(layers)]
    full = [layer for layer, kind in enumerate(kinds) if kind != WINDOWED]
    if len(full) == layers:
        return {}
    every = full[0] + 1 if full else 0
    if full and full != list(range(every - 1, layers, every)):
        raise ValueError(
            f"layer_types has full attention in blocks {full}; only every n-th block is supported"
        )
    return {"window": window, "full_attention_every": every}


def _check_layer_types(config: Config) -> None:
    """Raises ValueError unless there is a known kind for each layer, and a window if a kind needs it."""
    kinds, layers = config["layer_types"], config["num_hidden_layers"]
    for kind in kinds:
        if kind not in (FULL, WINDOWED):
            raise ValueError(f"layer_types has {kind!r}; choose from {FULL}, {WINDOWED}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} layers; num_hidden_layers is {layers}")
    for name in ("sliding_window", "use_sliding_window"):
        if WINDOWED in kinds and not config[name]:
            raise ValueError(f"layer_types has {WINDOWED!r}, but {name} is {config[name]}")
