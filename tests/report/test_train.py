"""The page of training runs."""

from stepgauge.report.page import Plot, Text
from stepgauge.report.table import Table
from stepgauge.report.train import train_blocks
from stepgauge.spec.record import Record, Sample

CURVE = {"step": [1, 2, 3], "loss": [5.5, 3.0, 1.2]}


def run(series, **environment):
    metrics = {"last_loss": Sample.exact(1.2, "")}
    return Record(
        kind="train", spec={}, metrics=metrics, series=CURVE | series, environment=environment
    )


def test_each_run_has_its_curves_and_all_are_in_one_table():
    text = run(
        {"held_out_step": [3], "held_out_bits_per_byte": [1.8]},
        corpus_bytes=10**7,
        corpus_sha256="ab" * 32,
    )
    diverged = Record(kind="train", spec={}, status="failed", note="the loss is nan")
    shown = train_blocks([text, run({}), diverged])
    assert [type(block) for block in shown] == [Text, Plot, Plot, Plot, Table]
    assert "10,000,000 bytes" in shown[0].text
    assert ["nats a token" in block.svg for block in shown[1:4]] == [True, False, False]
    assert len(shown[-1].rows) == 3
