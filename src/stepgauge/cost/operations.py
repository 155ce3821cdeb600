"""The operations of a training step, phase by phase, from its spec: what eager PyTorch runs, and
what torch.compile leaves of it.

Products, attention and the optimizer are the same for both. Elementwise operations are counted by
the bytes that they read and write; compiled, neighbours are one pass over memory.

Legend: M tokens, D model width, F feed-forward width, V vocabulary, H heads times batch, T
sequence, W width of a head.
"""

import dataclasses
from collections.abc import Iterator

from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

TRAFFIC = "traffic"
# Fields of a ModelSpec beside its shape that the terms know, or that cost nothing.
PRICED = "feed_forward norm norm_epsilon positions rope_base tied_head attention loss"
# Arithmetic of products, bytes of an activation, and bytes of the residual stream and weights.
PRECISION: dict[str, tuple[str, int, int]] = {
    "fp32": ("fp32", 4, 4),
    "tf32": ("tf32", 4, 4),
    "bf16": ("bf16", 2, 4),
    "fp16": ("bf16", 2, 4),  # the same rate as bf16
    "bf16-pure": ("bf16", 2, 2),
}


@dataclasses.dataclass(frozen=True)
class Term:
    """`count` runs of an operation at its sizes; for TRAFFIC the one size is bytes.

    gradient  elements of a weight's gradient that is complete after it; 0: of none
    """

    name: str
    operation: str
    sizes: tuple[float, ...]
    count: int = 1
    gradient: int = 0


