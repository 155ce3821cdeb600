"""What kind of work a kernel or an operator is, and the rule that says so: the tables of `rules`."""

import functools
import re
from typing import NamedTuple

from stepgauge.trace.rules import COMPOSITES, KERNELS, OPERATORS, VIEWS, Table

LONGEST_NAME = 60  # of an operator in a reason


class Placed(NamedTuple):
    kind: str
    rule: str


# What the driver calls a copy to the memory of another GPU.
_BETWEEN_GPUS = re.compile(r"PtoP|Peer", re.IGNORECASE)
_AUTOGRAD = re.compile(r"^autograd::|AccumulateGrad|Backward\d*$|^detach")
_COMPILER = re.compile(
    r"^(Torch-Compiled|TorchDynamo|Pregraph|AOTDispatcher|CompiledFunction|CompiledF)"
)
# around code that the compiler wrote for a CPU, which records nothing itself
GENERATED = "## Call Compiled"
# Operators of these kinds call others that are part of them, a mean inside a norm say.
_WHOLE = ("attention", "softmax", "norm", "convolution", "embedding", "quantisation")


def _match(table: Table, name: str) -> tuple[str, str]:
    """The kind of the first rule that matches, and the words that matched."""
    for kind, pattern in table:
        if found := pattern.search(name):
            return kind, found[0]
    return "", ""


class Kinds:
    """The kind of each piece of work, remembered by its names."""

    def __init__(self) -> None:
        self.of_kernel = functools.cache(self._of_kernel)
        self.of_operation = functools.cache(self._of_operation)
        self.whole = functools.cache(self._whole)

    def _whole(self, operation: str) -> bool:
        """Whether what the operation calls is of the operation's kind."""
        return (_match(OPERATORS, operation)[0] or _match(COMPOSITES, operation)[0]) in _WHOLE

    def _of_kernel(self, name: str, category: str, operation: str, in_optimizer: bool) -> Placed:
        """Of something that ran on a device; `operation` launched it."""
        if category == "copy":
            if found := _BETWEEN_GPUS.search(name):
                return Placed("communication", f"a transfer whose name has {found[0]!r}")
            return Placed("copy", "a transfer or fill of the driver")
        named, words = _match(KERNELS, name)
        by_name = Placed(named, f"kernel name has {_short(words)!r}")
        if named == "communication":
            return by_name
        by_operator, _ = _match(OPERATORS, operation)
        if in_optimizer and by_operator != "copy":
            return Placed("optimizer", "launched inside Optimizer.step")
        if by_operator:
            return Placed(by_operator, f"operator is {_short(operation)}")
        if named:
            return by_name
        whole, _ = _match(COMPOSITES, operation)
        if whole:
            return Placed(whole, f"launched by {_short(operation)}")
        return Placed(
            "other", f"no rule for this name, launched by {_short(operation) or 'nothing known'}"
        )

    def _of_operation(
        self, name: str, category: str, in_optimizer: bool, whole: str = ""
    ) -> Placed:
        """Of something that ran on the host by itself, without the calls inside it; inside of the
        operation `whole`, whose kind all of it has.
        """
        if host := _on_host_alone(name, category):
            return Placed("host", host)
        if name.startswith(GENERATED):
            return Placed("other", "code that torch.compile wrote: many operations in one")
        kind, _ = _match(OPERATORS, name)
        if not kind:
            kind, _ = _match(COMPOSITES, name)
        if kind == "communication":
            return Placed(kind, f"operator is {_short(name)}")
        if in_optimizer:
            return Placed("optimizer", "called inside Optimizer.step")
        if whole and whole != name:
            outer = _match(OPERATORS, whole)[0] or _match(COMPOSITES, whole)[0]
            return Placed(outer, f"called inside {_short(whole)}")
        if kind:
            return Placed(kind, f"operator is {_short(name)}")
        return Placed("other", f"no rule for {_short(name)}")


def _on_host_alone(name: str, category: str) -> str:
    """Why it is no work of the model; "" where it is."""
    if name.startswith(GENERATED):
        return ""
    if _COMPILER.match(name):
        return "torch.compile's own work"
    if category in ("annotation", "python"):
        return "Python between the operations"
    if category == "runtime":
        return "a call of the driver"
    if _AUTOGRAD.search(name):
        return "autograd's own work"
    return "views and allocation" if VIEWS.match(name) else ""


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
