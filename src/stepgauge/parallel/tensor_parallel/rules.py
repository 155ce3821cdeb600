"""The rules of a tensor parallel table by the names of a module's parts. What would not be computed
as in one process is refused here.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
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
# Each token's output depends on other tokens.
MIXERS = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.BatchNorm1d,
    nn.SyncBatchNorm,
    nn.Conv1d,
)


def rules_of(module: nn.Module, table: Table, *, by_sequence: bool) -> Rules:
    """The rules of the table by the names of the module's parts. Raises ValueError for what would
    not be computed as in one process.
    """
    told = list(matched(table, [name for name, _ in module.named_modules()]))
    for name, rule in told:
        if rule.kind == "column":
            _require_counted(module, name, told)
    rules = list(_of_parts(module, told, by_sequence))
    for name, rule in rules:
        _require_layer(module, name, rule)
        if KINDS[rule.kind].sums and (by_sequence or rule.kind == "heads"):
            _require_no_earlier_hooks(name, module.get_submodule(name))
    for name, each in module.named_modules():
        _require_no_dropout(name, each)
    kinds = {rule.kind: name for name, rule in rules}
    if by_sequence and "embedding" in kinds and "split" not in kinds:
        raise ValueError(
            f"by_sequence is True, and the table cuts the embedding {kinds['embedding']} and splits "
            f"nothing; give the first module of the residual stream the rule split, or choose "
            f"by_sequence=False"
        )
    _require_told(module, rules, by_sequence)
    return rules


def _of_parts(module: nn.Module, rules: Rules, by_sequence: bool) -> Iterator[tuple[str, Rule]]:
    """The rules, of layers that are adapted those of their parts."""
    for name, rule in rules:
        layer = module.get_submodule(name)
        if rule.kind in ADAPTABLE and is_adapted(layer):
            is_gathered = _is_in(name, rules, ("gather",))
            yield from rules_of_adapted(
                name, layer, rule, by_sequence=by_sequence, is_gathered=is_gathered
            )
        else:
            yield name, rule


def _require_layer(module: nn.Module, name: str, rule: Rule) -> None:
    """Raises ValueError for a layer that is not the one that the rule cuts."""
    types = CUT_TYPES.get(rule.kind)
    if types is None:
        return
    if not name:
        raise ValueError(
            f"the rule {rule.kind} replaces a layer of a module, and was given it alone"
        )
    layer: Any = module.get_submodule(name)
    cuts = f"the rule {rule.kind} cuts {' and '.join(each.name for each in types)}"
    base: Any = base_of(layer, types)
    if base is None:
        own = type(layer).__name__
        if any(each.name.endswith(own) for each in types):  # of another library, by the same name
            own = f"{type(layer).__module__}.{own}"
        raise ValueError(f"{name} is a {own}; {cuts}")
    if type(layer).forward is not base.forward or "forward" in vars(layer):
        raise ValueError(f"{name} is a {type(layer).__name__} with a forward of its own; {cuts}")
    if "weight" not in dict(layer.named_parameters(recurse=False)):
        raise ValueError(f"{name} has no parameter weight of its own to cut")
    if parametrize.is_parametrized(layer):
        raise ValueError(f"{name} has a parameter that is computed from others; {cuts}")
    for option in ("scale_grad_by_freq", "sparse"):
        if getattr(layer, option, False):
            raise ValueError(f"{name} has {option}, which an embedding that is cut does not do")
    if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        raise ValueError(
            f"{name} is read by its nn.MultiheadAttention, which does not call it; leave it whole"
        )
    _require_no_hooks(name, layer)


def _require_counted(module: nn.Module, name: str, rules: Rules) -> None:
    """Raises ValueError where the module around a column reads how many heads there are, of which a
    rank has some: splitting what its columns give into as many would mix tokens.
    """
    sections = [s for each, rule in rules if each == name for s in rule.sections]
    heads = {section.rows // section.unit for section in sections}
    parent = name.rpartition(".")[0]
    told = {count.attribute for each, rule in rules if each == parent for count in rule.counts}
    for key, value in _read_counts(module.get_submodule(parent)):
        if key not in told and (value in heads or not heads):
            raise ValueError(
                f"{parent} reads its {key}, {value}, and each rank has only a part of them; give it "
                f"a rule with counts=(Count({key!r}, Section({value})),)"
            )


def _read_counts(part: nn.Module) -> Iterator[tuple[str, int]]:
    """Attributes that count heads and are read by the module's forward."""
    forward = inspect.unwrap(type(part).forward)
    for key in dict.fromkeys(_names_in(getattr(forward, "__code__", None))):
        value = getattr(part, key, None)
        if type(value) is int and value > 1 and key.endswith(("head", "heads")):
            yield key, value


