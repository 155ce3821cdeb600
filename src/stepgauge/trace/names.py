"""Makes the names of kernels and ranges readable."""

import functools
import re

_COMMON = re.compile(
    r"^void |at::native::|\(anonymous namespace\)::|at_cuda_detail::|<unnamed>::|\{anonymous\}::"
)
_REPEATED = re.compile(r"(?<=[._])\d+(?=\.|$| \()")


@functools.cache
def readable(name: str) -> str:
    """Returns a kernel's name without torch's namespaces, return type and parameters."""
    name = _COMMON.sub("", name)
    templates = parentheses = 0
    for index, character in enumerate(name):
        if character == "(":
            if (
                not templates
                and not parentheses
                and index
                and not name.endswith("operator", 0, index)
            ):
                return name[:index].rstrip()
            parentheses += 1
        elif character == ")":
            parentheses -= 1
        elif not parentheses and name[index - 1 : index + 1] != "->":
            templates += {"<": 1, ">": -1}.get(character, 0)
    return name.rstrip()


@functools.cache
def repeated(range: str) -> str:
    """Returns the range with * for the numbers of repeated modules: "blocks.*.norm", "Linear_*"."""
    return _REPEATED.sub("*", range)


def joined(outer: str, name: str) -> str:
    """Returns the name inside the outer range. A name that is already qualified stays as it is: with
    checkpointing, backward recomputes a whole block inside the range of one of its operations.
    """
    same_root = outer.partition(".")[0] == name.partition(".")[0]
    return name if not outer or name == outer or (same_root and "." in name) else f"{outer}.{name}"


def split(range: str) -> list[str]:
    """Splits a dotted name into modules: "blocks.0.attention" into "blocks.0" and "attention"."""
    return re.split(r"\.(?!\d+(?:\.|$))", range) if range else []
