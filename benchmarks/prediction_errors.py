"""Predictions of every measured multi-GPU step in benchmarks/results, beside what was measured, as
Markdown: computing as calibrated on an H100, links as measured on H200s.

    python benchmarks/prediction_errors.py > table.md     # half a minute; needs no torch

Rows of one thing asked stand together: how many there are, their median, and the errors of the
least and the largest of them. Beside the step stands its ratio to one GPU's step of the same
command, in which the difference between the two GPUs mostly cancels.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepgauge.cost.data_parallel import predict_data_parallel
from stepgauge.cost.machine import Machine
from stepgauge.cost.operations import StepOperations
from stepgauge.cost.pipeline import predict_pipeline
from stepgauge.cost.prices import Prices
from stepgauge.cost.share import NetworkPart
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.record import Record
from stepgauge.spec.step import WorkSpec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HOST_BOUND = ("small", "medium", "large")  # below these sizes a step follows its host
Found = dict[tuple[str, ...], list[tuple[float, float]]]


def machine() -> Machine:
    h100, h200 = (
        HardwareFile.read(ROOT / "hardware" / f"{name}.json")
        for name in ("h100-sxm", "h200-nvlink")
    )
    return Machine(h100.with_links(h200.links))


def lines(pattern: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(RESULTS.glob(pattern)):
        for line in path.read_text().splitlines():
            yield path.name, json.loads(line)


def spec_of(kind: type, record: Record) -> Any:
    own = {name: v for name, v in record.spec.items() if name in kind.__dataclass_fields__}
    return kind(**{**own, "model": ModelSpec(**record.spec["model"])})


def data_parallel(on: Machine) -> Iterator[tuple[tuple[str, ...], Record, Record]]:
    """Rows of our own wrappers, as they are now: over NCCL's collectives."""
    known: dict[str, Record] = {}
    for _, line in lines("*h200*data-parallel*.jsonl"):
        if line.get("kind") != "data-parallel" or line["spec"]["model"].get("network"):
            continue
        record = Record.from_json(json.dumps(line))
        copies = record.spec.get("transport", "collectives") != "collectives"
        if record.status != "ok" or copies or record.spec.get("max_ctas"):
            continue
        if record.spec["backend"] == "gloo" or record.spec["compile"] != "off":
            continue
        spec = spec_of(DataParallelSpec, record)
        try:
            if record.key not in known:
                known[record.key] = predict_data_parallel(spec, on)
        except ValueError:
            continue  # a wrapper of torch, an optimizer that was not calibrated
        reduced = "" if spec.reduce_dtype == "own" else f" {spec.reduce_dtype} sums"
        key = (spec.size, spec.wrapper + reduced, str(spec.ranks), spec.precision,
               f"{spec.batch} x {spec.model.context_length}", f"{spec.bucket_mb:g}")  # fmt: skip
        yield key, record, known[record.key]


def pipelines(on: Machine) -> Iterator[tuple[tuple[str, ...], Record, Record]]:
    for _, line in lines("*h200-pipeline.jsonl"):
        if line.get("part") != "measured" or line["schedule"].startswith("torch"):
            continue
        record = Record.from_json(json.dumps(line["record"]))
        if record.spec["model"].get("network"):
            continue  # BERT has no cost model
        spec = spec_of(PipelineSpec, record)
        key = (spec.schedule, str(spec.micro_batches), spec.compile, str(spec.ranks))
        yield key, record, predict_pipeline(spec, on)


def tensor_parallel(on: Machine) -> Iterator[tuple[int, str, float, float]]:
    """Eight blocks of benchmarks/tensor_parallel_campaign.py, forward and backward."""
    model = ModelSpec(
        vocab_size=128, context_length=8192, d_model=4096, d_ff=11008, num_heads=32, num_layers=10
    )
    for _, line in lines("*h200-tensor-parallel.jsonl"):
        if not line["provider"].startswith("ours") or "step_ms" not in line:
            continue
        ranks, how = line["ranks"], line["provider"].split()[-1]
        compiled = "blocks" if how == "compiled" else "off"
        work = WorkSpec(model=model, batch=1, precision="bf16-pure", compile=compiled)
        share = NetworkPart(batch=1, tensor=ranks, blocks=range(1, 9))
        stage = StepOperations(work, share)
        prices = Prices(on, Layout(tensor=ranks))
        us = prices.total_us(stage.forward()) + prices.total_us(stage.backward())
        yield ranks, how, us / 1e3, line["step_ms"]


