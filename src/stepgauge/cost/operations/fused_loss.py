"""The fused head and loss (kernels/linear_cross_entropy), with all words on a rank or with a part of them.

Both loop over chunks of tokens, so that only a chunk's logits are in memory. With the whole vocabulary on one
rank (chunked.py), forward computes the gradients as well, and backward has nothing left to compute. A
tensor-parallel rank, with a part of the vocabulary (partial.py), knows the loss only when all ranks have
exchanged their sums, so its backward computes the logits a second time.

Legend: M tokens, D model width, V words of this rank, C tokens of a chunk.
"""

import dataclasses
import math
from collections.abc import Iterator

from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term
from stepgauge.spec.fused_loss import logits_bytes, operand_rows

# Sizes of kernels/linear_cross_entropy. Between the products, a chunk's logits are read and written
# once if a row fits into registers, otherwise read twice and written once; those of a part of the vocabulary are
# read once in forward, and read and written once in backward. On a CPU, plain PyTorch keeps fp32 copies, and
# elementwise operations read and write them this often (counted in plain.py and partial_plain.py).
MAX_LOGITS_BYTES_PLAIN = 64 * 2**20
MAX_ROW_IN_REGISTERS = 16_384
PASSES_PLAIN = 16
PASSES_OF_PART, PASSES_OF_PART_PLAIN = (1, 2), (8, 11)  # in forward and in backward


@dataclasses.dataclass(frozen=True)
class FusedLoss:
    """The fused head and loss of a rank with M tokens and all V words of width D: its terms, and its memory."""

    arithmetic: Arithmetic
    m: int
    v: int
    d: int
    is_plain: bool  # in plain PyTorch, as on CPUs

    def forward(self) -> Iterator[Term]:
        """Yields logits, loss and both gradients."""
        yield from self._casts(self.m * self.d)
        yield self._logits("head")
        yield self._passes(2 if self.v <= MAX_ROW_IN_REGISTERS else 3, PASSES_PLAIN)
        yield from self._gradients(self.arithmetic.residual_bytes)

    def backward(self) -> Iterator[Term]:
        """Yields the one launch of backward: it finds that the gradients are to be multiplied by 1."""
        yield Term("head.gradient", TRAFFIC, (0,), gradient=self.numel)

    @property
    def kept(self) -> dict[str, float]:
        """Bytes that backward needs of forward."""
        return {"gradient of the head": self.numel * self.arithmetic.residual_bytes}

    @property
    def forward_bytes(self) -> float:
        """Bytes held during forward: a chunk's logits, and the weight as the products read it, if that is a copy."""
        is_copy = self.arithmetic.casts or self.is_padded
        return self.chunk_bytes + (self.weight_bytes if is_copy else 0)

    @property
    def most_bytes(self) -> float:
        """The most that is held at once."""
        return self.forward_bytes

    @property
    def numel(self) -> int:
        return self.v * self.d

    @property
    def is_padded(self) -> bool:
        return self._rows != self.v

    @property
    def weight_bytes(self) -> int:
        return self._rows * self.d * self.arithmetic.activation_bytes

    @property
    def chunk_bytes(self) -> int:
        return self._c * self.v * self.arithmetic.activation_bytes

    @property
    def chunks(self) -> int:
        row_bytes = self.v * self.arithmetic.activation_bytes
        limit = MAX_LOGITS_BYTES_PLAIN if self.is_plain else logits_bytes(self.m, self.d, row_bytes)
        return math.ceil(self.m * row_bytes / limit)

    def _casts(self, hidden_numel: int) -> Iterator[Term]:
        if self.arithmetic.casts:
            yield self.arithmetic.cast("head.cast_weight", "cast fp32 bf16", self.numel)
            yield self.arithmetic.cast("head.cast_input", "cast fp32 bf16", hidden_numel)

    def _logits(self, name: str) -> Term:
        return self._product(name, "nt", (self._c, self._rows, self.d))

    def _passes(self, passes: int, plain: int) -> Term:
        value_bytes = 4 * plain if self.is_plain else passes * self.arithmetic.activation_bytes
        return Term("loss", TRAFFIC, (self._c * self.v * value_bytes,), self.chunks)

    def _gradients(self, sum_bytes: int) -> Iterator[Term]:
        """Yields the products with the logits' gradient. All chunks but the first add to the weight's gradient,
        a sum in so many bytes per value.
        """
        yield self._product("head.input_gradient", "nn", (self._c, self.d, self._rows))
        yield self._product("head.weight_gradient", "tn", (self._rows, self.d, self._c))
        if self.chunks > 1:
            nbytes = 2 * self.numel * sum_bytes
            yield Term("head.add_gradient", TRAFFIC, (nbytes,), self.chunks - 1)

    def _product(self, name: str, layout: str, sizes: tuple[int, int, int]) -> Term:
        return Term(name, f"matmul {layout} {self.arithmetic.dtype}", sizes, self.chunks)

    @property
    def _c(self) -> int:
        return math.ceil(self.m / self.chunks)

    @property
    def _rows(self) -> int:
        """Rows of the weight in products, which kernels pad if the words are not aligned."""
        return operand_rows(self.v, self.arithmetic.activation_bytes)


