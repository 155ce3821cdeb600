"""Experiment: pipeline-parallel training of BERT, by ranks and micro-batches, and with a heavy stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepgauge.report.figure import lines, short
from stepgauge.report.numbers import number
from stepgauge.report.page import Block, Plot
from stepgauge.report.pipeline_steps import steps_of, tracks
from stepgauge.report.views import record_table, undisturbed
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.study.experiment import Experiment, StudyMachine, needs_two_gpus
from stepgauge.study.published import comparison

RANKS, CHUNKS, SEEDS = (2, 3, 4), (4, 8, 16, 32, 64), (0, 1, 2)


def specs(machine: StudyMachine, folder: Path) -> Sequence[PipelineSpec]:
    """The configurations that S3 published run with three seeds."""
    if not machine.is_gpu:
        rows = [_spec(machine, micro_batches=m) for m in (2, 4)]
        return [*rows, _spec(machine, schedule="torch-1f1b"), _spec(machine, overweight=2)]
    ranks = [n for n in RANKS if n <= machine.gpus]
    all_ranks = {"ranks": max(ranks, default=2)}
    rows = [
        _spec(machine, ranks=n, micro_batches=m, cuda_graphs=graphs)
        for n in ranks
        for m in CHUNKS
        for graphs in (False, True)
    ]
    rows += [_spec(machine, schedule="torch-1f1b", micro_batches=m, **all_ranks) for m in CHUNKS]
    rows += [_spec(machine, ranks=n, seed=seed) for n in ranks for seed in SEEDS[1:]]
    rows += [_spec(machine, schedule=s, micro_batches=16, **all_ranks) for s in ("zb-h1", "gpipe")]
    return [*rows, _spec(machine, overweight=3, micro_batches=16, **all_ranks)]


def _spec(machine: StudyMachine, **fields: Any) -> PipelineSpec:
    on_gpu = {"device": "cuda", "warmup": 3, "steps": 10, "batch": 64}
    on_cpu = {"device": "cpu", "warmup": 1, "steps": 3, "batch": 8}
    counts: dict[str, Any] = on_gpu if machine.is_gpu else on_cpu
    shape = (
        {"context_length": 128} if machine.is_gpu else {"context_length": 32, "vocab_size": 1000}
    )
    size = "bert-base" if machine.is_gpu else "bert-tiny"
    fields = {"micro_batches": 4, "ranks": 2, **counts, **fields}
    return PipelineSpec(model=BertSpec.preset(size, **shape), size=size, **fields)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = [record for record in records if record.status == "ok"]
    measured = [record for record in good if record.provenance == "measured"]
    curves = {
        name: ([float(m) for m, _ in points], [rate for _, rate in points])
        for name, points in _rates(measured).items()
        if len(points) > 1
    }
    shown: list[Block] = []
    if curves:
        drawn = lines(
            curves, x="micro-batches", y="samples/s", dots=tuple(curves), scales={"x": short}
        )
        caption = (
            "Throughput by number of micro-batches. With few, the bubble is large; with many, the "
            "host's overhead for each grows, which CUDA graphs avoid."
        )
        shown.append(Plot(drawn, caption))
    for record in measured:
        if record.spec["overweight"]:
            shown += _picture(record, good)
    return [
        *shown,
        record_table(records, first=["schedule"]),
        comparison("pipeline", measured, "4 micro-batches"),
    ]


def _rates(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Returns points of (micro-batches, samples/s) for each schedule and number of ranks."""
    rates: dict[str, dict[int, float]] = {}
    for record in records:
        spec, rate = record.spec, record.median("samples_per_s")
        if rate and not spec["overweight"]:
            graphs = ", CUDA graphs" if spec.get("cuda_graphs") else ""
            name = f"{spec['schedule']}{graphs}, {spec['ranks']} ranks"
            rates.setdefault(name, {}).setdefault(spec["micro_batches"], rate)
    return {name: sorted(points.items()) for name, points in rates.items()}


def _picture(record: Record, records: Sequence[Record]) -> list[Block]:
    """Returns a plot of the predicted and the measured step."""
    caption = "The second stage has more blocks than the others, which wait for it."
    steps = steps_of(record, records)
    return [Plot(tracks(steps), caption)] if steps else []


def answer(records: Sequence[Record]) -> str:
    """Returns the throughput with the best number of micro-batches and with the fewest, or with the most
    if the fewest are best, and the error of the simulation.
    """
    measured = [r for r in records if r.status == "ok" and r.provenance == "measured"]
    measured, among, why_none = undisturbed(measured)
    rates = {name: points for name, points in _rates(measured).items() if len(points) > 1}
    if not rates:
        why_none = why_none or f"{among.lower()}no schedule has two numbers of micro-batches"
        return f"No throughputs are compared: {why_none}."
    name, points = max(rates.items(), key=lambda item: max(rate for _, rate in item[1]))
    best = max(points, key=lambda point: point[1])
    other = points[-1] if best is points[0] else points[0]
    text = (
        f"{among}{name} reaches the highest throughput: {number(best[1])} samples/s with {best[0]} "
        f"micro-batches, and {number(other[1])} with {other[0]}."
    )
    modelled = {r.key: r.median("step_ms") for r in records if r.provenance == "modelled"}
    errors = sorted(
        abs(predicted / step - 1)
        for r in measured
        if (predicted := modelled.get(r.key)) and (step := r.median("step_ms"))
        and not r.spec["schedule"].startswith("torch-")
    )  # fmt: skip
    if errors:
        median = errors[len(errors) // 2]
        text += f" The median error of the simulated step times is {100 * median:.0f} %."
    return text


EXPERIMENT = Experiment(
    name="pipeline",
    title="Pipeline parallel",
    question="With how many micro-batches is a pipeline fastest, and how much does one heavy stage cost?",
    method=(
        "BERT is split into one stage per rank. Forward and backward of a global batch of 64 run "
        "with 1F1B and other schedules, and the slowest rank of each step counts. Before a row runs, "
        "each rank rehearses it without the others and the schedule is simulated with these times. "
        "torch-1f1b is the 1F1B of torch.distributed.pipelining."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="the ranks are processes on one CPU, so one rank computes in another rank's bubble",
)