class StepOperations:
    """The terms of forward, backward and optimizer. Raises ValueError for a step that has parts
    whose cost is not modelled.
    """

    def __init__(self, spec: WorkSpec):
        if spec.checkpointing != "none":
            raise ValueError(
                f"checkpointing is {spec.checkpointing!r}; only steps without it are predicted yet"
            )
        model = spec.model
        if spec.compile not in ("off", "on", "blocks"):
            raise ValueError(f"compile is {spec.compile!r}; only off, on and blocks are predicted")
        if not isinstance(model, ModelSpec):
            raise ValueError("a user's own model has no cost model yet; only presets are predicted")
        model.require_defaults(PRICED, "has no cost model yet")
        if model.feed_forward not in ("swiglu", "gelu"):
            raise ValueError(f"feed_forward is {model.feed_forward!r}; its cost is not calibrated")
        if model.norm not in ("rmsnorm", "layernorm", "triton"):
            raise ValueError(f"norm is {model.norm!r}; its cost is not calibrated")
        if model.attention not in ("sdpa", "triton"):
            raise ValueError(f"attention is {model.attention!r}; its cost is not calibrated")
        self.spec = spec
        self.model: ModelSpec = model
        self.is_compiled = spec.compile != "off"
        self.type, self.activation, self.residual = PRECISION[spec.precision]
        self.casts = self.activation < self.residual  # autocast
        self.tokens = spec.batch * model.context_length

    def phases(self) -> dict[str, list[Term]]:
        """What the spec's phases run, in order."""
        phases = {"forward": list(self._forward())}
        if self.spec.phases != "forward":
            phases["backward"] = list(self._backward())
        if self.spec.phases == "step":
            phases["optimizer"] = [self._optimizer()]
        return phases

    def backward_order(self) -> Iterator[tuple[str, Term]]:
        """Backward's terms one by one, each with a name of its own."""
        before, blocks, after = self._backward_parts()
        for term in before:
            yield term.name, term
        for number in reversed(range(self.model.num_layers)):
            for term in blocks:
                yield f"blocks.{number}.{term.name}", term
        for term in after:
            yield term.name, term

    # Forward

    def _forward(self) -> Iterator[Term]:
        model, m, d = self.model, self.tokens, self.model.d_model
        yield Term("embedding", TRAFFIC, (m * d * 2 * self.residual,))
        for term in self._block_forward():
            yield dataclasses.replace(term, count=term.count * model.num_layers)
        yield from self._norm("head.norm", "forward")
        yield from self._linear_forward("head", model.vocab_size, d, self._narrowed(d))
        yield from self._loss_forward()

    def _block_forward(self) -> Iterator[Term]:
        model, m, a, r = self.model, self.tokens, self.activation, self.residual
        d, f = model.d_model, model.d_ff
        gated = model.feed_forward == "swiglu"
        yield from self._norm("attention.norm", "forward")
        yield from self._linear_forward("attention.input", 3 * d, d, self._narrowed(d))
        if model.positions == "rope":
            yield from self._passes("attention.rotation", 2 * m * d * a, eager=7, compiled=2)
        yield self._attention("forward")
        yield from self._linear_forward("attention.output", d, d, 0)
        yield from self._passes("residual", m * d, eager=2 * r + a, compiled=2 * r + a)
        yield from self._norm("feed_forward.norm", "forward")
        up = (2 if gated else 1) * f
        yield from self._linear_forward("feed_forward.up", up, d, self._narrowed(d))
        name = "feed_forward.gate" if gated else "feed_forward.gelu"
        yield from self._passes(
            name, m * f * a, eager=5 if gated else 2, compiled=3 if gated else 2
        )
        yield from self._linear_forward("feed_forward.down", d, f, 0)
        yield from self._passes("residual", m * d, eager=2 * r + a, compiled=0)

    def _narrowed(self, width: int) -> int:
        """Values that autocast narrows before a product; compiled, the norm writes them narrow."""
        return self.tokens * width if self.casts and not self.is_compiled else 0

    def _linear_forward(self, name: str, n: int, k: int, narrowed: int) -> Iterator[Term]:
        if self.casts:
            yield self._cast(f"{name}.cast_weight", "cast fp32 bf16", n * k)
        if narrowed:
            yield Term(f"{name}.cast_input", "cast fp32 bf16", (narrowed,))
        yield Term(name, f"matmul nt {self.type}", (self.tokens, n, k))

    def _cast(self, name: str, operation: str, numel: int) -> Term:
        """Compiled, one pass over memory like any other."""
        if self.is_compiled:
            return Term(name, TRAFFIC, (numel * (self.activation + self.residual),))
        return Term(name, operation, (numel,))

    def _loss_forward(self) -> Iterator[Term]:
        m, v = self.tokens, self.model.vocab_size
        if self.is_compiled:
            yield Term("loss", TRAFFIC, (m * v * 2 * self.activation,))
            return
        if self.activation == 2:
            yield Term("loss.cast", "cast bf16 fp32", (m * v,))
        yield Term("loss", "cross-entropy forward", (m, v))

    # Backward

    def _backward(self) -> Iterator[Term]:
        before, blocks, after = self._backward_parts()
        yield from before
        for term in blocks:
            yield dataclasses.replace(term, count=term.count * self.model.num_layers)
        yield from after

    def _backward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        """Of the head, of one block, of the embedding."""
        model, m, d = self.model, self.tokens, self.model.d_model
        head = [
            *self._loss_backward(),
            *self._linear_backward("head", model.vocab_size, d, self._narrowed(d)),
            *self._norm("head.norm", "backward"),
        ]
        weights = model.vocab_size * d
        nbytes = weights * 4 + m * d * 2 * self.residual
        embedding = Term("embedding", TRAFFIC, (nbytes,), gradient=weights)
        return head, list(self._block_backward()), [embedding]

    def _block_backward(self) -> Iterator[Term]:
        model, m, a, r = self.model, self.tokens, self.activation, self.residual
        d, f = model.d_model, model.d_ff
        gated = model.feed_forward == "swiglu"
        if self.casts and not self.is_compiled:  # the branch's gradient, of both residual sums
            yield Term("residual.cast", "cast fp32 bf16", (m * d,), 2)
        yield from self._linear_backward("feed_forward.down", d, f, 0)
        name = "feed_forward.gate" if gated else "feed_forward.gelu"
        yield from self._passes(
            name, m * f * a, eager=13 if gated else 3, compiled=6 if gated else 4
        )
        up = (2 if gated else 1) * f
        yield from self._linear_backward("feed_forward.up", up, d, self._narrowed(d))
        yield from self._norm("feed_forward.norm", "backward")
        yield from self._passes("residual", m * d * r, eager=3, compiled=0)
        yield from self._linear_backward("attention.output", d, d, 0)
        yield self._attention("backward")
        if model.positions == "rope":
            yield from self._passes("attention.rotation", 2 * m * d * a, eager=9, compiled=2)
        yield from self._passes("attention.split", m * d * a, eager=10, compiled=2)
        yield from self._linear_backward("attention.input", 3 * d, d, self._narrowed(d))
        yield from self._norm("attention.norm", "backward")
        yield from self._passes("residual", m * d * r, eager=3, compiled=0)

    def _linear_backward(self, name: str, n: int, k: int, narrowed: int) -> Iterator[Term]:
        m = self.tokens
        yield Term(f"{name}.input_gradient", f"matmul nn {self.type}", (m, k, n))
        product = Term(f"{name}.weight_gradient", f"matmul tn {self.type}", (n, k, m))
        if not self.casts:
            yield dataclasses.replace(product, gradient=n * k)
        else:
            yield product
            cast = self._cast(f"{name}.cast_gradient", "cast bf16 fp32", n * k)
            yield dataclasses.replace(cast, gradient=n * k)
        if narrowed:
            yield Term(f"{name}.cast_input_gradient", "cast bf16 fp32", (narrowed,))

    def _loss_backward(self) -> Iterator[Term]:
        m, v = self.tokens, self.model.vocab_size
        if self.is_compiled:
            yield Term("loss", TRAFFIC, (m * v * 2 * self.activation,))
            return
        yield Term("loss", "cross-entropy backward", (m, v))
        if self.activation == 2:
            yield Term("loss.cast", "cast fp32 bf16", (m * v,))

    # Both

    def _attention(self, direction: str) -> Term:
        model = self.model
        kind = "bf16" if self.activation == 2 else "fp32"
        sizes = (self.spec.batch * model.num_heads, model.context_length, model.head_width)
        return Term("attention", f"attention {model.attention} {direction} {kind}", sizes)

    def _norm(self, name: str, direction: str) -> Iterator[Term]:
        m, d, r = self.tokens, self.model.d_model, self.residual
        if self.is_compiled or self.model.norm == "triton":
            reads = 2 * r + self.activation if direction == "backward" else r
            yield Term(name, TRAFFIC, (m * d * (reads + (r if direction == "backward" else 2)),))
            return
        kind = "bf16" if r == 2 else "fp32"
        yield Term(name, f"{self.model.norm} {direction} {kind}", (m, d))

    def _passes(self, name: str, nbytes: float, *, eager: float, compiled: float) -> Iterator[Term]:
        """`eager` or `compiled` times so many bytes."""
        times = compiled if self.is_compiled else eager
        if times:
            yield Term(name, TRAFFIC, (nbytes * times,))

    def _optimizer(self) -> Term:
        numel = self.model.num_parameters
        if self.spec.optimizer not in ("adamw", "fused"):
            raise ValueError(f"optimizer is {self.spec.optimizer!r}; its cost is not calibrated")
        kind = "bf16" if self.residual == 2 else "fp32"
        return Term("optimizer", f"optimizer {self.spec.optimizer} {kind}", (numel,))
