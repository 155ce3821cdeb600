"""Measures the kernels at a few anchor shapes on one H100, in under six minutes.

    PYTHONPATH=src python benchmarks/kernels/anchors.py OUT [--parts step adamw ...] [--trial]

| part | what it measures |
| --- | --- |
| step | 2.7b, 4 x 512, with our kernels, in bf16 and bf16-master, compiled and eager |
| attention, rms-norm, linear-cross-entropy, adamw | anchor shapes next to the installed peers |

Each part runs `stepgauge bench step` or `stepgauge bench kernel` in its own processes. Every kernel
is compared with its oracle. host_time.py measures what launches cost the host of a small network.

Writes OUT/anchors.jsonl (a record per line, with its part), OUT/tables.txt and OUT/decisions.json:
step times and their ratios, which decide between bf16 and bf16-master. Prints these, too. Exits
with status 1 if a row is wrong or has no time. --trial uses tiny shapes on a CPU.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

OURS = "--attention triton --norm triton --loss fused --optimizer fused"
STEP = "--batch 4 --context 512 --steps 20"


@dataclasses.dataclass(frozen=True)
class Run:
    """A command, its part, a label for its rows, and its limit in seconds."""

    part: str
    label: str
    seconds: int
    command: str
    environment: tuple[tuple[str, str], ...] = ()


def runs(trial: bool) -> list[Run]:
    big = "--size nano" if trial else "--size 2.7b"
    step = "--batch 1 --context 16 --steps 1 --seconds 0" if trial else STEP
    modes = "off" if trial else "on off"
    return [
        Run("step", "ours", 150, f"bench step {big} {step} {OURS} --precision bf16 bf16-master --compile {modes}"),
        *(Run(*each) for each in kernels(trial)),
    ]  # fmt: skip


def kernels(trial: bool) -> list[tuple[str, str, int, str]]:
    if trial:
        shapes = {
            "attention": "--batch 1 --heads 2 --sequence 32 --width 16 --peers fa2",
            "rms-norm": "--rows 16 --width 16 --peers torch",
            "linear-cross-entropy": "--tokens 16 --width 16 --vocabulary 64 --peers eager",
            "adamw": "--layers 1 --width 16 --dtype bf16 --peers torch masters",
        }
        return [
            (name, "", 60, f"bench kernel {name} {shape} --seconds 0")
            for name, shape in shapes.items()
        ]
    attention = "bench kernel attention --dtype bf16 --batch 1 --heads 16 --sequence 16384 --peers fa2 cudnn fa4"
    loss = "bench kernel linear-cross-entropy --dtype bf16 --passes both --peers compile eager"
    return [
        ("adamw", "fp32", 20, "bench kernel adamw --layers 24 --width 1280 --dtype fp32 --peers torch"),
        ("adamw", "bf16", 20, "bench kernel adamw --layers 24 --width 1280 --dtype bf16 --peers torch masters"),
        ("attention", "", 45, f"{attention} --width 64 128 --passes forward backward both --seconds 0.1"),
        ("attention", "D 256", 25, "bench kernel attention --dtype bf16 --batch 2 --heads 8 --sequence 4096"
         " --width 256 --peers fa2 cudnn --passes both --seconds 0.1"),
        ("rms-norm", "", 40, "bench kernel rms-norm --dtype bf16 --rows 2048 --width 2560 --passes both --peers torch"),
        ("rms-norm", "wide", 30, "bench kernel rms-norm --dtype bf16 --rows 50000 --width 4096 --peers torch quack"
         " --passes forward backward --seconds 0.1"),
        ("linear-cross-entropy", "", 45, f"{loss} --tokens 2048 --width 2560 --vocabulary 10000 --seconds 0.1"),
        ("linear-cross-entropy", "large", 60, "bench kernel linear-cross-entropy --dtype bf16 --passes both"
         " --tokens 16384 --width 4096 --vocabulary 128256 --peers eager --seconds 0.3"),
    ]  # fmt: skip


def measured(run: Run, out: Path, device: str, limit: float) -> list[dict]:
    """Runs the command and returns its records. After its limit, returns those measured so far."""
    folder = out / "runs" / f"{run.part}-{run.label or 'main'}-{time.time_ns()}".replace(" ", "")
    command = [sys.executable, "-m", "stepgauge", *run.command.split()]
    command += ["--device", device, "--out", str(folder)]
    with (out / "tables.txt").open("a") as tables:
        print(f"== {run.part} {run.label}: {run.command}", file=tables, flush=True)
        try:
            subprocess.run(
                command,
                stdout=tables,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(run.environment),
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            print(f"stopped at its limit of {limit:.0f} s", file=tables)
    store = folder / "records.jsonl"
    lines = store.read_text().splitlines() if store.exists() else []
    return [{"part": run.part, "label": run.label, **json.loads(line)} for line in lines]


def step_ms(rows: list[dict], **wanted: str) -> float | None:
    """Returns the step time of the first measured row with these fields."""
    for row in rows:
        if row["provenance"] != "measured":  # a prediction precedes the row that it predicts
            continue
        known = {**row["spec"], "part": row["part"], "label": row["label"]}
        found = row.get("metrics", {}).get("step_ms")
        if found and all(known.get(name) == value for name, value in wanted.items()):
            return found["median"]
    return None


def ratio(a: float | None, b: float | None) -> float | None:
    return round(a / b, 4) if a and b else None


def decisions(rows: list[dict]) -> dict:
    """Returns step times in ms, and the ratio of bf16 to bf16-master, by compile mode."""
    found: dict[str, float | None] = {}
    for mode in ("on", "off"):
        bf16, master = (
            step_ms(rows, part="step", compile=mode, precision=each)
            for each in ("bf16", "bf16-master")
        )
        found |= {f"bf16 compile={mode} ms": bf16, f"bf16-master compile={mode} ms": master}
        found[f"bf16 over bf16-master compile={mode}"] = ratio(bf16, master)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", default=[], help="all by default")
    parser.add_argument("--budget", type=float, default=350.0, help="seconds for all parts")
    parser.add_argument("--trial", action="store_true", help="tiny shapes on a CPU")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    start, rows, failed = time.monotonic(), [], []
    for run in runs(options.trial):
        if options.parts and run.part not in options.parts:
            continue
        left = options.budget - (time.monotonic() - start)
        limit = left if options.trial else min(run.seconds, left)
        device = "cpu" if options.trial else "cuda"
        found = measured(run, options.out, device, limit) if limit > 5 else []
        problems = [f"{row['status']}: {row['note']}" for row in found if row["status"] != "ok"]
        failed += [
            f"{run.part} {run.label}: {problem}"
            for problem in problems or ([] if found else ["no row"])
        ]
        rows += found
        with (options.out / "anchors.jsonl").open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in found)
        print(f"{time.monotonic() - start:4.0f} s  {run.part} {run.label}: {len(found)} rows", flush=True)  # fmt: skip
    figures = decisions(rows)
    (options.out / "decisions.json").write_text(json.dumps({**figures, "failed": failed}, indent=1))
    for name, value in figures.items():
        print(f"{name}: {value}")
    print(*failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
