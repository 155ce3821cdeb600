"""What of a network a rank computes, as sizes: its tokens, its parameters, its parts of each layer."""

import dataclasses

from stepgauge.spec.model import ModelSpec
from stepgauge.spec.model_fields import NORM_PARAMETERS, NORMS


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkPart:
    """What of a network a rank runs at once.

    batch     sequences of a forward and backward: of a pipeline, of a micro-batch
    tensor    ranks that share each layer
    overlap   what they send runs beside products
    blocks    of its stage; None: all
    context   ranks that share each sequence
    ulysses   these exchange heads for attention
    gathered  weights come from the other ranks, in the type that is computed in (ZeRO 3)
    passes    forwards and backwards of a step, whose gradients are added up
    """

    batch: int
    tensor: int = 1
    overlap: bool = False
    blocks: range | None = None
    context: int = 1
    ulysses: bool = False
    gathered: bool = False
    passes: int = 1


class ShareSizes:
    """Sizes of a rank's share."""

    def __init__(self, model: ModelSpec, share: NetworkPart):
        self.model, self.share = model, share
        self.blocks = share.blocks or range(model.num_layers)
        self.is_first = self.blocks.start == 0
        self.is_last = self.blocks.stop == model.num_layers
        self.length = model.context_length // share.context
        self.tokens = share.batch * self.length
        self.own_tokens = self.tokens // share.tensor  # of the residual stream

    @property
    def num_parameters(self) -> int:
        """Those that the rank computes with."""
        return len(self.blocks) * self.block_parameters + self.end_parameters

    @property
    def units(self) -> dict[str, int]:
        """Elements that ZeRO 3 gathers together, by the name of the block; the rest is one more."""
        return {f"blocks.{number}": self.block_parameters for number in self.blocks}

    @property
    def block_parameters(self) -> int:
        return sum(self.block_matrices) + self.model.block_vector_parameters

    @property
    def block_matrices(self) -> list[int]:
        """Elements of a block's weights: inputs and output of attention, up (and gate), down."""
        model, n = self.model, self.share.tensor
        d, f = model.d_model, model.d_ff // n
        width = model.num_heads * model.head_width // n
        return [self.qkv_rows * d, width * d, (2 if model.is_gated else 1) * f * d, f * d]

    @property
    def end_parameters(self) -> int:
        """Of embeddings, last norm and head, as far as the stage has them."""
        return sum(self.end_matrices) + (self.norm_parameters if self.is_last else 0)

    @property
    def end_matrices(self) -> list[int]:
        model, whole = self.model, self.model.vocab_size * self.model.d_model
        found = [whole // self.share.tensor] if self.is_first else []
        if self.is_first and model.positions == "learned":
            found.append((model.num_positions or model.context_length) * model.d_model)
        if self.is_last and not (model.tied_head and self.is_first):
            found.append(whole // self.share.tensor)
        return found

    @property
    def norm_parameters(self) -> int:
        return NORM_PARAMETERS[NORMS[self.model.norm]] * self.model.d_model

    @property
    def qkv_rows(self) -> int:
        """Of this rank; key heads that several ranks read are on each."""
        queries, keys, values = self.model.qkv_sections
        least = self.model.head_width
        return queries // self.share.tensor + max(2 * least, (keys + values) // self.share.tensor)

    @property
    def biases(self) -> int:
        """Values a token that are summed into the gradients of a block's biases."""
        model, n = self.model, self.share.tensor
        found = self.qkv_rows if model.attention_bias != "none" else 0
        found += model.d_model if model.attention_bias == "all" else 0
        if model.feed_forward_bias:
            found += (2 if model.is_gated else 1) * model.d_ff // n + model.d_model
        return found

    @property
    def rotated_width(self) -> int:
        """Of queries and keys together."""
        queries, keys, _ = self.model.qkv_sections
        return (queries + keys) // self.share.tensor
