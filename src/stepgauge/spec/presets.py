"""The presets of all networks, by name."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stepgauge.spec.bert import BERT_SIZES, BertSpec
from stepgauge.spec.model import SIZES, ModelSpec

_NETWORKS: Mapping[str, type[ModelSpec] | type[BertSpec]] = MappingProxyType(
    {**dict.fromkeys(SIZES, ModelSpec), **dict.fromkeys(BERT_SIZES, BertSpec)}
)


def preset_names(*networks: type) -> tuple[str, ...]:
    """Returns the names of the presets of these networks."""
    return tuple(name for name, network in _NETWORKS.items() if network in networks)


def preset(size: str, **changes: Any) -> ModelSpec | BertSpec:
    """Returns a preset with some fields changed. Raises ValueError for an unknown name, or a field
    that the network does not have.
    """
    network = _NETWORKS.get(size.lower())
    if network is None:
        raise ValueError(f"size is {size!r}; choose one of {', '.join(_NETWORKS)}")
    known = {field.name for field in dataclasses.fields(network)}
    for name in changes.keys() - known:
        raise ValueError(f"{name} is {changes[name]!r}; {size} has no such option")
    return network.preset(size, **changes)