def percent(value: float) -> str:
    return f"{value:+.1%}".replace("-", "−").replace("%", " %")


def table(head: list[str], rows: list[list[str]]) -> None:
    print("|", " | ".join(head), "|")
    print("|", " | ".join("---:" if h[0].islower() else "---" for h in head), "|")
    for row in rows:
        print("|", " | ".join(row), "|")
    print()


def sentence(noun: str, errors: list[float]) -> None:
    sizes = [abs(error) for error in errors]
    print(
        f"{noun}: {len(errors)} rows, mean {statistics.fmean(sizes):.1%}, median "
        f"{statistics.median(sizes):.1%}, at most {max(sizes):.1%}, signed mean "
        f"{percent(statistics.fmean(errors))}.\n"
    )


def print_data_parallel(on: Machine) -> None:
    found: dict[tuple[str, ...], list[tuple[Record, Record]]] = defaultdict(list)
    for key, record, modelled in data_parallel(on):
        found[key].append((record, modelled))

    def median(rows: list[tuple[Record, Record]], which: Callable[..., Record], metric: str) -> Any:
        values = [v for row in rows if (v := which(row).median(metric)) is not None]
        return statistics.median(values) if values else None

    rows, bound = [], defaultdict(list)
    for key, pairs in sorted(found.items()):
        size, wrapper, ranks, precision, batch, bucket = key
        predicted = median(pairs, lambda row: row[1], "step_ms")
        steps = [record.median("step_ms") or 0.0 for record, _ in pairs]
        errors = [predicted / step - 1 for step in steps]
        bound["host" if size in HOST_BOUND else "GPU"] += errors
        alone = found.get((size, "none", *key[2:]))
        ratio = error = ""
        if alone and wrapper != "none":
            one = [median(alone, lambda row, n=n: row[n], "step_ms") for n in (0, 1)]
            ratio = f"{statistics.median(steps) / one[0]:.3f}"
            change = predicted / one[1] / (statistics.median(steps) / one[0]) - 1
            bound[f"ratio {'host' if size in HOST_BOUND else 'GPU'}"].append(change)
            error = percent(change)
        peaks = [median(pairs, lambda row, n=n: row[n], "peak_bytes") for n in (0, 1)]
        rows.append([
            size, wrapper, ranks, precision, batch, bucket, str(len(steps)), f"{predicted:.1f}",
            f"{statistics.median(steps):.1f}",
            percent(min(errors)) if len(errors) == 1
            else f"{percent(min(errors))} to {percent(max(errors))}",
            ratio, error, percent(peaks[1] / peaks[0] - 1),
        ])  # fmt: skip
    head = ["Size", "Wrapper", "GPUs", "Precision", "Batch", "Bucket MB", "rows", "predicted ms",
            "measured ms", "error", "over one GPU", "error of that", "error of peak"]  # fmt: skip
    for bounds in ("GPU", "host"):
        sentence(f"Steps that the {bounds} bounds", bound[bounds])
        sentence(f"Their ratio to one GPU ({bounds})", bound[f"ratio {bounds}"])
    table(head, rows)


def main() -> None:
    on = machine()
    print("## Data parallel and ZeRO\n")
    print_data_parallel(on)
    print("## Pipelines on 4 GPUs, 4096 wide, 16 blocks, forward and backward\n")
    rows = [
        (key, modelled.median("step_ms") or 0.0, record.median("step_ms") or 0.0)
        for key, record, modelled in pipelines(on)
    ]
    sentence("Steps", [p / m - 1 for _, p, m in rows])
    table(
        ["Schedule", "Micro-batches", "Compile", "GPUs", "predicted ms", "measured ms", "error"],
        [[*key, f"{p:.1f}", f"{m:.1f}", percent(p / m - 1)] for key, p, m in rows],
    )
    print("## Tensor parallel, 8 blocks 4096 wide, one sequence of 8192\n")
    tensor = list(tensor_parallel(on))
    sentence("Steps", [p / m - 1 for *_, p, m in tensor])
    table(
        ["GPUs", "How", "predicted ms", "measured ms", "error"],
        [[str(n), how, f"{p:.1f}", f"{m:.1f}", percent(p / m - 1)] for n, how, p, m in tensor],
    )


if __name__ == "__main__":
    main()
