"""The operations of a training step on one rank, phase by phase, for eager and compiled networks.

Products, attention and the optimizer are the same in both. Elementwise operations are priced by the
bytes that they read and write; compiled, neighbours are fused into one pass over memory. A
tensor-parallel rank has its part of each layer and the collectives that the table in spec/plan lists
for its modules. A pipeline stage has its blocks.

Legend: M tokens, D model width, F feed-forward width, V vocabulary, N ranks of the tensor axis.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stepgauge.cost.operations.cross_entropy import CrossEntropy
from stepgauge.cost.operations.elementwise import Elementwise
from stepgauge.cost.operations.fused_loss import FusedLoss, PartOfFusedLoss
from stepgauge.cost.operations.gradient_sums import (
    HEAD_NORMS,
    ROW_BIASES,
    SHARED_KEYS,
    GradientSums,
    gradient_sums_of,
)
from stepgauge.cost.operations.head_exchange import HeadExchanges
from stepgauge.cost.operations.rank_sizes import NetworkPart, ShareSizes
from stepgauge.cost.operations.ring_attention import RING, Ring
from stepgauge.cost.operations.supported import CALIBRATED, RECOMPUTED, require_priced
from stepgauge.cost.operations.tensor_overlap import OverlappedLayer
from stepgauge.cost.operations.terms import AUTOCAST, TRAFFIC, Arithmetic, Term
from stepgauge.cost.operations.vocabulary_loss import (
    vocabulary_loss_backward,
    vocabulary_loss_forward,
)
from stepgauge.cost.streams.program import LaunchCost, LaunchGroup
from stepgauge.spec.fused_loss import torch_computes
from stepgauge.spec.plan.tensor import KINDS, Rule, overlaps
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import WorkSpec


class StepOperations(ShareSizes):
    """The terms of forward, backward and optimizer of a rank's share, by formula.

    Raises ValueError if a part of the step has no cost model.
    """

    def __init__(self, spec: WorkSpec, share: NetworkPart | None = None):
        self.spec = spec
        super().__init__(require_priced(spec), share or NetworkPart(batch=spec.batch))
        is_compiled = spec.compile != "off"
        self.arithmetic = Arithmetic.of(
            spec.precision, is_compiled=is_compiled, gathered=self.share.gathered
        )
        self.end_arithmetic = dataclasses.replace(self.arithmetic, is_compiled=self.compiles_ends)
        stream = self.tokens * self.model.d_model * self.arithmetic.activation_bytes
        part = self.share
        self.overlapped = part.overlap and overlaps(stream, part.tensor, replayed=part.replayed)
        self._elementwise = Elementwise(
            self.model,
            self.arithmetic,
            self.tokens,
            self.rotated_width,
            self.qkv_rows - self.rotated_width,
        )
        self._table = table_of(self.model, self.blocks) if self.share.tensor > 1 else {}
        # By phase, of blocks (True) and of everything else (False); see cost/timed_blocks.py.
        self.paces: Mapping[tuple[str, bool], float] = {}

    @property
    def stream_bytes(self) -> float:
        """Bytes of the residual stream between blocks, for this rank's tokens."""
        return self.own_tokens * self.model.d_model * self.arithmetic.residual_bytes

    def launched(self, phase: str) -> float:
        """The number of blocks that the host launches in a phase."""
        return len(self.blocks)

    def forward(self) -> Iterator[Term]:
        """Yields the terms of forward. A block's terms appear once, with their count in all blocks."""
        return self._counted(*self.forward_parts())

    def backward(self) -> Iterator[Term]:
        """Yields the terms of backward, counted like those of forward."""
        return self._counted(*self.backward_parts())

    def _counted(self, before: list[Term], block: list[Term], after: list[Term]) -> Iterator[Term]:
        yield from before
        for term in block:
            yield dataclasses.replace(term, count=term.count * len(self.blocks))
        yield from after

    def forward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        """Returns the terms of embedding, one block, and head. A stage without one has [] there."""
        before = self._embedding_forward() if self.is_first else ()
        after = self._head_forward() if self.is_last else ()
        return self._at_pace("forward", before, self._block_forward(), after)

    def backward_parts(self) -> tuple[list[Term], list[Term], list[Term]]:
        """Returns the terms of head, one block, and embedding.

        The block begins with what checkpointing recomputes.
        """
        first = self._head_backward() if self.is_last else ()
        last = self._embedding_backward() if self.is_first else ()
        parts = first, itertools.chain(self._recomputed(), self._block_backward()), last
        before, block, after = self._at_pace("backward", *parts)
        after += self._gradient_sums.at_end(len(self.blocks), is_last=self.is_last)
        block += self._added(self.block_parameters, self.block_matrices)
        ends = self._added(self.end_parameters, self.end_matrices)
        (after if self.is_first else before).extend(ends)
        return before, block, after

    def _at_pace(
        self, phase: str, before: Iterable[Term], block: Iterable[Term], after: Iterable[Term]
    ) -> tuple[list[Term], list[Term], list[Term]]:
        """Sets the paces of the terms, which differ from 1 if whole blocks were timed."""
        block_pace = self.paces.get((phase, True), 1.0)
        end_pace = self.paces.get((phase, False), 1.0)
        return _paced(before, end_pace), _paced(block, block_pace), _paced(after, end_pace)

    def groups(self, phase: str, host: LaunchCost) -> Iterator[LaunchGroup]:
        """Yields embedding, blocks and head in the order in which they are computed."""
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
        """Returns the update of `numel` parameters."""
        if self.spec.optimizer not in CALIBRATED:
            raise ValueError(f"optimizer is {self.spec.optimizer!r}; its cost is not calibrated")
        pace = self.paces.get(("optimizer", False), 1.0)
        # bf16-master reads g, master weights, m and v, and writes the last three and p: 28 bytes
        if self.spec.precision == "bf16-master":
            return Term(
                "optimizer", "optimizer fused master", (numel,), nbytes=28 * numel, pace=pace
            )
        dtype = "bf16" if self.arithmetic.weight_bytes == 2 else "fp32"
        return Term("optimizer", f"optimizer {self.spec.optimizer} {dtype}", (numel,), pace=pace)

    # Forward

    def _embedding_forward(self) -> Iterator[Term]:
        m, d = self.tokens, self.model.d_model
        times = 2 + 2 * self.model.scaled_embedding + 2 * (self.model.positions == "learned")
        yield Term("embedding", TRAFFIC, (m * d * times * self.arithmetic.residual_bytes,))
        yield from self._collectives("embedding", "forward", self.arithmetic.residual_bytes)

    def _head_forward(self) -> Iterator[Term]:
        yield from self._norm("head.norm", "forward", "norm")
        yield from self._collectives("head", "forward")
        if fused := self.fused_loss:
            yield from fused.forward()
            return
        yield from self.end_arithmetic.linear_forward(*self._head)
        yield from self._loss_forward(self.words)

    def _block_forward(self) -> Iterator[Term]:
        model, arithmetic, m = self.model, self.arithmetic, self.tokens
        d, f, width = model.d_model, self.feed_forward_width, self.attention_width
        qkv, up, stream = self.qkv_rows, self.up_rows, self.own_tokens * model.d_model
        cast = arithmetic.autocast_numel(stream)
        yield from self._norm("attention.norm", "forward", "attention_norm")
        yield from self._collectives("attention.input", "forward", weight=(qkv, d))
        yield from arithmetic.linear_forward("attention.input", m, qkv, d, cast)
        if model.qk_norm:
            heads = self.rotated_width // model.head_width
            yield from arithmetic.norm(
                "attention.qk_norm", "forward", model.norm, m * heads, model.head_width
            )
        if model.positions == "rope":
            yield from self._elementwise.rotation()
        yield from self._attention("forward")
        yield from arithmetic.linear_forward("attention.output", m, d, width, 0)
        yield from self._collectives("attention.output", "forward", weight=(d, width))
        yield from self._elementwise.residual(stream)
        yield from self._norm("feed_forward.norm", "forward", "feed_forward_norm")
        yield from self._collectives(self._up, "forward", weight=(up, d))
        yield from arithmetic.linear_forward("feed_forward.up", m, up, d, cast)
        yield from self._elementwise.gate(self._gate, "forward", f)
        yield from arithmetic.linear_forward("feed_forward.down", m, d, f, 0)
        yield from self._collectives("feed_forward.down", "forward", weight=(d, f))
        yield from self._elementwise.residual(stream, ends_graph=self.spec.compile == "blocks")

    def _loss_forward(self, v: int) -> Iterator[Term]:
        m = self.tokens
        if self.share.tensor > 1:
            yield from vocabulary_loss_forward(m, v, self.end_arithmetic.activation_bytes)
        else:
            yield from self._cross_entropy.forward(m, v)

    # Backward

    def _recomputed(self) -> Iterator[Term]:
        """Yields what backward recomputes of a block's forward, with its collectives."""
        spec = self.spec
        is_one_call = spec.checkpointing == "blocks" and spec.compile == "blocks"
        is_single_block = spec.checkpoint_blocks == 1 or spec.checkpointing == "feed-forward"
        stops_early = is_single_block and not is_one_call and spec.checkpointing != "nested"
        for _ in range(RECOMPUTED[spec.checkpointing]):
            for term in self._block_forward():
                if stops_early and term.name == "feed_forward.down":
                    return  # no backward needs the block's output, so torch stops before it
                if not self._is_kept(term):
                    yield dataclasses.replace(term, name=f"recomputed.{term.name}")

    def _is_kept(self, term: Term) -> bool:
        """True if checkpointing keeps the term's result (models/checkpointing.py).

        It keeps results of products, attention and communication, except all-gathers before products.
        """
        prefix = {"selective": "", "feed-forward": "attention"}.get(self.spec.checkpointing)
        if prefix is None or not term.name.startswith(prefix):
            return False
        is_gather = term.operation == "all_gather" and not self.overlapped
        is_kept_message = bool(term.axis) and not is_gather
        return term.is_product or is_kept_message or term.name.startswith(RING)

    def _head_backward(self) -> Iterator[Term]:
        if fused := self.fused_loss:
            yield from fused.backward()
        else:
            yield from self._loss_backward(self.words)
            yield from self.end_arithmetic.linear_backward(*self._head)
        yield from self._collectives("head", "backward")
        yield from self._norm("head.norm", "backward", "norm")

    def _embedding_backward(self) -> Iterator[Term]:
        """Yields the clearing of the embedding's gradient, and the sums over tokens added to it."""
        d, itemsize = self.model.d_model, self.end_arithmetic.residual_bytes
        numel = self.model.vocab_size * d // self.share.tensor
        yield from self._collectives("blocks.0", "backward", itemsize)
        yield Term("embedding.clear_gradient", TRAFFIC, (numel * itemsize,), for_weights=True)
        nbytes = 2 * self.tokens * d * itemsize
        if self.end_arithmetic.is_compiled:
            yield Term("embedding", TRAFFIC, (nbytes,), gradient=numel, for_weights=True)
        else:
            yield Term("embedding", "embedding backward", (self.tokens, d), gradient=numel,
                       for_weights=True, nbytes=nbytes)  # fmt: skip

    def _block_backward(self) -> Iterator[Term]:
        model, arithmetic, m = self.model, self.arithmetic, self.tokens
        d, f, width = model.d_model, self.feed_forward_width, self.attention_width
        qkv, up, stream = self.qkv_rows, self.up_rows, self.own_tokens * model.d_model
        stream_bytes, cast = stream * arithmetic.residual_bytes, arithmetic.autocast_numel(stream)
        if cast:  # the gradients of both branches that are added to the residual stream
            yield Term("residual.cast_gradient", "cast fp32 bf16", (stream,), 2)
        yield from self._collectives("feed_forward.down", "backward", weight=(d, f))
        yield from arithmetic.linear_backward("feed_forward.down", m, d, f, 0)
        yield from self._elementwise.gate(self._gate, "backward", f)
        yield from arithmetic.linear_backward("feed_forward.up", m, up, d, cast)
        yield from self._collectives(self._up, "backward", weight=(up, d))
        yield from self._norm("feed_forward.norm", "backward", "feed_forward_norm")
        yield from arithmetic.passes("residual", stream_bytes, eager=3, compiled=0)
        yield from self._collectives("attention.output", "backward", weight=(d, width))
        yield from arithmetic.linear_backward("attention.output", m, d, width, 0)
        yield from self._attention("backward")
        yield from self._elementwise.heads_backward()
        yield from self._gradient_sums.during_backward("attention.qk_norm", HEAD_NORMS)
        yield from arithmetic.linear_backward("attention.input", m, qkv, d, cast)
        if biases := self.biases:  # sums over the tokens
            nbytes = m * biases * arithmetic.activation_bytes
            yield Term("biases", TRAFFIC, (nbytes,), for_weights=True)
        yield from self._gradient_sums.during_backward("biases", ROW_BIASES)
        yield from self._gradient_sums.during_backward("attention.input", *SHARED_KEYS)
        yield from self._collectives("attention.input", "backward", weight=(qkv, d))
        yield from self._norm("attention.norm", "backward", "attention_norm")
        yield from arithmetic.passes("residual", stream_bytes, eager=3, compiled=0)

    def _loss_backward(self, v: int) -> Iterator[Term]:
        m = self.tokens
        if self.share.tensor > 1:
            yield from vocabulary_loss_backward(m, v)
        else:
            yield from self._cross_entropy.backward(m, v)

    @property
    def _cross_entropy(self) -> CrossEntropy:
        on_gpu = self.spec.device.startswith("cuda")
        return CrossEntropy(self.end_arithmetic, self.autocasts_loss, on_gpu)

    @property
    def autocasts_loss(self) -> bool:
        """True if autocast computes part of torch's loss in fp32, from logits in 16 bits."""
        return self.spec.precision in AUTOCAST and not self.end_arithmetic.is_compiled

    def _added(self, numel: int, matrices: Sequence[int]) -> Iterator[Term]:
        """Yields the accumulation of gradients; none in ZeRO 3, which accumulates small shards."""
        passes, tensors = self.share.passes, len(matrices)
        if not self.share.gathered:
            yield from self.arithmetic.gradients_added(numel, passes, tensors=tensors)

    # Both

    @property
    def _head(self) -> tuple[str, int, int, int, int]:
        """Name, tokens, outputs, inputs and casts of the head."""
        casts = self.end_arithmetic.autocast_numel(self.own_tokens * self.model.d_model)
        return "head", self.tokens, self.words, self.model.d_model, casts

    @property
    def fused_loss(self) -> FusedLoss | None:
        """The fused head and loss, if the network has it and does not leave small sizes to torch."""
        if self.model.loss != "fused" or self.loss_by_torch:
            return None
        sizes = self.tokens, self.words, self.model.d_model
        how = self.end_arithmetic, *sizes, self.spec.device.startswith("cpu")
        return PartOfFusedLoss(*how, self.own_tokens) if self.share.tensor > 1 else FusedLoss(*how)

    @property
    def compiles_ends(self) -> bool:
        """True if embedding, head and loss are part of the compiled graph."""
        return self.spec.compile not in ("off", "blocks")

    @property
    def loss_by_torch(self) -> bool:
        """True if torch computes a loss that was requested as fused: the kernels leave small ones to it."""
        if not (self.spec.precision.startswith("bf16") and self.spec.device.startswith("cuda")):
            return False
        size = self.tokens, self.model.d_model, self.model.vocab_size
        return self.share.tensor == 1 and torch_computes(*size, compiled=self.compiles_ends)

    @property
    def _up(self) -> str:
        return "feed_forward.gate_up" if self.model.is_gated else "feed_forward.up"

    @property
    def _gate(self) -> str:
        return "feed_forward.gate" if self.model.is_gated else "feed_forward.gelu"

    def _attention(self, direction: str) -> Iterator[Term]:
        model, context = self.model, self.share.context
        dtype = "bf16" if self.arithmetic.activation_bytes == 2 else "fp32"
        heads = self.share.batch * model.num_heads // self.share.tensor
        sizes = (heads, self.length, model.head_width)
        own = Term("attention", f"attention {model.attention} {direction} {dtype}", sizes)
        if context == 1:
            yield own
            return
        queries = self.tokens * heads // self.share.batch * model.head_width
        keys = self.tokens * self.qkv_rows - queries
        key_heads = max(1, model.kv_heads // self.share.tensor)  # ranks may share a key head
        rank_sizes = context, queries, keys, self.arithmetic.activation_bytes, key_heads
        if self.share.ulysses:
            all_tokens = (heads // context, model.context_length, model.head_width)
            yield from HeadExchanges(*rank_sizes).terms(dataclasses.replace(own, sizes=all_tokens))
        elif direction == "forward":
            yield from Ring(*rank_sizes).forward(own)
        else:
            yield from Ring(*rank_sizes).backward(own)

    def _norm(self, name: str, direction: str, module: str) -> Iterator[Term]:
        """Yields a norm and, in backward, the sum of its gradient over tensor ranks."""
        sizes = self.model.norm, self.own_tokens, self.model.d_model
        sums = self.spec.compile != "blocks" or name == "feed_forward.norm"  # in the same graph
        arithmetic = self.end_arithmetic if name == "head.norm" else self.arithmetic
        yield from arithmetic.norm(name, direction, *sizes, sums=sums)
        if direction == "backward":
            yield from self._gradient_sums.during_backward(name, module)

    @functools.cached_property
    def _gradient_sums(self) -> GradientSums:
        return gradient_sums_of(self, self._rule, self.arithmetic.weight_bytes)

    def _rule(self, module: str) -> Rule | None:
        """Returns how tensor parallelism shards the module; None if it does not."""
        return self._table.get(module) or self._table.get(f"blocks.*.{module}")

    def _collectives(
        self, module: str, phase: str, itemsize: int = 0, weight: tuple[int, int] | None = None
    ) -> Iterator[Term]:
        """Yields a module's tensor-parallel collectives.

        If the layout overlaps them, they run during the products with `weight` (outputs, inputs).
        """
        rule = self._rule(module)
        nbytes = self.tokens * self.model.d_model * (itemsize or self.arithmetic.activation_bytes)
        for operation in getattr(KINDS[rule.kind], phase) if rule else ():
            name = f"{module}.{operation}"
            term = Term(name, operation.replace("-", "_"), (nbytes,), axis="tensor")
            if weight and self.overlapped:
                sizes = weight, self.tokens, self.share.tensor, self.arithmetic.dtype
                yield from OverlappedLayer(*sizes, self.share.replayed).terms(term, phase)
            else:
                yield term


def _paced(terms: Iterable[Term], pace: float) -> list[Term]:
    if pace == 1:
        return list(terms)
    return [dataclasses.replace(term, pace=pace) for term in terms]
