"""`bench pipeline`: each row with its prediction, ours and torch's, and rejected specs."""

import dataclasses
import re
import types

import pytest
import torch

from stepgauge import cli
from stepgauge.bench import pipeline_probe
from stepgauge.bench import pipeline_rehearsal as rehearsal
from stepgauge.bench.pipeline_bytes import held_in_step, message_bytes
from stepgauge.cli.bench.pipeline import write_pictures
from stepgauge.cost.pipeline.timeline import Span
from stepgauge.parallel.pipeline.interfaces import Meta
from stepgauge.report.pipeline_steps import timeline_of
from stepgauge.report.views import remark_with_prediction
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.pipeline import Action, build, lower
from stepgauge.spec.plan.pipeline.check import Held
from stepgauge.spec.predictions import paired
from stepgauge.spec.record import Record
from stepgauge.spec.store import RunStore

SHAPE = {"d_model": 16, "d_ff": 32, "num_layers": 4, "num_heads": 2, "vocab_size": 16}
NANO = ModelSpec.preset("nano", context_length=8, **SHAPE)


def test_each_row_is_predicted_before_it_is_measured(tmp_path, capfd):
    shape = SHAPE | {"num_layers": 1}  # zbv has as many stages as it has parts
    asked = ["bench", "pipeline", "--size", "nano", "--context", "8", "--device", "cpu"]
    asked += [f"--{name.replace('_', '-')}={value}" for name, value in shape.items()]
    asked += ["--schedule", "zbv,torch-1f1b", "--microbatches", "4", "--batch", "4"]
    asked += ["--warmup", "1", "--steps", "1", "--out", str(tmp_path), "--pictures"]
    asked += ["--balance", "step", "--fill"]
    assert cli.run(asked) == 0, capfd.readouterr().err
    records = RunStore(tmp_path).read().records
    assert [record.provenance for record in records] == ["modelled", "measured"] * 2
    assert records[0].key == records[1].key
    # The simulated stages are those that ran, and the notes name them.
    for planned, measured in (records[:2], records[2:]):
        assert re.fullmatch(
            r"stages of [\d, ]+ parts, for the shortest step by measured time", measured.note
        )
        assert planned.note == measured.note
    assert [remark_with_prediction(row).count("stages of") for row in paired(records)] == [1, 1]
    out, _ = capfd.readouterr()
    assert all(word in out for word in ("predicted", "error", "%"))
    # The simulated order of actions is the one that ran.
    simulated, ran = (timeline_of(record) for record in records[:2])
    for planned, measured in zip(simulated.ranks, ran.ranks, strict=True):
        assert [span.action for span in planned] == [span.action for span in measured]
    assert 0 < records[1].median("busy_ms") < records[1].median("step_ms")
    torchs, ours = (
        path.read_text() for path in sorted(tmp_path.glob("timeline-*-m4-ranks2-*.svg"))
    )
    assert ours.index(">predicted: ") < ours.index(">measured, last step: ")
    assert ">predicted: " in torchs and ">measured" not in torchs
    assert cli.run(asked) == 0
    assert len(RunStore(tmp_path).read().records) == 4
    assert "4 of 4 rows were already" in capfd.readouterr().err


