"""Names the first items of a list in a sentence, and counts the others."""

from collections.abc import Sequence


def first_names(names: Sequence[str], most: int, *, separator: str = ", ") -> str:
    """Returns "a, b, c and 4 more" for seven names of which at most three are named."""
    others = len(names) - most
    return separator.join(names[:most]) + (f" and {others} more" if others > 0 else "")
