"""The page of training runs."""

import dataclasses

from stepgauge.report.kinds import answer
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


def of_text():
    return run(
        {"held_out_step": [3], "held_out_bits_per_byte": [1.8]},
        corpus_bytes=10**7,
        corpus_sha256="ab" * 32,
    )


def test_each_run_has_its_curves_and_all_are_in_one_table():
    text = of_text()
    diverged = Record(kind="train", spec={}, status="failed", note="the loss is nan")
    shown = train_blocks([text, run({}), diverged])
    assert [type(block) for block in shown] == [Text, Plot, Plot, Table]
    assert "10,000,000 bytes" in shown[0].text
    assert ["nats a token" in block.svg for block in shown[1:3]] == [True, False]
    assert len(shown[-1].rows) == 3


def test_both_losses_of_a_text_are_told_in_one_unit():
    svg = train_blocks([of_text()])[1].svg
    assert "training loss from 5.5 at 1 to 1.2 at 3; held-out loss from 1.25 at 3" in svg
    assert ">1.5<" not in svg.split("step<")[0], "there is no step between two"
    record = of_text()
    figures = {"first_loss": 5.5, "last_loss": 1.2, "held_out": 1.8}
    metrics = {name: Sample.exact(value, "") for name, value in figures.items()}
    assert answer([dataclasses.replace(record, metrics=metrics)]) == (
        "The loss fell from 5.5 to 1.2 nats a token; on held-out data it is 1.25 (1.8 bits a byte)."
    )
    own = dataclasses.replace(record, metrics=metrics, environment={})
    assert answer([own]) == "The loss fell from 5.5 to 1.2; on held-out data it is 1.8."


def test_several_runs_are_named():
    figures = {"first_loss": 5.5, "last_loss": 1.2}
    metrics = {name: Sample.exact(value, "") for name, value in figures.items()}
    runs = [
        dataclasses.replace(of_text(), spec={"layout": layout}, metrics=metrics)
        for layout in ("dp2 zero1", "tp2")
    ]
    assert answer(runs) == (
        "The loss of layout=dp2 zero1 fell from 5.5 to 1.2 nats a token. "
        "The loss of layout=tp2 fell from 5.5 to 1.2 nats a token."
    )
    corpus, first, second, _ = train_blocks(runs)  # their corpus is the same
    assert "10,000,000 bytes" in corpus.text
    assert first.caption == "Training loss of each step of layout=dp2 zero1, and held-out loss."
    assert second.caption == "Training loss of each step of layout=tp2, and held-out loss."
