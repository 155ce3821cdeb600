"""What a term of a step is, and the terms that several parts of a network share.

Legend: M tokens, D model width, N and K outputs and inputs of a linear layer.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.spec.model_fields import NORM_PARAMETERS, NORMS

TRAFFIC = "traffic"
# Arithmetic of products, bytes of an activation, and bytes of a weight.
PRECISION: dict[str, tuple[str, int, int]] = {
    "fp32": ("fp32", 4, 4),
    "tf32": ("tf32", 4, 4),
    "bf16": ("bf16", 2, 4),
    "fp16": ("bf16", 2, 4),  # the same rate as bf16
    "bf16-pure": ("bf16", 2, 2),
    "bf16-master": ("bf16", 2, 2),
}
# A strided copy takes as long for a value as a plain pass does for so many bytes, whatever its type:
# 297 to 352 G values/s in six kernels of three steps on an H200, where plain passes run at 3.9 TB/s
# (docs/log/2026-11-23-predictions.md).
STRIDED_BYTES = 12
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
TRANSFER = "send_recv"  # to the next rank of an axis, and from the one before


@dataclasses.dataclass(frozen=True)
class Term:
    """`count` runs of an operation at its sizes; of TRAFFIC and what is sent the one size is bytes.

    gradient  elements of a weight's gradient that is complete after it; 0: of none
    weights   it computes a gradient of weights, for which no other stage waits
    axis      of a collective: the axis whose ranks do it together
    beside    of a collective in pieces: the products that compute meanwhile, and hide it
    nbytes    of a plain pass that takes as long, where a hardware file may have no times of the
              operation
    pace      where its block was timed whole: that time over the sum of the block's terms
    operator  the call that it is `share` of, where one was traced (measure/operator_calls.py)
    is_rough  its bytes or operations say little of its time: its kernels are far from either bound
    """

    name: str
    operation: str
    sizes: tuple[float, ...]
    count: int = 1
    gradient: int = 0
    weights: bool = False
    axis: str = ""
    beside: tuple["Term", ...] = ()
    nbytes: float = 0.0
    pace: float = 1.0
    operator: str = ""
    share: float = 1.0
    is_rough: bool = False

    @property
    def is_product(self) -> bool:
        """Whether selective checkpointing keeps its result."""
        return self.operation.startswith(("matmul", "attention"))


def strided_copy(name: str, numel: int) -> Term:
    return Term(name, "strided copy bf16", (numel,), nbytes=STRIDED_BYTES * numel)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How a precision computes, and whether elementwise neighbours are one pass over memory.

    type        of products, as calibration names it
    activation  bytes of a value that a product gives
    residual    bytes of a value of the residual stream, and of a weight that is computed with
    weight      bytes of a weight where it is kept, and of its gradient
    """

    type: str
    activation: int
    residual: int
    weight: int
    is_compiled: bool

    @classmethod
    def of(cls, precision: str, *, is_compiled: bool, gathered: bool = False) -> "Arithmetic":
        """`gathered` weights come narrow from the other ranks (ZeRO 3), the embedding's with them,
        and so the residual stream is narrow.
        """
        kind, activation, weight = PRECISION[precision]
        return cls(kind, activation, activation if gathered else weight, weight, is_compiled)

    @property
    def casts(self) -> bool:
        """Autocast: each product reads a narrow copy of its weight, made for it."""
        return self.activation < self.residual

    def passes(self, name: str, nbytes: float, *, eager: float, compiled: float) -> Iterator[Term]:
        """`eager` or `compiled` times so many bytes."""
        times = compiled if self.is_compiled else eager
        if times:
            yield Term(name, TRAFFIC, (nbytes * times,))

    def timed_pass(
        self, name: str, operation: str, sizes: tuple[float, ...], nbytes: float
    ) -> Term:
        """Work as calibrate/passes.py times it, in the type that products give; compiled, as under
        autocast.
        """
        if self.is_compiled:
            return Term(name, f"compiled {operation}" if self.casts else TRAFFIC,
                        sizes if self.casts else (nbytes,), nbytes=nbytes)  # fmt: skip
        kind = "bf16" if self.activation == 2 else "fp32"
        return Term(name, f"{operation} {kind}", sizes, nbytes=nbytes)

    def cast(self, name: str, operation: str, numel: int, *, weights: bool = False) -> Term:
        """Compiled, one pass over memory like any other."""
        if self.is_compiled:
            nbytes = numel * (self.activation + self.residual)
            return Term(name, TRAFFIC, (nbytes,), weights=weights)
        return Term(name, operation, (numel,), weights=weights)

    def narrowed(self, numel: int) -> int:
        """Values that autocast narrows before a product; compiled, the norm writes them narrow."""
        return numel if self.casts and not self.is_compiled else 0

    def linear_forward(self, name: str, m: int, n: int, k: int, narrowed: int) -> Iterator[Term]:
        """(M, K) times a weight (N, K)."""
        if self.casts:
            yield self.cast(f"{name}.cast_weight", "cast fp32 bf16", n * k)
        if narrowed:
            yield Term(f"{name}.cast_input", "cast fp32 bf16", (narrowed,))
        yield Term(name, f"matmul nt {self.type}", (m, n, k))

    def linear_backward(self, name: str, m: int, n: int, k: int, narrowed: int) -> Iterator[Term]:
        yield Term(f"{name}.input_gradient", f"matmul nn {self.type}", (m, k, n))
        product = f"matmul tn {self.type}"
        if not self.casts:
            yield Term(f"{name}.weight_gradient", product, (n, k, m), 1, n * k, True)
        else:
            yield Term(f"{name}.weight_gradient", product, (n, k, m), weights=True)
            cast = self.cast(f"{name}.cast_gradient", "cast bf16 fp32", n * k, weights=True)
            yield dataclasses.replace(cast, gradient=n * k)
        if narrowed:
            yield Term(f"{name}.cast_input_gradient", "cast bf16 fp32", (narrowed,))

    def gradients_added(self, numel: int, passes: int) -> Iterator[Term]:
        """Gradients of so many parameters to those of earlier passes: what one pass has of it on
        average.
        """
        if passes > 1 and numel:
            nbytes = 3 * self.weight * numel * (passes - 1) / passes
            yield Term("gradients.add", TRAFFIC, (nbytes / 2,), 2, weights=True)

    def norm(self, name: str, direction: str, kind: str, m: int, d: int) -> Iterator[Term]:
        """A norm of (M, D); by our kernel one pass over memory; compiled one with the residual sum
        before it.
        """
        r, a = self.residual, self.activation
        gradient = NORM_PARAMETERS[NORMS[kind]] * d if direction == "backward" else 0
        nbytes: float = m * d * (3 * r + a if direction == "backward" else r + 2)
        if kind == "triton":
            yield Term(name, TRAFFIC, (nbytes,), gradient=gradient)
        elif self.is_compiled:
            nbytes += m * d * (r + a / 2) * (direction == "forward")
            term = self.timed_pass(name, f"norm {direction}", (m, d), nbytes)
            yield dataclasses.replace(term, gradient=gradient)
        else:
            kept = "bf16" if r == 2 else "fp32"
            yield Term(name, f"{kind} {direction} {kept}", (m, d), gradient=gradient)
