"""A training run: its loss curves."""

import math
from collections.abc import Sequence

from stepgauge.report.figure import Curve, lines
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.units import NATS_PER_BIT


def train_blocks(records: Sequence[Record]) -> list[Block]:
    """The curves of each run, and the table."""
    shown = [block for record in records if record.status == "ok" for block in _curves(record)]
    return [*shown, record_table(records)]


def _curves(record: Record) -> list[Block]:
    """The losses in one unit in one plot: of text in nats a token, which is a byte."""
    curve = record.series
    is_text = "corpus_bytes" in record.environment  # a user's model has a loss of its own
    drawn: dict[str, Curve] = {"training loss": (curve["step"], curve["loss"])}
    if is_text and "held_out_bits_per_byte" in curve:
        nats = [bits * NATS_PER_BIT for bits in curve["held_out_bits_per_byte"]]
        drawn["held-out loss"] = (curve["held_out_step"], nats)
    elif "held_out_loss" in curve:
        drawn["held-out loss"] = (curve["held_out_step"], curve["held_out_loss"])
    unit = "nats a token" if is_text else "loss"
    svg = lines(drawn, x="step", y=unit, dots=("held-out loss",))
    caption = "Training loss, each step" + (", and held-out loss." if len(drawn) > 1 else ".")
    return [*([Text(_corpus(record))] if is_text else []), Plot(svg, caption)]


def _corpus(record: Record) -> str:
    where = record.environment
    vocabulary = where.get("vocab_size", 256)
    return (
        f"The corpus has {where['corpus_bytes']:,} bytes (sha256 {where['corpus_sha256'][:16]}…); "
        f"its last 5 % are held out. Guessing one of {vocabulary:,} tokens at random costs "
        f"{number(math.log(vocabulary))} nats a token."
    )
