"""The classes of layers that rules can cut, and how they store their weights. To support another
class, add it here.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn


@dataclasses.dataclass(frozen=True)
class LayerType:
    """A class, given by its full name because its library need not be installed.

    path           module and qualified name
    name           name in error messages
    is_transposed  the weight is (inputs, outputs); that of nn.Linear is (outputs, inputs)
    """

    path: str
    name: str
    is_transposed: bool = False


LINEAR = (
    LayerType("torch.nn.modules.linear.Linear", "nn.Linear"),
    LayerType("transformers.pytorch_utils.Conv1D", "transformers' Conv1D", is_transposed=True),
)
EMBEDDING = (LayerType("torch.nn.modules.sparse.Embedding", "nn.Embedding"),)
# Contains the adapted layer and the two low-rank layers as submodules.
ADAPTED = LayerType("peft.tuners.lora.layer.Linear", "peft's LoRA")

# kind of rule (spec/plan/tensor.py) -> the classes that it can cut
CUT_TYPES: Mapping[str, tuple[LayerType, ...]] = MappingProxyType(
    {"column": LINEAR, "row": LINEAR, "head": LINEAR[:1], "embedding": EMBEDDING}
)


def base_of(layer: nn.Module, types: tuple[LayerType, ...]) -> type[nn.Module] | None:
    """Returns the class among these types that the layer is an instance of; None if there is none."""
    paths = {each.path for each in types}
    classes = type(layer).__mro__
    return next((cls for cls in classes if f"{cls.__module__}.{cls.__qualname__}" in paths), None)


def is_transposed(layer: nn.Module) -> bool:
    """True if the layer's weight is (inputs, outputs)."""
    return base_of(layer, tuple(each for each in LINEAR if each.is_transposed)) is not None
