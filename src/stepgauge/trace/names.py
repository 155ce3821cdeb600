"""Names of kernels and ranges, made readable."""

import functools
import re

_COMMON = re.compile(
    r"^void |at::native::|\(anonymous namespace\)::|at_cuda_detail::|<unnamed>::|\{anonymous\}::"
)
_REPEATED = re.compile(r"(?<=[._])\d+(?=\.|$| \()")


@functools.cache
def readable(name: str) -> str:
    """A kernel's name without namespaces of torch, return type and parameters."""
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


def repeated(range: str) -> str:
    """The range with * for numbers of repeated parts: "blocks.*.norm", "Linear_*"."""
    return _REPEATED.sub("*", range)


def joined(outer: str, name: str) -> str:
    """The name inside of the outer range, unless it is a qualified name itself.

    Backward may run a whole block's forward again, inside the range of any of its operations.
    """
    same_root = outer.partition(".")[0] == name.partition(".")[0]
    return name if not outer or name == outer or (same_root and "." in name) else f"{outer}.{name}"


def split(range: str) -> list[str]:
    """A dotted name by its parts, a number kept with what it counts: "blocks.0.attention" is two."""
    return re.split(r"\.(?!\d+(?:\.|$))", range) if range else []
