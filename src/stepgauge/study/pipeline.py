"""E12: pipeline parallel training of BERT, by ranks and micro-batches, and with one heavy stage."""

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
from stepgauge.study.published import beside

RANKS, CHUNKS, SEEDS = (2, 3, 4), (4, 8, 16, 32, 64), (0, 1, 2)


def specs(machine: StudyMachine, folder: Path) -> Sequence[PipelineSpec]:
    """The published points are run three times, by seed."""
    if not machine.is_gpu:
        rows = [_spec(machine, micro_batches=m) for m in (2, 4)]
        return [*rows, _spec(machine, schedule="torch-1f1b"), _spec(machine, overweight=2)]
    ranks = [n for n in RANKS if n <= machine.gpus]
    most = {"ranks": max(ranks, default=2)}
    rows = [
        _spec(machine, ranks=n, micro_batches=m, cuda_graphs=graphs)
        for n in ranks
        for m in CHUNKS
        for graphs in (False, True)
    ]
    rows += [_spec(machine, schedule="torch-1f1b", micro_batches=m, **most) for m in CHUNKS]
    rows += [_spec(machine, ranks=n, seed=seed) for n in ranks for seed in SEEDS[1:]]
    rows += [_spec(machine, schedule=s, micro_batches=16, **most) for s in ("zb-h1", "gpipe")]
    return [*rows, _spec(machine, overweight=3, micro_batches=16, **most)]


def _spec(machine: StudyMachine, **fields: Any) -> PipelineSpec:
    on_gpu = {"device": "cuda", "warmup": 3, "steps": 10, "batch": 64}
    on_cpu = {"device": "cpu", "warmup": 1, "steps": 3, "batch": 8}
    counts: dict[str, Any] = on_gpu if machine.is_gpu else on_cpu
    shape = (
        {"context_length": 128} if machine.is_gpu else {"context_length": 32, "vocab_size": 1000}
    )
    size = "bert-base" if machine.is_gpu else "bert-tiny"
    asked = {"micro_batches": 4, "ranks": 2, **counts, **fields}
    return PipelineSpec(model=BertSpec.preset(size, **shape), size=size, **asked)


def blocks(records: Sequence[Record]) -> Sequence[Block]:
    good = [record for record in records if record.status == "ok"]
    measured = [record for record in good if record.provenance == "measured"]
    curves = {
        name: ([float(m) for m, _ in points], [rate for _, rate in points])
        for name, points in _by_chunks(measured).items()
        if len(points) > 1
    }
    shown: list[Block] = []
    if curves:
        drawn = lines(
            curves, x="micro-batches", y="samples/s", dots=tuple(curves), scales={"x": short}
        )
        caption = (
            "Few micro-batches leave a bubble, many cost the host time for each, which a CUDA graph a "
            "stage and action spares."
        )
        shown.append(Plot(drawn, caption))
    for record in measured:
        if record.spec["overweight"]:
            shown += _picture(record, good)
    return [
        *shown,
        record_table(records, first=["schedule"]),
        beside("pipeline", measured, "4 micro-batches"),
    ]


def _by_chunks(records: Sequence[Record]) -> dict[str, list[tuple[int, float]]]:
    """Samples/s by micro-batches, of each schedule and number of ranks."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        spec, rate = record.spec, record.median("samples_per_s")
        if rate and not spec["overweight"]:
            graphs = ", CUDA graphs" if spec.get("cuda_graphs") else ""
            name = f"{spec['schedule']}{graphs}, {spec['ranks']} ranks"
            found.setdefault(name, {}).setdefault(spec["micro_batches"], rate)
    return {name: sorted(points.items()) for name, points in found.items()}


def _picture(record: Record, records: Sequence[Record]) -> list[Block]:
    """The step as it was predicted, above the step as it ran."""
    caption = "The second stage has more blocks than its share: the others wait for it."
    found = steps_of(record, records)
    return [Plot(tracks(found), caption)] if found else []


def answer(records: Sequence[Record]) -> str:
    """How the best number of micro-batches compares with the fewest, or with the most where the
    fewest are best, and how the simulator did.
    """
    measured = [r for r in records if r.status == "ok" and r.provenance == "measured"]
    measured, among = undisturbed(measured)
    of_name = {name: points for name, points in _by_chunks(measured).items() if len(points) > 1}
    if not of_name:
        return ""
    name, points = max(of_name.items(), key=lambda item: max(rate for _, rate in item[1]))
    best = max(points, key=lambda point: point[1])
    other = points[-1] if best is points[0] else points[0]
    said = (
        f"{among}{name} does {number(best[1])} samples/s at best, with {best[0]} micro-batches; "
        f"with {other[0]} it does {number(other[1])}."
    )
    modelled = {r.key: r.median("step_ms") for r in records if r.provenance == "modelled"}
    errors = sorted(
        abs(predicted / step - 1)
        for r in measured
        if (predicted := modelled.get(r.key)) and (step := r.median("step_ms"))
        and not r.spec["schedule"].startswith("torch-")
    )  # fmt: skip
    if errors:
        said += f" The simulator is off by {100 * errors[len(errors) // 2]:.0f} % at the median."
    return said


EXPERIMENT = Experiment(
    name="pipeline",
    title="Pipeline parallel",
    question="How many micro-batches does a pipeline want, and what does one heavy stage cost?",
    method=(
        "BERT cut into a stage a rank, forward and backward of a global batch of 64 with 1F1B and "
        "the others; of each step the slowest rank counts. Before a row runs, each stage is timed "
        "alone and the schedule is simulated from that. torch is torch.distributed.pipelining."
    ),
    specs=specs,
    blocks=blocks,
    answer=answer,
    needs=needs_two_gpus,
    on_cpu="ranks are processes that share one CPU, so that a bubble is another rank's work",
)
