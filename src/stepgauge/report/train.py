"""A training run: its loss curves."""

import math
from collections.abc import Sequence

from stepgauge.report.figure import lines
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record


def train_blocks(records: Sequence[Record]) -> list[Block]:
    """The curves of each run, and the table."""
    shown = [block for record in records if record.status == "ok" for block in _curves(record)]
    return [*shown, record_table(records)]


def _curves(record: Record) -> list[Block]:
    curve = record.series
    is_text = "corpus_bytes" in record.environment  # a user's model has a loss of its own
    training = (curve["step"], curve["loss"])
    trained = lines({"training loss": training}, x="step", y="nats a token" if is_text else "loss")
    shown: list[Block] = [Text(_corpus(record))] if is_text else []
    shown.append(Plot(trained, "Training loss, each step."))
    series = "held_out_bits_per_byte" if is_text else "held_out_loss"
    if series in curve:
        held_out = {"held out": (curve["held_out_step"], curve[series])}
        unit = "bits a byte" if is_text else "loss"
        drawn = lines(held_out, x="step", y=unit, dots=("held out",), height=2.4)
        shown.append(Plot(drawn, "Held-out loss."))
    return shown


def _corpus(record: Record) -> str:
    where = record.environment
    vocabulary = where.get("vocab_size", 256)
    return (
        f"The corpus has {where['corpus_bytes']:,} bytes (sha256 {where['corpus_sha256'][:16]}…); "
        f"its last 5 % are held out. Guessing one of {vocabulary:,} tokens at random costs "
        f"{number(math.log(vocabulary))} nats a token."
    )