def test_the_pictures_of_one_folder_belong_to_different_rows(tmp_path, capfd):
    """A later run in the same folder leaves those of other rows; the same row's is replaced."""
    tables = {"spans": [["rank", "action", "start ms", "end ms"], [0, "0F0", 0.0, 1.0]]}
    few, many, seeded, again = (
        Record.of(PipelineSpec(model=NANO, batch=8, **fields), tables=tables)
        for fields in ({}, {"micro_batches": 8}, {"seed": 1}, {})
    )
    named = []
    for run in ([few, many], [seeded], [again]):
        write_pictures(run, tmp_path)
        named.append(re.findall(r"^picture of (.*): .*/(.*)\.svg$", capfd.readouterr().err, re.M))
    (first, second), (third,), (last,) = named
    assert (first[0], second[0]) == ("microbatches=4", "microbatches=8")
    assert re.fullmatch(r"timeline-1f1b-m8-ranks2-[0-9a-f]{8}", second[1])
    assert last[1] == first[1]
    assert len(list(tmp_path.glob("*.svg"))) == len({first[1], second[1], third[1]}) == 3


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"batch": 6}, "batch is 6, which 4 micro-batches do not divide"),
        (
            {"schedule": "zbv", "ranks": 6},
            r"zbv on 6 ranks has 12 stages; the network has 10 parts .*: choose num_layers 5 or fewer",
        ),
        ({"schedule": "zbw"}, "schedule is 'zbw'; choose one of gpipe"),
        ({"schedule": "torch-zbv", "compile": "blocks"}, "torch-zbv supports only off"),
        ({"schedule": "dualpipev", "micro_batches": 2}, "needs at least 4"),
        (
            {"model": dataclasses.replace(NANO, block="parallel")},
            "which a stage boundary cannot split",
        ),
    ],
)
def test_impossible_specs_raise_an_error_that_says_why(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        PipelineSpec(**{"model": NANO, "micro_batches": 4, "batch": 8, **fields})


def test_a_stage_may_be_half_a_block():
    """8 stages of 4 blocks, and as many as there are parts: two halves, the embedding and the head."""
    for ranks, fewest in ((4, 4), (5, 4), (2, 1)):
        model = dataclasses.replace(NANO, num_layers=fewest)
        spec = PipelineSpec(model=model, schedule="zbv", ranks=ranks, micro_batches=10, batch=10)
        stages = spec.stages()
        assert all(stages) and len(stages) == 2 * ranks and stages[-1].stop == 2 * fewest + 2


def test_overweight_adds_blocks_to_one_stage_only():
    plain, heavy = (
        PipelineSpec(model=NANO, micro_batches=4, ranks=2, overweight=n).stages() for n in (0, 3)
    )
    assert [len(part) for part in heavy] == [len(plain[0]), len(plain[1]) + 6]
    assert plain[-1].stop == 1 + 2 * 4 + 1


def test_only_tensors_that_cross_ranks_are_counted():
    """A V schedule on two ranks: stages 0 and 3 on rank 0, 1 and 2 on rank 1. A message has
    2 x 8 x 16 floats. The input of stage 2 stays on its rank and is not counted.
    """
    schedule = lower(build("zbv", ranks=2, micro_batches=4))
    metas = [Meta(torch.Size([2, 8, 16]), torch.float32, True)]
    pipeline = types.SimpleNamespace(schedule=schedule, metas=dict.fromkeys(range(4), metas))
    one = 2 * 8 * 16 * 4
    held = [held_in_step(Held(0, 0), pipeline, stage) for stage in range(4)]
    assert held == [Held(0, one), Held(one, 0), Held(0, one), Held(one, 0)]
    # Each rank has four channels: activations and gradients, both sent and received.
    assert [message_bytes(pipeline, rank) for rank in (0, 1)] == [4 * one, 4 * one]


def test_a_rank_pauses_where_it_waits_in_the_simulated_step(monkeypatch):
    """It waits for 30 ms before its first forward. Short waits are added to the next one."""
    times = {Action(1, "F", 0): (30, 40), Action(1, "I", 0): (40.5, 50), Action(1, "W", 0): (50, 60),
             Action(0, "F", 1): (60, 70), Action(0, "B", 1): (75, 90)}  # fmt: skip
    spans = [Span(action, *ms) for action, ms in times.items()]
    pauses = rehearsal.pauses_of(spans)
    assert pauses == {
        Action(1, "RECV_F", 0): pytest.approx(0.030),
        Action(0, "RECV_B", 1): pytest.approx(0.0055),
    }
    slept = []
    monkeypatch.setattr(rehearsal.time, "sleep", slept.append)
    transfers = rehearsal.NoisyTransfers(pauses, torch.device("cpu"))
    metas = [Meta(torch.Size([2, 3]), torch.float32), Meta(torch.Size([4]), torch.int64)]
    for action in (Action(1, "RECV_F", 0), Action(1, "RECV_B", 0)):
        transfers.receive(action, metas)
        noise, integers = transfers.take(action)
        assert noise.shape == (2, 3) and noise.std() > 0 and not integers.any()
    assert slept == [pytest.approx(0.030 - rehearsal.LEAD_S)]


@pytest.mark.parametrize("launch_ms", [0.1, 0.9, 1.1, 3.0])
def test_the_lead_before_a_timing_lasts_just_until_the_device_stays_busy(launch_ms):
    """The host takes up to twice its mean time for a launch, the device 2 ms for the shorter kind."""
    stage = pipeline_probe._StageProbe(
        ms={"F": 2.0, "B": 4.0}, launch_ms=launch_ms, held=Held(0, 0)
    )
    lead_ms = 1e3 * pipeline_probe._lead_s(stage)
    idle_ms = [
        2 * launch_ms * (call + 1) - (lead_ms + 2.0 * call)
        for call in range(pipeline_probe.MICRO_BATCHES)
    ]
    assert max(idle_ms) == pytest.approx(0)
