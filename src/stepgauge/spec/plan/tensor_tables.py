"""Tensor parallel tables of stepgauge's networks, built from their specs."""

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor import Rule, Section, Table

SPLIT, SEQUENCE = (Rule(kind, by_token=True) for kind in ("split", "sequence"))
ROW = Rule("row")


def table_of(spec: ModelSpec | BertSpec, blocks: range | None = None) -> Table:
    """Returns the table of a network, or of the pipeline stage with these blocks. Between stages the
    residual stream stays cut: each rank receives and sends its piece.

    Raises ValueError for a network without a table.
    """
    blocks = range(spec.num_layers) if blocks is None else blocks
    is_first, is_last = blocks.start == 0, blocks.stop == spec.num_layers
    after_blocks: tuple[str, ...]
    if isinstance(spec, BertSpec):
        embedding, block = "tokens", _bert_block(spec)
        after_blocks = ("transform", "transform_norm")
    else:
        embedding, block = "embedding", _transformer_block(spec)
        after_blocks = () if spec.block == "post-norm" else ("norm",)
    table = {embedding: Rule("embedding"), "blocks.0": SPLIT} if is_first else {}
    table |= {f"blocks.*.{name}": rule for name, rule in block.items()}
    if is_last:
        table |= {**dict.fromkeys(after_blocks, SEQUENCE), "head": Rule("head")}
    return table


def _transformer_block(spec: ModelSpec) -> dict[str, Rule]:
    if spec.num_experts:
        raise ValueError(f"num_experts is {spec.num_experts}; experts have no tensor parallel yet")
    queries, keys, _ = spec.qkv_sections
    heads = Section(queries, unit=spec.head_width)
    shared = Section(keys, unit=spec.head_width, shared=spec.kv_heads < spec.num_heads)
    gate_up = Rule("column", (Section(spec.d_ff), Section(spec.d_ff)))
    up = {"feed_forward.gate_up": gate_up} if spec.is_gated else {"feed_forward.up": Rule("column")}
    return {
        "attention_norm": SEQUENCE,
        "attention.input": Rule("column", (heads, shared, shared)),
        **({"attention.qk_norms.*": Rule("heads")} if spec.qk_norm else {}),
        "attention.output": ROW,
        "feed_forward_norm": SEQUENCE,
        **up,
        "feed_forward.down": ROW,
    }


def _bert_block(spec: BertSpec) -> dict[str, Rule]:
    return {
        "attention.input": Rule("column", (Section(spec.d_model, unit=spec.head_width),) * 3),
        "attention.output": ROW,
        "attention_norm": SEQUENCE,
        "feed_forward.up": Rule("column"),
        "feed_forward.down": ROW,
        "feed_forward_norm": SEQUENCE,
    }
