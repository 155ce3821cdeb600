"""Reports on training runs: their loss curves."""

import math
from collections.abc import Sequence

from stepgauge.report.figure import Curve, lines
from stepgauge.report.names import labels
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot, Text
from stepgauge.report.views import record_table
from stepgauge.spec.record import Record
from stepgauge.spec.units import NATS_PER_BIT


def train_blocks(records: Sequence[Record]) -> list[Block]:
    """Returns the corpus and the loss curves of each run, and the table."""
    shown: list[Block] = []
    corpora: set[str] = set()
    ran = [record for record in records if record.status == "ok"]
    names = [f" of {label}" for label in labels(ran)] if len(ran) > 1 else [""] * len(ran)
    for name, record in zip(names, ran, strict=True):
        if "corpus_bytes" in record.environment and (corpus := _corpus(record)) not in corpora:
            corpora.add(corpus)
            shown.append(Text(corpus))
        shown.append(_curves(record, name))
    return [*shown, record_table(records)]


def _curves(record: Record, name: str) -> Plot:
    """Returns the losses in one plot. On text they are in nats a token; a token is a byte."""
    curve = record.series
    is_text = "corpus_bytes" in record.environment  # a user's model has its own loss
    drawn: dict[str, Curve] = {"training loss": (curve["step"], curve["loss"])}
    if is_text and "held_out_bits_per_byte" in curve:
        nats = [bits * NATS_PER_BIT for bits in curve["held_out_bits_per_byte"]]
        drawn["held-out loss"] = (curve["held_out_step"], nats)
    elif "held_out_loss" in curve:
        drawn["held-out loss"] = (curve["held_out_step"], curve["held_out_loss"])
    unit = "nats a token" if is_text else "loss"
    svg = lines(drawn, x="step", y=unit, dots=("held-out loss",))
    held_out = ", and held-out loss" if len(drawn) > 1 else ""
    return Plot(svg, f"Training loss of each step{name}{held_out}.")


def _corpus(record: Record) -> str:
    corpus = record.environment
    vocabulary = corpus.get("vocab_size", 256)
    return (
        f"The corpus has {corpus['corpus_bytes']:,} bytes (sha256 {corpus['corpus_sha256'][:16]}…). "
        f"Its last 5 % are held out. Guessing one of the {vocabulary:,} tokens at random would have "
        f"a loss of {number(math.log(vocabulary))} nats a token."
    )
