"""Selects the measured records that the package ships, for reports on machines without a GPU.

    python benchmarks/select_shipped.py

Reads rows of benchmarks/results/ and writes src/stepgauge/study/shipped/EXPERIMENT.jsonl. Numbers
have six digits, and figures that the report does not show are left out. All files together may have
at most 200 KB.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, SHIPPED = ROOT / "benchmarks/results", ROOT / "src/stepgauge/study/shipped"
MAX_BYTES = 200_000
ENVIRONMENT = ("device", "torch", "triton", "outcomes", "commit")
SERIES = ("rank_peak_bytes",)
HIDDEN_METRICS = ("_error", "_held_bytes", "resident_peak_bytes", "p99_ms", "batch", "factor")
SIZES = tuple(1 << power for power in range(10, 31, 2))
Row = dict[str, Any]


def where(kind: str, **fields: Any) -> Callable[[Row], bool]:
    """Returns a test for rows of a kind whose spec fields have one of the given values."""
    return lambda row: (
        row["kind"] == kind
        and all(row["spec"].get(name) in values for name, values in fields.items())
    )


# Experiment -> file of records, and a test that selects its rows.
SELECTION: dict[str, tuple[str, Callable[[Row], bool]]] = {
    "norm-layers": ("2026-11-21-h200-kernels-second", where("rms-norm", rows=(50_000,))),
    "attention": (
        "2026-11-21-h200-kernels-second",
        where("attention", dtype=("bf16",), passes=("both",), width=(64,), causal=(True,), heads=(1,)),
    ),
    "fused-step": ("2026-11-21-h100-step-parts", where("step")),
    "collectives": (
        "2026-11-21-h200-comm",
        where("comm", op=("all_reduce",), backend=("nccl",), ranks=(2,), timing=("pipelined",), size_bytes=SIZES),
    ),
    "data-parallel": (
        "2026-11-22-h200-data-parallel",
        where("data-parallel", size=("2.7b",), bucket_mb=(25.0,), transport=("collectives",)),
    ),
    "ddp-vs-fsdp": (
        "2026-11-21-h200-ddp-vs-fsdp",
        where("data-parallel", batch=(8,), wrapper=("torch-ddp", "torch-fsdp")),
    ),
    "broadcast": ("2026-11-21-h200-broadcast", where("broadcast")),
}  # fmt: skip


def rows(name: str, wanted: Callable[[Row], bool]) -> Iterator[str]:
    """Yields the selected rows of a file as JSON lines."""
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["status"] == "ok" and wanted(row):
            row["series"] = {key: row["series"][key] for key in SERIES if key in row["series"]}
            row["environment"] = {k: v for k, v in row["environment"].items() if k in ENVIRONMENT}
            row["metrics"] = {
                key: {part: rounded(figure) for part, figure in sample.items()}
                for key, sample in row["metrics"].items()
                if not key.endswith(HIDDEN_METRICS)
            }
            yield json.dumps(row, separators=(",", ":"))


def rounded(figure: Any) -> Any:
    return float(f"{figure:.6g}") if isinstance(figure, float) else figure


def main() -> None:
    SHIPPED.mkdir(exist_ok=True)
    sizes = {}
    for experiment, (name, wanted) in SELECTION.items():
        text = "\n".join(rows(name, wanted)) + "\n"
        (SHIPPED / f"{experiment}.jsonl").write_text(text)
        sizes[experiment] = (text.count("\n"), len(text))
    print(json.dumps(sizes, indent=1))
    if (num_bytes := sum(size for _, size in sizes.values())) > MAX_BYTES:
        raise SystemExit(f"the files have {num_bytes:,} bytes; the limit is {MAX_BYTES:,}")


if __name__ == "__main__":
    main()
