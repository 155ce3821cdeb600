"""Matches the rules of a tensor parallel table with the modules of a network, and refuses networks
whose results would differ from those of one process.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from stepgauge.parallel.autograd.parameter_hooks import hooks_of_module, num_hooks, tensor_hooks
from stepgauge.parallel.tensor_parallel.adapters import ADAPTABLE, is_adapted, rules_of_adapted
from stepgauge.parallel.tensor_parallel.layer_types import CUT_TYPES, base_of
from stepgauge.spec.plan.tensor import KINDS, Rule, Table, matched

Rules = Sequence[tuple[str, Rule]]
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
# Modules in which each token's output depends on other tokens.
TOKEN_MIXERS = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.BatchNorm1d,
    nn.SyncBatchNorm,
    nn.Conv1d,
)


def rules_of(module: nn.Module, table: Table, *, by_sequence: bool) -> Rules:
    """Returns the rules by the names of the module's submodules. Raises ValueError if the results
    would differ from those of one process.
    """
    table_rules = list(matched(table, [name for name, _ in module.named_modules()]))
    for name, rule in table_rules:
        if rule.kind == "column":
            _require_counts(module, name, table_rules)
    rules = list(_with_adapters(module, table_rules, by_sequence))
    for name, rule in rules:
        _require_layer(module, name, rule)
        if KINDS[rule.kind].sums and (by_sequence or rule.kind == "heads"):
            _require_no_earlier_hooks(name, module.get_submodule(name))
    for name, part in module.named_modules():
        _require_no_dropout(name, part)
    kinds = {rule.kind: name for name, rule in rules}
    if by_sequence and "embedding" in kinds and "split" not in kinds:
        raise ValueError(
            f"by_sequence is True, and the table cuts the embedding {kinds['embedding']} but has no "
            f"rule split; give the first module of the residual stream the rule split, or choose "
            f"by_sequence=False"
        )
    if by_sequence:
        _require_rules_on_pieces(module, rules)
    _require_rules_after_gather(module, rules)
    return rules


def _with_adapters(
    module: nn.Module, rules: Rules, by_sequence: bool
) -> Iterator[tuple[str, Rule]]:
    """Yields the rules; the rule of a layer with LoRA is replaced by rules for its parts."""
    for name, rule in rules:
        layer = module.get_submodule(name)
        if rule.kind in ADAPTABLE and is_adapted(layer):
            is_gathered = _is_covered(name, rules, ("gather",))
            yield from rules_of_adapted(
                name, layer, rule, by_sequence=by_sequence, is_gathered=is_gathered
            )
        else:
            yield name, rule


def _require_layer(module: nn.Module, name: str, rule: Rule) -> None:
    """Raises ValueError if the rule cannot cut this layer."""
    types = CUT_TYPES.get(rule.kind)
    if types is None:
        return
    if not name:
        raise ValueError(
            f"the rule {rule.kind} replaces a layer inside a module, but the layer was passed itself"
        )
    layer: Any = module.get_submodule(name)
    cuts = f"the rule {rule.kind} cuts {' and '.join(each.name for each in types)}"
    base: Any = base_of(layer, types)
    if base is None:
        class_name = type(layer).__name__
        if any(each.name.endswith(class_name) for each in types):  # the same name elsewhere
            class_name = f"{type(layer).__module__}.{class_name}"
        raise ValueError(f"{name} is a {class_name}; {cuts}")
    if type(layer).forward is not base.forward or "forward" in vars(layer):
        raise ValueError(f"{name} is a {type(layer).__name__} that overrides forward; {cuts}")
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise ValueError(f"{name} has no parameter named weight to cut")
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{name} has a parameter that is computed from others; {cuts}")
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(layer, option, False):
            raise ValueError(f"{name} has {option}, which a cut embedding does not support")
    if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        raise ValueError(
            f"{name} is in an nn.MultiheadAttention, which reads its weight instead of calling it; "
            f"leave it whole"
        )
    _require_no_hooks(name, layer, allowed=KEPT_HOOKS.get(rule.kind, ()))


def _require_counts(module: nn.Module, name: str, rules: Rules) -> None:
    """Raises ValueError if the module around a column reads the number of all heads and no rule sets
    it to a rank's number. Splitting a rank's features into all heads would mix tokens.
    """
    sections = [s for other, rule in rules if other == name for s in rule.sections]
    heads = {section.rows // section.unit for section in sections}
    parent = name.rpartition(".")[0]
    counted = {count.attribute for other, rule in rules if other == parent for count in rule.counts}
    for key, value in _head_counts(module.get_submodule(parent)):
        if key not in counted and (value in heads or not heads):
            raise ValueError(
                f"{parent} reads its {key}, {value}, but each rank has only a part of them; give it "
                f"a rule with counts=(Count({key!r}, Section({value})),)"
            )


def _head_counts(part: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields the attributes that the module's forward reads and that look like numbers of heads."""
    forward = inspect.unwrap(type(part).forward)
    for key in dict.fromkeys(_names_in(getattr(forward, "__code__", None))):
        value = getattr(part, key, None)
        if type(value) is int and value > 1 and key.endswith(("head", "heads")):
            yield key, value


