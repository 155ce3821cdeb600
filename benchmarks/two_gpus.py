"""Runs all checks and measurements that need two GPUs of one machine, the most valuable first.

    python benchmarks/two_gpus.py OUT                      # as many steps as fit in --seconds
    python benchmarks/two_gpus.py OUT --from validation    # this step and those after it
    python benchmarks/two_gpus.py OUT --only rounds        # some steps
    python benchmarks/two_gpus.py OUT --small              # on a CPU, to check that every step runs

| step | runs | seconds |
| --- | --- | ---: |
| tests | GPU tests of parallel, train, calibrate, and those of measure that need two GPUs | 120 |
| rounds | data_parallel_rounds.py: wrappers next to one GPU and torch's, 2.7b and small | 110 |
| layouts | layout_rows.py: Llama 3 8B and one long sequence under tp2, cp2 and dp2 | 170 |
| validation | host times of wrappers, then the rows of validation/after_two_gpus.toml | 240 |
| pipelines | layout_rows.py: 1F1B and ZBV next to torch's, BERT and a decoder | 170 |

So tests, rounds and layouts fit in one call of ten minutes, the other two in a second one. A step that
fails or reaches its limit does not end the run. While a step runs, its records are copied to
OUT/STEP.jsonl and its output to OUT/log.txt, so that an interrupted run keeps them. Steps work in a
folder outside OUT; a repeated step skips the rows that are finished there.
"""

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
LEAST_S = 25  # a step is not started with less time
SHOWN_LINES = 40  # of a step's output, on the screen
STOP_S = 10  # a step has this long to stop after its limit, then it is killed
TESTS = (
    "parallel",
    "train",
    "calibrate",
    "measure/test_collectives.py",
    "measure/test_transfer.py",
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the run.

    command  arguments of Python. {work} is the step's folder, {seconds} its time
    small    additional arguments, or others in their place, on a CPU
    limit    seconds after which the step is stopped
    """

    command: Sequence[str]
    small: Sequence[str]
    limit: int


def steps() -> dict[str, Step]:
    layout_rows = (str(HERE / "layout_rows.py"), "{work}", "--gpus", "2", "--seconds", "{seconds}")
    pytest = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--timeout", "100")
    return {
        "tests": Step(
            [*pytest, "-n", "8", *(str(ROOT / "tests" / path) for path in TESTS)], ["-n", "2"], 200
        ),
        "rounds": Step(
            [
                str(HERE / "data_parallel_rounds.py"), "{work}", "--seconds", "{seconds}",
                "--only", "narrow", "small", "wide",
            ],
            ["--size", "nano", "--batch", "2", "--steps", "2", "--device", "cpu"],
            150,
        ),
        "layouts": Step(
            [
                *layout_rows, "--parts", "llama", "context",
                "--only", "none", "tp2 overlap", "ulysses", "dp2 zero2",
            ],
            ["--small"],
            240,
        ),
        "validation": Step(
            [str(HERE / "validation_campaign.py"), "{work}", *_validation()], ["--trial"], 330
        ),
        "pipelines": Step(
            [*layout_rows, "--parts", "bert", "pipeline", "--only", "1f1b", "zbv"], ["--small"], 260
        ),
    }  # fmt: skip


def _validation() -> list[str]:
    """Returns the options of validation_campaign.py. Only the H200's file has links and contention of
    two ranks; another device is calibrated from scratch.
    """
    if not torch.cuda.is_available():
        return ["--gpus", "2"]
    options = ["--gpus", "2", "--now", "--parts"]
    if "H200" not in torch.cuda.get_device_name(0):
        return [*options, "calibrate", "after_two_gpus"]
    file = str(ROOT / "hardware" / "h200-sxm.json")
    return [*options, "host", "after_two_gpus", "--from", file]


def copy_results(work: Path, name: str, out: Path) -> int:
    """Copies a step's records to one file of OUT; returns their number."""
    parts = [path.read_bytes() for path in sorted(work.rglob("records.jsonl"))]
    target = out / f"{name}.jsonl"
    if parts and (not target.exists() or target.stat().st_size != sum(map(len, parts))):
        target.write_bytes(b"".join(parts))
    hardware = work / "hardware.json"
    if hardware.exists():
        shutil.copy(hardware, out / "hardware.json")
    return sum(part.count(b"\n") for part in parts)


def run(command: Sequence[str], work: Path, name: str, out: Path, log: TextIO, limit: float) -> str:
    """Runs a step and returns how it ended."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that its processes can be stopped together
    )
    end = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < end:
        time.sleep(1)
        copy_results(work, name, out)
    if process.poll() is not None:
        return "ok" if process.returncode == 0 else f"failed with {process.returncode}"
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"stopped at its limit of {limit:.0f} s"


def run_step(name: str, step: Step, arguments: argparse.Namespace, left: float) -> str:
    """Runs a step, prints the end of its output, and returns its result as one line."""
    limit = min(step.limit, left)
    if limit < LEAST_S:
        return f"{name}: not started, {left:.0f} s are left"
    work = arguments.work / name
    work.mkdir(parents=True, exist_ok=True)
    command = [*step.command, *(step.small if arguments.small else ())]
    command = [part.format(work=work, seconds=int(limit - STOP_S)) for part in command]
    path, started = arguments.out / "log.txt", time.monotonic()
    with path.open("a") as log:
        log.write(f"\n== {name}: python {' '.join(command)}\n")
        log.flush()
        begin = log.tell()
        ended = run(command, work, name, arguments.out, log, limit)
    rows = copy_results(work, name, arguments.out)
    with path.open(errors="replace") as log:
        log.seek(begin)
        print(f"\n== {name}", *log.read().splitlines()[-SHOWN_LINES:], sep="\n", flush=True)
    return f"{name}: {ended}, {time.monotonic() - started:.0f} s, {rows} rows"


def main() -> None:
    known = steps()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", choices=known, help="these steps, in this order")
    chosen.add_argument("--from", dest="first", choices=known, help="this step and those after it")
    parser.add_argument("--seconds", type=float, default=570, help="for all steps")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "two_gpus")
    arguments = parser.parse_args()
    if not arguments.small and (found := torch.cuda.device_count()) < 2:
        sys.exit(f"this machine has {found} GPUs; two are needed, or --small")
    arguments.out = arguments.out.absolute()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = list(known)
    names = arguments.only or names[names.index(arguments.first or names[0]) :]
    end, results = time.monotonic() + arguments.seconds, []
    for name in names:
        results.append(run_step(name, known[name], arguments, end - time.monotonic()))
        print(results[-1], flush=True)
    print("\n== results", *results, sep="\n", flush=True)


if __name__ == "__main__":
    main()
