"""A term is one kind of operation in a step, with its sizes and how often it runs.

This file defines terms, and makes those that several parts of a network share: linear layers, norms,
casts and passes over memory.

Legend: M tokens, D model width, N and K outputs and inputs of a linear layer.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from stepgauge.spec.calibration import ALIGNED
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.units import round_up

TRAFFIC = "traffic"  # elementwise work, priced by the bytes that it reads and writes
# By precision: dtype of matrix products, bytes of an activation, bytes of a weight.
PRECISION: dict[str, tuple[str, int, int]] = {
    "fp32": ("fp32", 4, 4),
    "tf32": ("tf32", 4, 4),
    "bf16": ("bf16", 2, 4),
    "fp16": ("bf16", 2, 4),  # as fast as bf16
    "bf16-pure": ("bf16", 2, 2),
    "bf16-master": ("bf16", 2, 2),
}
AUTOCAST = ("bf16", "fp16", "bf16-master")  # precisions in which part of the loss is in fp32
# A strided copy takes as long per value as a plain pass over this many bytes, whatever the dtype:
# 297 to 352 G values/s in six kernels of three steps on an H200, where plain passes run at 3.9 TB/s
# (docs/log/2026-11-23-predictions.md).
STRIDED_BYTES = 12
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
WEIGHT_GRADIENT = "matmul tn bf16"
BF16_PRODUCTS = ("matmul nt bf16", "matmul nn bf16", WEIGHT_GRADIENT)
TRANSFER = "send_recv"  # each rank of an axis sends to the next one


@dataclasses.dataclass(frozen=True)
class Term:
    """`count` runs of an operation at its sizes. TRAFFIC and communication have one size, the bytes.

    gradient     elements of the parameter whose gradient is complete after this term; 0 if none is
    for_weights  part of a weight gradient: no other pipeline stage waits for it
    axis         communication: the mesh axis of the ranks that take part
    hidden_by    communication in pieces: the products that run at the same time
    waits        communication: how often computation waits for a piece of it
    copied_as    communication: the collective that copy engines run instead between GPUs of one
                 machine, as bench comm names it; "" if NCCL always runs it
    nbytes       bytes of a plain pass that takes as long; used if the hardware file has no times of
                 the operation
    pace         if whole blocks were timed: that time divided by the sum of the block's terms
    operator     traced networks: the operator call that this term is part of
                 (measure/operator_calls.py)
    share        traced networks: the fraction of the call's time that this term takes
    is_rough     the time cannot be derived well from bytes or FLOPs: its kernels are far from both
                 limits
    """

    name: str
    operation: str
    sizes: tuple[float, ...]
    count: int = 1
    gradient: int = 0
    for_weights: bool = False
    axis: str = ""
    hidden_by: tuple["Term", ...] = ()
    waits: int = 1
    copied_as: str = ""
    nbytes: float = 0.0
    pace: float = 1.0
    operator: str = ""
    share: float = 1.0
    is_rough: bool = False

    @property
    def is_product(self) -> bool:
        """True for matrix products and attention, whose results selective checkpointing keeps."""
        return self.operation.startswith(("matmul", "attention"))


def strided_copy(name: str, numel: int) -> Term:
    """Returns the term of a copy that changes the order of dimensions."""
    return Term(name, "strided copy bf16", (numel,), nbytes=STRIDED_BYTES * numel)


def padded(product: Term) -> Term:
    """Returns a bf16 product with its widths rounded up to multiples of ALIGNED, as torch.compile and cuDNN
    run it on GPUs. Other terms are returned as they are.
    """
    if product.operation not in BF16_PRODUCTS:
        return product
    m, _, k = product.sizes
    wide_m, wide_n, wide_k = (round_up(int(size), ALIGNED) for size in product.sizes)
    tokens_last = product.operation == WEIGHT_GRADIENT
    sizes = (wide_m, wide_n, k) if tokens_last else (m, wide_n, wide_k)
    return dataclasses.replace(product, sizes=sizes)


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtypes that a step computes in, and whether it is compiled.

    dtype             of matrix products, as in the names of calibrated operations
    activation_bytes  per value of a product's result
    residual_bytes    per value of the residual stream, and of a weight before autocast
    weight_bytes      per value of a stored weight and of its gradient
    is_compiled       elementwise neighbours are fused into one pass over memory
    """

    dtype: str
    activation_bytes: int
    residual_bytes: int
    weight_bytes: int
    is_compiled: bool

    @classmethod
    def of(cls, precision: str, *, is_compiled: bool, gathered: bool = False) -> "Arithmetic":
        """Returns the arithmetic of a precision.

        Weights that are `gathered` from other ranks (ZeRO 3) arrive in the activations' dtype. The
        embedding is one of them, so the residual stream has that dtype, too.
        """
        dtype, activation, weight = PRECISION[precision]
        return cls(dtype, activation, activation if gathered else weight, weight, is_compiled)

    @property
    def casts(self) -> bool:
        """True under autocast: each product reads a bf16 copy of its weight, made for it."""
        return self.activation_bytes < self.residual_bytes

    def passes(self, name: str, nbytes: float, *, eager: float, compiled: float) -> Iterator[Term]:
        """Yields elementwise work that moves `nbytes` `eager` times, or `compiled` times if compiled."""
        times = compiled if self.is_compiled else eager
        if times:
            yield Term(name, TRAFFIC, (nbytes * times,))

    def timed_pass(
        self,
        name: str,
        operation: str,
        sizes: tuple[float, float],
        nbytes: float,
        *,
        timed_bytes: float = 0.0,
    ) -> Term:
        """Returns elementwise work that calibrate/passes.py times, in the dtype of activations.

        Compiled passes are timed under autocast only, where they move `timed_bytes`; by default as many as
        in bf16. In other precisions the same kernel takes as long per byte, as if it were narrower or wider.
        """
        if not self.is_compiled:
            dtype = "bf16" if self.activation_bytes == 2 else "fp32"
            return Term(name, f"{operation} {dtype}", sizes, nbytes=nbytes)
        m, n = sizes
        n *= nbytes / timed_bytes if timed_bytes else self.activation_bytes / 2
        return Term(name, f"compiled {operation}", (m, n), nbytes=nbytes)

    def cast(self, name: str, operation: str, numel: int, *, for_weights: bool = False) -> Term:
        """Returns a cast of `numel` values; compiled, it is a pass over memory like any other."""
        if self.is_compiled:
            nbytes = numel * (self.activation_bytes + self.residual_bytes)
            return Term(name, TRAFFIC, (nbytes,), for_weights=for_weights)
        return Term(name, operation, (numel,), for_weights=for_weights)

    def autocast_numel(self, numel: int) -> int:
        """Returns how many of a product's `numel` inputs autocast has to cast for it.

        There are none if compiled: the norm before the product then writes bf16 itself.
        """
        return numel if self.casts and not self.is_compiled else 0

    def product(self, name: str, layout: str, sizes: tuple[int, int, int], **fields: Any) -> Term:
        """Returns a product of these M, N and K; compiled, with padded widths."""
        term = Term(name, f"matmul {layout} {self.dtype}", sizes, **fields)
        return padded(term) if self.is_compiled else term

    def linear_forward(self, name: str, m: int, n: int, k: int, cast_numel: int) -> Iterator[Term]:
        """Yields the product of inputs (M, K) and a weight (N, K), and the casts before it.

        `cast_numel` input values are cast to bf16 first.
        """
        if self.casts:
            yield self.cast(f"{name}.cast_weight", "cast fp32 bf16", n * k)
        if cast_numel:
            yield Term(f"{name}.cast_input", "cast fp32 bf16", (cast_numel,))
        yield self.product(name, "nt", (m, n, k))

    def linear_backward(self, name: str, m: int, n: int, k: int, cast_numel: int) -> Iterator[Term]:
        """Yields the products for the input's and the weight's gradient, and the casts after them."""
        yield self.product(f"{name}.input_gradient", "nn", (m, k, n))
        product = self.product(f"{name}.weight_gradient", "tn", (n, k, m), for_weights=True)
        if self.casts:
            yield product
            cast = self.cast(f"{name}.cast_gradient", "cast bf16 fp32", n * k, for_weights=True)
            yield dataclasses.replace(cast, gradient=n * k)
        else:
            yield dataclasses.replace(product, gradient=n * k)
        if cast_numel:
            yield Term(f"{name}.cast_input_gradient", "cast bf16 fp32", (cast_numel,))

    def gradients_added(self, numel: int, passes: int, *, tensors: int) -> Iterator[Term]:
        """Yields the addition of gradients to those of earlier passes: `numel` values in `tensors`.

        The first of `passes` adds nothing. Each pass gets the mean over all passes.
        """
        if passes > 1 and numel:
            dtype = "fp32" if self.weight_bytes == 4 else "bf16"
            count = max(1, tensors)  # a stage may have a norm only, which is no matrix
            each = numel * (passes - 1) / passes / count
            nbytes = 3 * self.weight_bytes * each
            operation = f"gradient sum {dtype}"
            yield Term("gradients.add", operation, (each,), count, nbytes=nbytes, for_weights=True)

    def norm(
        self, name: str, direction: str, kind: str, m: int, d: int, *, sums: bool = True
    ) -> Iterator[Term]:
        """Yields a norm over (M, D).

        This package's Triton kernel makes one pass over memory. Compiled, the norm also adds up the
        residual sum before it if it `sums`.
        """
        residual, activation = self.residual_bytes, self.activation_bytes
        is_backward = direction == "backward"
        gradient = NORMS[kind].parameters * d if is_backward else 0
        if kind == "triton":
            value_bytes = 3 * residual + activation if is_backward else residual + 2
            yield Term(name, TRAFFIC, (m * d * value_bytes,), gradient=gradient)
        elif self.is_compiled:
            value_bytes, timed = self._compiled_norm(direction, sums=sums)
            sizes = m, d
            term = self.timed_pass(
                name, f"norm {direction}", sizes, m * d * value_bytes, timed_bytes=m * d * timed
            )
            yield dataclasses.replace(term, gradient=gradient)
        else:
            dtype = "bf16" if residual == 2 else "fp32"
            yield Term(name, f"{kind} {direction} {dtype}", (m, d), gradient=gradient)

    def _compiled_norm(self, direction: str, *, sums: bool) -> tuple[int, int]:
        """Returns the bytes per value that a compiled norm moves, and those of the timed one.

        Forward reads the stream and writes the norm; for the sum, it reads a branch and writes the stream.
        """
        residual, activation = self.residual_bytes, self.activation_bytes
        if direction == "backward":
            return 3 * residual + activation, 3 * 4 + 2
        return (2 if sums else 1) * (residual + activation), 2 * (4 + 2)
