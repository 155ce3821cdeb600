"""The types of layers that rules cut, and how each stores its weight: a type is a row here."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn


@dataclasses.dataclass(frozen=True)
class LayerType:
    """A class by its full name, since its library need not be installed.

    is_transposed  its weight is (inputs, outputs), where that of nn.Linear is (outputs, inputs)
    """

    path: str
    name: str
    is_transposed: bool = False


LINEAR = (
    LayerType("torch.nn.modules.linear.Linear", "nn.Linear"),
    LayerType("transformers.pytorch_utils.Conv1D", "transformers' Conv1D", is_transposed=True),
)
EMBEDDING = (LayerType("torch.nn.modules.sparse.Embedding", "nn.Embedding"),)
# It has the layer that it adapts, and its small ones, as modules of its own.
ADAPTED = LayerType("peft.tuners.lora.layer.Linear", "peft's LoRA")

# By the kinds of spec.plan.tensor that cut.
CUT_TYPES: Mapping[str, tuple[LayerType, ...]] = MappingProxyType(
    {"column": LINEAR, "row": LINEAR, "head": LINEAR[:1], "embedding": EMBEDDING}
)


def base_of(layer: nn.Module, types: tuple[LayerType, ...]) -> type[nn.Module] | None:
    """The first class that the layer is of, or is derived from, that is of these types."""
    paths = {each.path for each in types}
    classes = type(layer).__mro__
    return next((cls for cls in classes if f"{cls.__module__}.{cls.__qualname__}" in paths), None)


def is_transposed(layer: nn.Module) -> bool:
    """Whether its weight is (inputs, outputs)."""
    return base_of(layer, tuple(each for each in LINEAR if each.is_transposed)) is not None
