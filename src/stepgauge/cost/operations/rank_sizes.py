"""Sizes of one rank's share of a network: its tokens, its parameters, its part of each layer."""

import dataclasses
import math

from stepgauge.spec.calibration import ALIGNED
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.units import ceil_div


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """The share of a network and of a batch that one rank computes.

    batch     sequences per forward and backward; with a pipeline, of one micro-batch
    tensor    ranks that share each layer
    overlap   tensor-parallel communication runs during products
    replayed  the step is replayed from a CUDA graph
    blocks    blocks of the pipeline stage; None for all
    context   ranks that share each sequence
    ulysses   context-parallel ranks exchange heads for attention
    gathered  weights are gathered from other ranks in the activations' dtype (ZeRO 3)
    passes    forwards and backwards per step, whose gradients are accumulated
    averaged  a data or context axis reads each gradient during backward, to average it
    """

    batch: int
    tensor: int = 1
    overlap: bool = False
    replayed: bool = False
    blocks: range | None = None
    context: int = 1
    ulysses: bool = False
    gathered: bool = False
    passes: int = 1
    averaged: bool = False


class ShareSizes:
    """Token counts, layer widths and parameter counts of a rank's share."""

    def __init__(self, model: ModelSpec, share: NetworkPart):
        self.model, self.share = model, share
        self.blocks = share.blocks or range(model.num_layers)
        self.is_first = self.blocks.start == 0
        self.is_last = self.blocks.stop == model.num_layers
        self.length = model.context_length // share.context
        self.tokens = share.batch * self.length
        # Between tensor-parallel layers, each rank keeps its part of the residual stream only.
        self.own_tokens = self.tokens // share.tensor

    @property
    def num_parameters(self) -> int:
        """Parameters that the rank computes with."""
        return len(self.blocks) * self.block_parameters + self.end_parameters

    @property
    def units(self) -> dict[str, int]:
        """Parameters that ZeRO 3 gathers together, by block. The rest is one more unit."""
        return {f"blocks.{number}": self.block_parameters for number in self.blocks}

    @property
    def block_parameters(self) -> int:
        vectors = self.model.block_vector_parameters - self._biases_of_other_ranks
        return sum(self.block_matrices) + vectors

    @property
    def _biases_of_other_ranks(self) -> int:
        """Biases of column layers, of which a rank has those of its outputs."""
        model, elsewhere = self.model, 0
        if model.attention_bias != "none":
            elsewhere += sum(model.qkv_sections) - self.qkv_rows
        if model.feed_forward_bias:
            elsewhere += (2 if model.is_gated else 1) * model.d_ff - self.up_rows
        return elsewhere

    @property
    def block_matrices(self) -> list[int]:
        """Elements of a block's weights: attention input and output, up (and gate), down."""
        d, f = self.model.d_model, self.feed_forward_width
        return [self.qkv_rows * d, self.attention_width * d, self.up_rows * d, f * d]

    @property
    def end_parameters(self) -> int:
        """Parameters of embeddings, last norm and head, if the stage has them."""
        return sum(self.end_matrices) + (self.norm_parameters if self.is_last else 0)

    @property
    def end_matrices(self) -> list[int]:
        """Elements of the embeddings and of the head, if the stage has them."""
        model = self.model
        vocabulary = model.vocab_size * model.d_model // self.share.tensor
        sizes = [vocabulary] if self.is_first else []
        if self.is_first and model.positions == "learned":
            sizes.append((model.num_positions or model.context_length) * model.d_model)
        if self.is_last and not (model.tied_head and self.is_first):
            sizes.append(vocabulary)
        return sizes

    @property
    def words(self) -> int:
        """Words of the vocabulary on the rank whose products with them are slowest."""
        fewest = self.model.vocab_size // self.share.tensor
        most = ceil_div(self.model.vocab_size, self.share.tensor)
        return min((most, fewest), key=lambda words: math.gcd(words, ALIGNED))

    @property
    def norm_parameters(self) -> int:
        return NORMS[self.model.norm].parameters * self.model.d_model

    @property
    def feed_forward_width(self) -> int:
        return self.model.d_ff // self.share.tensor

    @property
    def up_rows(self) -> int:
        """Outputs of the up projection, with those of the gate."""
        return (2 if self.model.is_gated else 1) * self.feed_forward_width

    @property
    def attention_width(self) -> int:
        """Width of this rank's heads together."""
        return self.model.num_heads * self.model.head_width // self.share.tensor

    @property
    def qkv_rows(self) -> int:
        """Outputs of the attention input. A key head that several ranks need is on each of them."""
        queries, keys, values = self.model.qkv_sections
        one_head = 2 * self.model.head_width
        return queries // self.share.tensor + max(one_head, (keys + values) // self.share.tensor)

    @property
    def biases(self) -> int:
        """Values per token that are summed into the gradients of a block's biases."""
        model = self.model
        values = self.qkv_rows if model.attention_bias != "none" else 0
        values += model.d_model if model.attention_bias == "all" else 0
        values += self.up_rows + model.d_model if model.feed_forward_bias else 0
        return values

    @property
    def rotated_width(self) -> int:
        """Width of queries and keys together."""
        queries, keys, _ = self.model.qkv_sections
        return (queries + keys) // self.share.tensor
