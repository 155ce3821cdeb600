"""Messages with gradients of norms, which tensor-parallel ranks sum (parallel/tensor_parallel/gradient_sums.py).

Each rank has the sum over its own tokens or, for the norms of queries and of keys, over its own heads.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from stepgauge.cost.operations.terms import Term

OF_HEADS = "qk_norm"
PER_BLOCK = {"attention_norm": 1, "feed_forward_norm": 1, OF_HEADS: 2}
OF_END = "norm"


@dataclasses.dataclass(frozen=True)
class GradientSums:
    """The gradients that a rank's stage sums.

    sizes     values per norm, by module; only of those that are summed
    itemsize  bytes of a value
    at_once   a data axis reads each gradient during backward; otherwise one message at its end has all
    """

    sizes: Mapping[str, int]
    itemsize: int
    at_once: bool

    def during_backward(self, name: str, module: str) -> Iterator[Term]:
        """Yields the messages with the gradients of a module, if they are sent at once."""
        if self.at_once:
            yield from self._message(name, self.sizes.get(module, 0), PER_BLOCK.get(module, 1))

    def at_end(self, blocks: int, *, is_last: bool) -> Iterator[Term]:
        """Yields the message with the gradients of so many blocks and, in the last stage, of the norm before
        the head.
        """
        if not self.at_once:
            of_block = sum(times * self.sizes.get(name, 0) for name, times in PER_BLOCK.items())
            of_end = self.sizes.get(OF_END, 0) if is_last else 0
            yield from self._message("gradients", blocks * of_block + of_end)

    def _message(self, name: str, values: int, count: int = 1) -> Iterator[Term]:
        if values:
            yield Term(f"{name}.sum", "all_reduce", (values * self.itemsize,), count, axis="tensor")