def _names_in(code: CodeType | None) -> Iterator[str]:
    """That the code reads, and what is defined in it, such as a comprehension."""
    yield from code.co_names if code else ()
    for constant in code.co_consts if code else ():
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _require_no_hooks(name: str, layer: nn.Module) -> None:
    """The layer is replaced, and its parameters too."""
    if kept := hooks_of_module(layer):
        raise ValueError(
            f"{name} has {kept[0].strip('_')}, which would be lost; register hooks after the layers "
            f"are cut: they then see this rank's part"
        )
    for key, parameter in layer.named_parameters(recurse=False):
        if num_hooks(parameter):
            raise ValueError(
                f"{name}.{key} has a hook, which would be lost; register hooks after the layers are "
                f"cut: they then see this rank's part"
            )


def _require_no_earlier_hooks(name: str, part: nn.Module) -> None:
    """Which would see a gradient before it is summed over ranks."""
    for key, parameter in part.named_parameters():
        if tensor_hooks(parameter):
            raise ValueError(
                f"{name}.{key} has a hook, which would see the gradient of a part; register hooks "
                f"after the layers are cut"
            )


def _require_no_dropout(name: str, part: nn.Module) -> None:
    """Nor where it is a number that a forward of somebody's own reads."""
    dropped = {"p": part.p} if isinstance(part, DROPOUTS) else _named_dropouts(part)
    for key, share in dropped.items():
        if share:
            raise ValueError(
                f"{name or 'the module'} has dropout of {share}, which would drop other values on "
                f"each rank; set its {key} to 0"
            )


def _named_dropouts(part: nn.Module) -> dict[str, float]:
    return {
        key: value
        for key, value in vars(part).items()
        if "drop" in key.lower() and type(value) is float and 0 < value <= 1
    }


def _require_told(module: nn.Module, rules: Rules, by_sequence: bool) -> None:
    """Raises ValueError for a module that works on a part of the residual stream and has no rule: the
    gradients of its weights would be those of this part alone.
    """
    named = dict(module.named_modules())
    kinds = ("sequence", "heads", "whole")
    if by_sequence:
        split = [name for name, rule in rules if rule.kind == "split"]
        names = list(named)[list(named).index(split[0]) if split else 0 :]
        does = "works on a piece of the sequence"
        for name in names:
            if isinstance(named[name], MIXERS) and not _is_in(name, rules, ("whole",)):
                raise ValueError(
                    f"{name or 'the module'} is a {type(named[name]).__name__}, which would see its "
                    f"rank's piece of the sequence alone; choose by_sequence=False"
                )
        _require_rules({name: named[name] for name in names}, rules, kinds, does)
    for parent, rule in rules:
        if rule.kind == "gather":
            inside = {name: part for name, part in named.items() if _is_below(name, parent)}
            does = f"is in {parent}, which gathers for its columns,"
            _require_rules(inside, rules, kinds, does)


def _require_rules(
    parts: Mapping[str, nn.Module], rules: Rules, kinds: Sequence[str], does: str
) -> None:
    told = {name for name, rule in rules if rule.kind in CUT_TYPES}
    for name, part in parts.items():
        own = any(True for _ in part.parameters(recurse=False))
        if own and name not in told and not _is_in(name, rules, kinds):
            raise ValueError(
                f"{name or 'the module'} {does} and has no rule: the gradients of its weights "
                f"would be those of one part alone; give it one of {', '.join(kinds)}"
            )


def _is_in(name: str, rules: Rules, kinds: Sequence[str]) -> bool:
    """Whether the module or one that it is in has a rule of these kinds."""
    return any(rule.kind in kinds and _is_below(name, parent) for parent, rule in rules)


def _is_below(name: str, parent: str) -> bool:
    """Whether the module is the other one, or in it."""
    return not parent or f"{name}.".startswith(f"{parent}.")