def _names_in(code: CodeType | None) -> Iterator[str]:
    """Yields the names that the code reads, including code defined inside, such as comprehensions."""
    yield from code.co_names if code else ()
    for constant in code.co_consts if code else ():
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


# Hooks that the layer keeps when it is cut. The output of a cut embedding is that of the whole one;
# gradient checkpointing of the transformers library has such a hook.
KEPT_HOOKS = {"embedding": ("_forward_hooks",)}


def _require_no_hooks(name: str, layer: nn.Module, allowed: Sequence[str]) -> None:
    """Raises ValueError if the layer or its parameters have hooks, because both are replaced."""
    if hooks := [each for each in hooks_of_module(layer) if each not in allowed]:
        raise ValueError(
            f"{name} has {hooks[0].strip('_')}, which would be lost; register hooks after the layers "
            f"are cut: they then see this rank's part"
        )
    for key, parameter in layer.named_parameters(recurse=False):
        if num_hooks(parameter):
            raise ValueError(
                f"{name}.{key} has a hook, which would be lost; register hooks after the layers are "
                f"cut: they then see this rank's part"
            )


def _require_no_earlier_hooks(name: str, part: nn.Module) -> None:
    """Raises ValueError if a parameter has a hook, which would run before the gradient is summed."""
    for key, parameter in part.named_parameters():
        if tensor_hooks(parameter):
            raise ValueError(
                f"{name}.{key} has a hook, which would see the gradient before it is summed over "
                f"ranks; register hooks after the layers are cut"
            )


def _require_no_dropout(name: str, part: nn.Module) -> None:
    """Raises ValueError for a dropout layer, and for an attribute that looks like the probability of
    a functional dropout.
    """
    probabilities = {"p": part.p} if isinstance(part, DROPOUTS) else _dropout_attributes(part)
    for key, probability in probabilities.items():
        if probability:
            raise ValueError(
                f"{name or 'the module'} has dropout of {probability}, which would drop different "
                f"values on each rank; set its {key} to 0"
            )


def _dropout_attributes(part: nn.Module) -> dict[str, float]:
    return {
        key: value
        for key, value in vars(part).items()
        if "drop" in key.lower() and type(value) is float and 0 < value <= 1
    }


# Rules that say what a whole parameter works on, and so how its gradient is summed.
WHOLE_KINDS = ("sequence", "heads", "whole")


def _require_rules_on_pieces(module: nn.Module, rules: Rules) -> None:
    """Raises ValueError for modules that work on a piece of the sequence and have no rule, and for
    those that mix tokens.
    """
    names = [name for name, _ in module.named_modules()]
    splits = [name for name, rule in rules if rule.kind == "split"]
    on_pieces = names[names.index(splits[0]) if splits else 0 :]
    for name in on_pieces:
        part = module.get_submodule(name)
        if isinstance(part, TOKEN_MIXERS) and not _is_covered(name, rules, ("whole",)):
            raise ValueError(
                f"{name or 'the module'} is a {type(part).__name__}, which would only see its rank's "
                f"piece of the sequence; choose by_sequence=False"
            )
    _require_rules(module, on_pieces, rules, "works on a piece of the sequence")


def _require_rules_after_gather(module: nn.Module, rules: Rules) -> None:
    """Raises ValueError for modules without a rule inside a module with the rule gather."""
    for parent, rule in rules:
        if rule.kind == "gather":
            inside = [name for name, _ in module.named_modules() if is_inside(name, parent)]
            _require_rules(module, inside, rules, f"is in {parent}, which has the rule gather,")


def _require_rules(module: nn.Module, names: Iterable[str], rules: Rules, reason: str) -> None:
    cut = {name for name, rule in rules if rule.kind in CUT_TYPES}
    for name in names:
        has_parameters = any(True for _ in module.get_submodule(name).parameters(recurse=False))
        if has_parameters and name not in cut and not _is_covered(name, rules, WHOLE_KINDS):
            raise ValueError(
                f"{name or 'the module'} {reason} and has no rule: each rank would only compute a "
                f"part of its gradients; give it one of {', '.join(WHOLE_KINDS)}"
            )


def _is_covered(name: str, rules: Rules, kinds: Sequence[str]) -> bool:
    """True if the module, or one that contains it, has a rule of these kinds."""
    return any(rule.kind in kinds and is_inside(name, parent) for parent, rule in rules)


def is_inside(name: str, parent: str) -> bool:
    """True if the module is the parent itself or inside it."""
    return not parent or f"{name}.".startswith(f"{parent}.")
