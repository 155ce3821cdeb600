"""Rules for layers with a LoRA of peft (Hu et al. 2021): y = W x + s B(A x), where A and B are
low-rank layers.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from stepgauge.parallel.tensor_parallel.layer_types import ADAPTED, base_of
from stepgauge.spec.plan.tensor import Rule

ADAPTABLE = ("column", "row")


def rules_of_adapted(
    name: str, layer: Any, rule: Rule, *, by_sequence: bool, is_gathered: bool
) -> Iterator[tuple[str, Rule]]:
    """Yields rules for W, A and B, which replace the rule of the adapted layer.

    Column: each rank has all of x and some outputs. A is whole, and its gradients are summed over
    ranks; B is cut like W. Row: each rank has some of x and all outputs. A is cut like W and its
    outputs are summed over ranks; B is whole.

    is_gathered  a module around the layer already gathers x

    Raises ValueError for variants that compute something else, such as DoRA.
    """
    _require_plain_lora(name, layer)
    if rule.kind == "column":
        if not is_gathered:
            yield name, Rule("gather")
        rule_a, rule_b = Rule("heads"), rule
    else:
        rule_a, rule_b = rule, Rule("sequence" if by_sequence else "whole")
    yield f"{name}.base_layer", rule
    for adapter in layer.lora_A:
        yield f"{name}.lora_A.{adapter}", rule_a
        yield f"{name}.lora_B.{adapter}", rule_b


def is_adapted(layer: nn.Module) -> bool:
    return base_of(layer, (ADAPTED,)) is not None


def _require_plain_lora(name: str, layer: Any) -> None:
    variants = {type(variant).__name__ for variant in getattr(layer, "lora_variant", {}).values()}
    known = ("base_layer.", "lora_A.", "lora_B.")
    other_parameters = {key for key, _ in layer.named_parameters() if not key.startswith(known)}
    if unsupported := sorted(variants or other_parameters):
        raise ValueError(
            f"{name} is {ADAPTED.name} with {unsupported[0]}, whose outputs cannot be cut; choose "
            f"plain LoRA, or leave the layer whole"
        )
