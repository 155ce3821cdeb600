"""The operations of a training step on one rank, phase by phase: what eager PyTorch runs, and what
torch.compile leaves of it.

Products, attention and the optimizer are the same for both. Elementwise operations are counted by
the bytes that they read and write; compiled, neighbours are one pass over memory. A rank of a
tensor axis has its part of each layer, and the collectives that the table of spec/plan gives its
modules, one after another with the rest; a stage of a pipeline has its blocks.

Legend: M tokens, D model width, F feed-forward width, V vocabulary, H heads times batch, T
sequence, W width of a head, N ranks of the tensor axis.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

from stepgauge.cost.operations.elementwise import Elementwise
from stepgauge.cost.operations.fused_loss import fused_backward, fused_forward
from stepgauge.cost.operations.head_exchange import HeadExchanges
from stepgauge.cost.operations.rank_sizes import NetworkPart, ShareSizes
from stepgauge.cost.operations.ring_attention import RING, Ring
from stepgauge.cost.operations.supported import CALIBRATED, RECOMPUTED, require_priced
from stepgauge.cost.operations.tensor_overlap import beside_products
from stepgauge.cost.operations.terms import TRAFFIC, Arithmetic, Term, strided_copy
from stepgauge.cost.streams.program import LaunchGroup, Launching
from stepgauge.spec.fused_loss import torch_computes
from stepgauge.spec.model_fields import NORM_PARAMETERS, NORMS
from stepgauge.spec.plan.tensor import KINDS, Rule, overlaps
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import WorkSpec


class StepOperations(ShareSizes):
    """The terms of forward, backward and optimizer of a rank's share. Raises ValueError for a step
    that has parts whose cost is not modelled.
    """

    def __init__(self, spec: WorkSpec, share: NetworkPart | None = None):
        self.spec = spec
        super().__init__(require_priced(spec), share or NetworkPart(batch=spec.batch))
        is_compiled = spec.compile != "off"
        self.how = Arithmetic.of(
            spec.precision, is_compiled=is_compiled, gathered=self.share.gathered
        )
        stream = self.tokens * self.model.d_model * self.how.activation
        self.overlapped = self.share.overlap and overlaps(stream, self.share.tensor)
        self._elementwise = Elementwise(
            self.model,
            self.how,
            self.tokens,
            self.rotated_width,
            self.qkv_rows - self.rotated_width,
        )
        self._table = table_of(self.model, self.blocks) if self.share.tensor > 1 else {}
        self.paces: Mapping[tuple[str, bool], float] = {}  # by phase, of blocks and of the rest

    @property
    def stream_bytes(self) -> float:
        """The residual stream as it enters a block: M D R of this rank's tokens."""
        return self.own_tokens * self.model.d_model * self.how.residual

    def launched(self, phase: str) -> float:
        """Blocks that the host launches in a phase."""
        return len(self.blocks)

    def forward(self) -> Iterator[Term]:
        """Blocks as one, with their count."""
        before, block, after = self.forward_parts()
        yield from before
        yield from self._counted(block)
        yield from after

    def backward(self) -> Iterator[Term]:
        before, block, after = self.backward_parts()
        yield from before
        yield from self._counted(block)
        yield from after

    def _counted(self, block: list[Term]) -> Iterator[Term]:
        for term in block:
            yield dataclasses.replace(term, count=term.count * len(self.blocks))

    def forward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        """Of the embedding, of one block, of the head; none where the stage has not got it."""
        before = self._embedding_forward() if self.is_first else ()
        after = self._head_forward() if self.is_last else ()
        return self._at_pace("forward", before, self._block_forward(), after)

    def backward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        """Of the head, of one block, of the embedding. What checkpointing computes again stands
        before its block's backward.
        """
        first = self._head_backward() if self.is_last else ()
        last = self._embedding_backward() if self.is_first else ()
        parts = first, itertools.chain(self._recomputed(), self._block_backward()), last
        before, block, after = self._at_pace("backward", *parts)
        block += self._added(self.block_parameters)
        (after if self.is_first else before).extend(self._added(self.end_parameters))
        return before, block, after

    def _at_pace(
        self, phase: str, before: Iterable[Term], block: Iterable[Term], after: Iterable[Term]
    ) -> tuple[list[Term], list[Term], list[Term]]:
        """The terms, at the pace of blocks and of the rest where these were timed whole."""
        of_block = self.paces.get((phase, True), 1.0)
        of_ends = self.paces.get((phase, False), 1.0)
        return _paced(before, of_ends), _paced(block, of_block), _paced(after, of_ends)

    def groups(self, phase: str, host: Launching) -> Iterator[LaunchGroup]:
        """In the order in which they are computed."""
        is_forward = phase == "forward"
        before, block, after = self.forward_parts() if is_forward else self.backward_parts()
        numbers = list(self.blocks if is_forward else reversed(self.blocks))
        first, last = ("embedding", "head") if is_forward else ("head", "embedding")
        outside = host.us(len(numbers)) - host.block_us * len(numbers)
        yield LaunchGroup(first, before, max(0.0, outside))
        for number in numbers:
            yield LaunchGroup(f"blocks.{number}", block, host.block_us, one_by_one=True)
        yield LaunchGroup(last, after, 0.0)

    def optimizer(self, numel: float) -> Term:
        """Of so many parameters."""
        if self.spec.optimizer not in CALIBRATED:
            raise ValueError(f"optimizer is {self.spec.optimizer!r}; its cost is not calibrated")
        pace = self.paces.get(("optimizer", False), 1.0)
        if self.spec.precision == "bf16-master":  # read g, master, m, v; write the last three and p
            return Term(
                "optimizer", "optimizer fused master", (numel,), nbytes=28 * numel, pace=pace
            )
        kind = "bf16" if self.how.weight == 2 else "fp32"
        return Term("optimizer", f"optimizer {self.spec.optimizer} {kind}", (numel,), pace=pace)

    # Forward

    def _embedding_forward(self) -> Iterator[Term]:
        m, d = self.tokens, self.model.d_model
        times = 2 + 2 * self.model.scaled_embedding + 2 * (self.model.positions == "learned")
        yield Term("embedding", TRAFFIC, (m * d * times * self.how.residual,))
        yield from self._exchange("embedding", "forward", self.how.residual)

    def _head_forward(self) -> Iterator[Term]:
        d, v = self.model.d_model, self.model.vocab_size // self.share.tensor
        yield from self._norm("head.norm", "forward", "norm")
        yield from self._exchange("head", "forward")
        if self._fuses_loss:
            yield from fused_forward(self.how, self.tokens, v, d, self.spec.device)
            return
        yield from self.how.linear_forward(
            "head", self.tokens, v, d, self.how.narrowed(self.own_tokens * d)
        )
        yield from self._loss_forward(v)

    def _block_forward(self) -> Iterator[Term]:
        model, how, n = self.model, self.how, self.share.tensor
        m, own = self.tokens, self.own_tokens
        d, f, width = model.d_model, model.d_ff // n, model.num_heads * model.head_width // n
        inputs, up = self.qkv_rows, (2 if model.is_gated else 1) * f
        yield from self._norm("attention.norm", "forward", "attention_norm")
        yield from self._exchange("attention.input", "forward", weight=(inputs, d))
        yield from how.linear_forward("attention.input", m, inputs, d, how.narrowed(own * d))
        if model.qk_norm:
            heads = self.rotated_width // model.head_width
            yield from how.norm(
                "attention.qk_norm", "forward", model.norm, m * heads, model.head_width
            )
        if model.positions == "rope":
            yield from self._elementwise.rotation()
        yield from self._attention("forward")
        yield from how.linear_forward("attention.output", m, d, width, 0)
        yield from self._exchange("attention.output", "forward", weight=(d, width))
        yield from self._elementwise.residual(own * d)
        yield from self._norm("feed_forward.norm", "forward", "feed_forward_norm")
        yield from self._exchange(self._up, "forward", weight=(up, d))
        yield from how.linear_forward("feed_forward.up", m, up, d, how.narrowed(own * d))
        yield from self._elementwise.gate(self._gate, "forward", f)
        yield from how.linear_forward("feed_forward.down", m, d, f, 0)
        yield from self._exchange("feed_forward.down", "forward", weight=(d, f))
        yield from self._elementwise.residual(own * d)

    def _loss_forward(self, v: int) -> Iterator[Term]:
        m = self.tokens
        if self.share.tensor > 1:  # by parts of the vocabulary: parallel/tensor_parallel/layers.py
            yield Term("loss.parts", TRAFFIC, (m * v * (12 * 4 + 2 * self.how.activation),))
            yield Term("loss.highest", "all_reduce", (m * 4,), axis="tensor")
            yield Term("loss.sums", "all_reduce", (m * 8,), axis="tensor")
        elif self.how.is_compiled:
            yield Term("loss", TRAFFIC, (m * v * 2 * self.how.activation,))
        else:
            if self.how.activation == 2:
                yield Term("loss.cast", "cast bf16 fp32", (m * v,))
            yield Term("loss", "cross-entropy forward", (m, v))

    # Backward

    def _recomputed(self) -> Iterator[Term]:
        """What of a block's forward is computed again, with its collectives."""
        spec = self.spec
        is_one_call = spec.checkpointing == "blocks" and spec.compile == "blocks"
        is_alone = spec.checkpoint_blocks == 1 or spec.checkpointing == "feed-forward"
        stops = is_alone and not is_one_call and spec.checkpointing != "nested"
        for _ in range(RECOMPUTED[spec.checkpointing]):
            for term in self._block_forward():
                if stops and term.name == "feed_forward.down":
                    return  # no backward needs the block's output: torch stops before it
                if not self._is_kept(term):
                    yield dataclasses.replace(term, name=f"recomputed.{term.name}")

    def _is_kept(self, term: Term) -> bool:
        """Whether checkpointing keeps the result: of products, of attention and of what is sent but
        for gathers before products (models/checkpointing.py).
        """
        kept = {"selective": "", "feed-forward": "attention"}.get(self.spec.checkpointing)
        if kept is None or not term.name.startswith(kept):
            return False
        gathers = term.operation == "all_gather" and not self.overlapped
        is_sent = bool(term.axis) and not gathers
        return term.is_product or is_sent or term.name.startswith(RING)

    def _head_backward(self) -> Iterator[Term]:
        d, v = self.model.d_model, self.model.vocab_size // self.share.tensor
        if self._fuses_loss:
            yield from fused_backward(v, d)
        else:
            yield from self._loss_backward(v)
            yield from self.how.linear_backward(
                "head", self.tokens, v, d, self.how.narrowed(self.own_tokens * d)
            )
        yield from self._exchange("head", "backward")
        yield from self._norm("head.norm", "backward", "norm")

    def _embedding_backward(self) -> Iterator[Term]:
        """The gradient cleared, and the tokens' sums added to it."""
        d, r = self.model.d_model, self.how.residual
        weights = self.model.vocab_size * d // self.share.tensor
        yield from self._exchange("blocks.0", "backward", r)
        yield Term("embedding.clear", TRAFFIC, (weights * r,), weights=True)
        added = 2 * self.tokens * d * r
        if self.how.is_compiled:
            yield Term("embedding", TRAFFIC, (added,), gradient=weights, weights=True)
        else:
            yield Term("embedding", "embedding backward", (self.tokens, d), gradient=weights,
                       weights=True, nbytes=added)  # fmt: skip

    def _block_backward(self) -> Iterator[Term]:
        model, how, n = self.model, self.how, self.share.tensor
        m, own, a, r = self.tokens, self.own_tokens, how.activation, how.residual
        d, f, width = model.d_model, model.d_ff // n, model.num_heads * model.head_width // n
        if how.casts and not how.is_compiled:  # the branch's gradient, of both residual sums
            yield Term("residual.cast", "cast fp32 bf16", (own * d,), 2)
        yield from self._exchange("feed_forward.down", "backward", weight=(d, f))
        yield from how.linear_backward("feed_forward.down", m, d, f, 0)
        yield from self._elementwise.gate(self._gate, "backward", f)
        up = (2 if model.is_gated else 1) * f
        yield from how.linear_backward("feed_forward.up", m, up, d, how.narrowed(own * d))
        yield from self._exchange(self._up, "backward", weight=(up, d))
        yield from self._norm("feed_forward.norm", "backward", "feed_forward_norm")
        yield from how.passes("residual", own * d * r, eager=3, compiled=0)
        yield from self._exchange("attention.output", "backward", weight=(d, width))
        yield from how.linear_backward("attention.output", m, d, width, 0)
        yield from self._attention("backward")
        yield from self._elementwise.heads_backward()
        if model.qk_norm and n > 1:  # each rank has found a part, of its heads
            nbytes = NORM_PARAMETERS[NORMS[model.norm]] * model.head_width * how.weight
            yield Term("attention.qk_norm.sum", "all_reduce", (nbytes,), 2, axis="tensor")
        yield from how.linear_backward(
            "attention.input", m, self.qkv_rows, d, how.narrowed(own * d)
        )
        if biases := self.biases:  # sums over the tokens
            yield Term("biases", TRAFFIC, (m * biases * a,), weights=True)
        yield from self._exchange("attention.input", "backward", weight=(self.qkv_rows, d))
        yield from self._norm("attention.norm", "backward", "attention_norm")
        yield from how.passes("residual", own * d * r, eager=3, compiled=0)

    def _loss_backward(self, v: int) -> Iterator[Term]:
        m = self.tokens
        if self.share.tensor > 1:
            yield Term("loss.parts", TRAFFIC, (m * v * 4 * self.how.activation,))
        elif self.how.is_compiled:
            yield Term("loss", TRAFFIC, (m * v * 2 * self.how.activation,))
        else:
            yield Term("loss", "cross-entropy backward", (m, v))
            if self.how.activation == 2:
                yield Term("loss.cast", "cast fp32 bf16", (m * v,))

    def _added(self, numel: int) -> Iterator[Term]:
        """ZeRO 3 adds shares of gradients alone."""
        if not self.share.gathered:
            yield from self.how.gradients_added(numel, self.share.passes)

    # Both

    @property
    def _fuses_loss(self) -> bool:
        """Ranks that share the vocabulary fuse it by parts, which are priced as parts."""
        is_fused = self.model.loss == "fused" and self.share.tensor == 1
        return is_fused and not self.loss_by_torch

    @property
    def compiles_loss(self) -> bool:
        """Whether the loss is in the graph that is compiled."""
        return self.spec.compile not in ("off", "blocks")

    @property
    def loss_by_torch(self) -> bool:
        """Whether torch computes a fused loss, as the kernels hand small ones over."""
        if not (self.spec.precision.startswith("bf16") and self.spec.device.startswith("cuda")):
            return False
        model, is_compiled = self.model, self.how.is_compiled
        size = self.tokens, model.d_model, model.vocab_size
        return self.share.tensor == 1 and torch_computes(*size, compiled=is_compiled)

    @property
    def _up(self) -> str:
        return "feed_forward.gate_up" if self.model.is_gated else "feed_forward.up"

    @property
    def _gate(self) -> str:
        return "feed_forward.gate" if self.model.is_gated else "feed_forward.gelu"

    def _attention(self, direction: str) -> Iterator[Term]:
        model = self.model
        kind = "bf16" if self.how.activation == 2 else "fp32"
        heads = self.share.batch * model.num_heads // self.share.tensor
        sizes = (heads, self.length, model.head_width)
        own = Term("attention", f"attention {model.attention} {direction} {kind}", sizes)
        if self.share.context == 1:
            yield own
            return
        queries = self.tokens * heads // self.share.batch * model.head_width
        keys = self.tokens * self.qkv_rows - queries
        key_heads = max(1, model.kv_heads // self.share.tensor)  # neighbours may have the same one
        if self.share.ulysses:
            whole = (heads // self.share.context, model.context_length, model.head_width)
            exchange = HeadExchanges(
                self.share.context, queries, keys, self.how.activation, key_heads
            )
            yield from exchange.terms(dataclasses.replace(own, sizes=whole))
            return
        ring = Ring(self.share.context, queries, keys, self.how.activation, key_heads)
        yield from ring.forward(own) if direction == "forward" else ring.backward(own)

    def _norm(self, name: str, direction: str, module: str) -> Iterator[Term]:
        d, parameters = self.model.d_model, self.norm_parameters
        yield from self.how.norm(name, direction, self.model.norm, self.own_tokens, d)
        rule = self._rule(module)
        if direction == "backward" and rule and KINDS[rule.kind].sums:
            nbytes = parameters * self.how.weight
            yield Term(f"{name}.sum", "all_reduce", (nbytes,), axis="tensor")

    def _rule(self, module: str) -> Rule | None:
        return self._table.get(module) or self._table.get(f"blocks.*.{module}")

    def _exchange(
        self, module: str, phase: str, itemsize: int = 0, weight: tuple[int, int] | None = None
    ) -> Iterator[Term]:
        """A module's collectives: beside products, of a weight (outputs, inputs), or with copies."""
        rule = self._rule(module)
        nbytes = self.tokens * self.model.d_model * (itemsize or self.how.activation)
        for operation in getattr(KINDS[rule.kind], phase) if rule else ():
            name = f"{module}.{operation}"
            term = Term(name, operation.replace("-", "_"), (nbytes,), axis="tensor")
            if weight and self.overlapped:
                share = self.tokens, self.share.tensor
                yield from beside_products(term, phase, weight, *share, self.how)
            else:
                yield from self._transposed(module, operation)
                yield term

    def _transposed(self, module: str, operation: str) -> Iterator[Term]:
        """Ranks exchange whole positions of all sequences: what is sent is copied to that order,
        and a product copies what was gathered from it (residual_stream.py of parallel/).
        """
        if self.share.batch == 1:
            return
        whole, piece = self.tokens * self.model.d_model, self.own_tokens * self.model.d_model
        copied = {"all-gather": (piece, whole), "reduce-scatter": (whole,)}
        for numel in copied.get(operation, ()):
            copy = strided_copy(f"{module}.transpose", numel)
            plain = Term(copy.name, TRAFFIC, (2 * self.how.activation * numel,))
            yield plain if self.how.is_compiled else copy


def _paced(terms: Iterable[Term], pace: float) -> list[Term]:
    if pace == 1:
        return list(terms)
    return [dataclasses.replace(term, pace=pace) for term in terms]