@dataclasses.dataclass(frozen=True)
class PartOfFusedLoss(FusedLoss):
    """The same on a tensor-parallel rank that has V of the words. It casts the hidden states of its own tokens."""

    own_tokens: int

    def forward(self) -> Iterator[Term]:
        """Yields logits, the sums of this rank's words, and what ranks exchange."""
        yield from self._casts(self.own_tokens * self.d)
        yield from self._padding()
        yield Term("loss.targets", TRAFFIC, (self.m * self.d * self._target_bytes,))
        yield self._logits("head")
        yield self._passes(PASSES_OF_PART[0], PASSES_OF_PART_PLAIN[0])
        yield Term("loss.max", "all_reduce", (self.m * 4,), axis="tensor")
        yield Term("loss.sum", "all_reduce", (self.m * 8,), axis="tensor")

    def backward(self) -> Iterator[Term]:
        """Yields the logits again, and both gradients. The weight's gradient is summed in fp32 if there are
        several chunks.
        """
        arithmetic, numel = self.arithmetic, self.numel
        yield from self._padding()
        yield self._logits("head.again")
        yield self._passes(PASSES_OF_PART[1], PASSES_OF_PART_PLAIN[1])
        yield Term("head.clear_gradient", TRAFFIC, (numel * self._sum_bytes,))
        yield from self._gradients(self._sum_bytes)
        if self._sum_bytes > arithmetic.activation_bytes:
            nbytes = numel * (self._sum_bytes + arithmetic.activation_bytes)
            yield Term("head.round_gradient", TRAFFIC, (nbytes,))
        if arithmetic.casts:
            cast = arithmetic.cast("head.cast_gradient", "cast bf16 fp32", numel)
            yield dataclasses.replace(cast, gradient=numel)
        else:
            yield Term("head.gradient", TRAFFIC, (0,), gradient=numel)
        if own := arithmetic.autocast_numel(self.own_tokens * self.d):
            yield Term("head.cast_input_gradient", "cast bf16 fp32", (own,))

    @property
    def kept(self) -> dict[str, float]:
        copied = self.numel * self.arithmetic.activation_bytes if self.arithmetic.casts else 0
        return {"bf16 copy of the head": copied}

    @property
    def forward_bytes(self) -> float:
        """Bytes held during forward: a chunk's logits, and the padded weight."""
        return self.chunk_bytes + (self.weight_bytes if self.is_padded else 0)

    @property
    def most_bytes(self) -> float:
        """In backward: in addition both gradients, that of the weight also as the sum of chunks."""
        itemsize = self.arithmetic.activation_bytes
        summed = self._sum_bytes if self._sum_bytes > itemsize else 0
        return self.forward_bytes + self.m * self.d * itemsize + self.numel * (itemsize + summed)

    def _padding(self) -> Iterator[Term]:
        """Yields the copy of a weight whose rows are padded for the products."""
        if self.is_padded:
            yield Term("head.pad_weight", TRAFFIC, (2 * self.weight_bytes,))

    @property
    def _sum_bytes(self) -> int:
        """Bytes per value of the weight's gradient while chunks are added to it."""
        return 4 if self.chunks > 1 else self.arithmetic.activation_bytes

    @property
    def _target_bytes(self) -> int:
        """Bytes per value of the hidden states that the logits of targets read and write: a gather of rows,
        casts to fp32, the product, and its sum.
        """
        itemsize = self.arithmetic.activation_bytes
        casts = 2 * (itemsize + 4) if itemsize < 4 else 0
        return 2 * itemsize + casts + 12 + 4
