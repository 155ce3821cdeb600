"""Runs the checks and measurements for which a host has GPUs, several at the same time if they fit.

    python benchmarks/gpu_campaign.py OUT                      # as many steps as fit in --seconds
    python benchmarks/gpu_campaign.py OUT --from validation    # this step and those after it
    python benchmarks/gpu_campaign.py OUT --only rounds        # some steps
    python benchmarks/gpu_campaign.py OUT --small              # on a CPU, to check that every step runs

| step | GPUs | runs | seconds |
| --- | ---: | --- | ---: |
| parallel-tests | 2 | GPU tests of parallel, and those of measure that need two GPUs | 120 |
| other-tests | 1 | GPU tests of kernels, measure, bench, train and calibrate | 200 |
| calibration | 1 | calibrates one GPU and its host | 150 |
| rounds | 2 | data_parallel_rounds.py: wrappers next to one GPU and torch's, 2.7b and small | 110 |
| layouts | 2 | layout_rows.py: Llama 3 8B and one long sequence under tp2, cp2 and dp2 | 170 |
| tensor2, tensor4 | 2, 4 | tensor_parallel_campaign.py: ours next to torch's | 90 |
| sharded4 | 4 | layout_rows.py: ZeRO 3 next to torch's fully_shard | 80 |
| pairs4 | 4 | layout_rows.py: two axes at once | 120 |
| pipelines4 | 4 | layout_rows.py: schedules next to torch's | 300 |
| bert4 | 4 | layout_rows.py: BERT with four stages | 60 |
| llama4 | 4 | layout_rows.py: Llama 3 8B under each layout | 200 |
| validation | 2 | host times of wrappers, then the rows of validation/after_two_gpus.toml | 240 |
| validation4 | 4 | links and contention, then the rows of five lists | 400 |
| pipelines | 2 | layout_rows.py: 1F1B and ZBV next to torch's, BERT and a decoder | 170 |

A step starts when the steps before it have started and enough GPUs are free. It gets its share of
the CPU cores. A step that fails or reaches its limit does not end the run. While a step runs, its
records are copied to OUT/STEP.jsonl and its output to OUT/log.txt, so that an interrupted run keeps
them. Steps work in a folder outside OUT; a repeated step skips the rows that are finished there.
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

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
LEAST_S = 25  # a step is not started with less time
SHOWN_LINES = 40  # of a step's output, on the screen
STOP_S = 10  # a step has this long to stop after its limit, then it is killed
TWO_GPU_TESTS = ("parallel", "measure/test_collectives.py", "measure/test_transfer.py")
OTHER_TESTS = ("kernels", "measure", "bench", "train", "calibrate")
VALIDATED_ON_FOUR = (
    "four_gpus",
    "after_two_gpus,last_one_gpu,unseen_one_gpu",  # at the same time, on GPUs of their own
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the run.

    gpus     how many it needs
    command  arguments of Python. {work} is the step's folder, {shared} that of all steps, {seconds}
             its time
    small    additional arguments on a CPU
    limit    seconds after which the step is stopped
    on_gpus  additional arguments on GPUs
    """

    gpus: int
    command: Sequence[str]
    small: Sequence[str]
    limit: int
    on_gpus: Sequence[str] = ()


def tests(gpus: int, workers: int, paths: Sequence[str]) -> Step:
    pytest = ("-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--timeout", "100")
    paths = [str(ROOT / "tests" / path) for path in paths]
    return Step(gpus, [*pytest, "-n", str(workers), *paths], ["-n", "2"], 220)


def rows(gpus: int, limit: int, parts: Sequence[str], only: Sequence[str] = ()) -> Step:
    script = str(HERE / "layout_rows.py")
    command = [script, "{work}", "--gpus", str(gpus), "--seconds", "{seconds}", "--parts", *parts]
    return Step(gpus, [*command, *(["--only", *only] if only else [])], ["--small"], limit)


def tensor(gpus: int) -> Step:
    script = str(HERE / "tensor_parallel_campaign.py")
    ways = ["one GPU", "plain", "overlapped", "torch"]
    return Step(
        gpus, [script, "--ranks", str(gpus), "--only", *ways], ["--ranks", "2", "--small"], 140
    )


def validation(gpus: int, limit: int, parts: Sequence[str]) -> Step:
    script = str(HERE / "validation_campaign.py")
    command = [script, "{work}", "--gpus", str(gpus)]
    on_gpus = ["--now", "--parts", *parts]
    return Step(gpus, command, ["--trial"], limit, on_gpus)


def starting_from(step: Step, file: str) -> Step:
    """Returns a validation that takes from a hardware file what it does not calibrate itself."""
    return dataclasses.replace(step, on_gpus=[*step.on_gpus, "--from", file])


def steps() -> dict[str, Step]:
    two_gpus = validation(2, 330, ["host", "after_two_gpus"])
    four_gpus = validation(4, 480, ["links", "contention", *VALIDATED_ON_FOUR])
    calibrated = "{shared}/calibration/hardware.json"
    return {
        "parallel-tests": tests(2, 8, TWO_GPU_TESTS),
        "other-tests": tests(1, 10, OTHER_TESTS),
        "calibration": validation(1, 240, ["calibrate"]),
        "rounds": Step(
            2,
            [
                str(HERE / "data_parallel_rounds.py"), "{work}", "--seconds", "{seconds}",
                "--only", "narrow", "small", "wide",
            ],
            ["--size", "nano", "--batch", "2", "--steps", "2", "--device", "cpu"],
            150,
        ),
        "layouts": rows(
            2, 240, ["llama", "context"], ["none", "tp2 overlap", "ulysses", "dp2 zero2"]
        ),
        "tensor2": tensor(2),
        "tensor4": tensor(4),
        "sharded4": rows(4, 120, ["sharded"]),
        "pairs4": rows(4, 180, ["pairs"]),
        "pipelines4": rows(4, 340, ["pipeline"]),
        "bert4": rows(4, 90, ["bert"], ["1 x", "4 x"]),
        "llama4": rows(4, 240, ["llama"]),
        "validation": starting_from(two_gpus, str(ROOT / "hardware" / "h200-sxm.json")),
        "validation4": starting_from(four_gpus, calibrated),
        "pipelines": rows(2, 260, ["bert", "pipeline"], ["1f1b", "zbv"]),
    }  # fmt: skip


class Running:
    """A step that runs on some GPUs of the host."""

    def __init__(
        self, name: str, step: Step, gpus: set[int], arguments: argparse.Namespace, left: float
    ):
        self.name, self.gpus = name, gpus
        self.limit, self.started = min(step.limit, left), time.monotonic()
        self.work, self.out = arguments.work / name, arguments.out
        self.work.mkdir(parents=True, exist_ok=True)
        command = [*step.command, *(step.small if arguments.small else step.on_gpus)]
        values = {"work": self.work, "shared": arguments.work, "seconds": int(self.limit - STOP_S)}
        command = [part.format_map(values) for part in command]
        self.log = self.work / "log.txt"
        with self.log.open("a") as log:
            log.write(f"== {name}: python {' '.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._environment(arguments),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its processes can be stopped together
            )
        if not arguments.small:
            os.sched_setaffinity(self.process.pid, cores_of(gpus, arguments.gpus))

    def _environment(self, arguments: argparse.Namespace) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        temporary = self.work / "tmp"  # tests of other steps would wait for its locks
        temporary.mkdir(exist_ok=True)
        return {
            **os.environ,
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
            "OUT": str(self.work),
            "TMPDIR": str(temporary),
            "TORCHINDUCTOR_CACHE_DIR": str(arguments.work / "inductor"),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, sorted(self.gpus))),
        }

    def has_ended(self) -> bool:
        """Returns whether the step has ended, which it has to at its limit."""
        self._copy_results()
        if self.process.poll() is not None:
            self.result = (
                "ok" if not self.process.returncode else f"failed with {self.process.returncode}"
            )
            return True
        if time.monotonic() - self.started < self.limit:
            return False
        self.result = f"stopped at its limit of {self.limit:.0f} s"
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return True

    def _copy_results(self) -> int:
        """Copies the records to one file of OUT; returns their number."""
        parts = [path.read_bytes() for path in sorted(self.work.rglob("*.jsonl"))]
        target = self.out / f"{self.name}.jsonl"
        if parts and (not target.exists() or target.stat().st_size != sum(map(len, parts))):
            target.write_bytes(b"".join(parts))
        hardware = self.work / "hardware.json"
        if hardware.exists():
            shutil.copy(hardware, self.out / "hardware.json")
        return sum(part.count(b"\n") for part in parts)

    def report(self) -> str:
        """Prints the end of the step's output, and returns its result as one line."""
        rows = self._copy_results()
        output = self.log.read_text(errors="replace").splitlines()
        print(f"\n== {self.name}", *output[-SHOWN_LINES:], sep="\n", flush=True)
        return f"{self.name}: {self.result}, {time.monotonic() - self.started:.0f} s, {rows} rows"


def cores_of(gpus: set[int], total: int) -> set[int]:
    """Returns the CPU cores of some GPUs: each GPU of the host has the same number."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // total
    return {core for gpu in gpus for core in cores[gpu * share : (gpu + 1) * share]}


def run(names: list[str], known: dict[str, Step], arguments: argparse.Namespace) -> list[str]:
    """Runs steps; returns a line about each."""
    end = time.monotonic() + arguments.seconds
    free, running, results = set(range(arguments.gpus)), list[Running](), []
    while names or running:
        while names:
            step, left = known[names[0]], end - time.monotonic()
            # a CPU has no GPUs to share: one step after the other
            needed = arguments.gpus if arguments.small else step.gpus
            if needed > arguments.gpus or left < LEAST_S:
                reason = f"needs {needed} GPUs" if left > LEAST_S else f"{left:.0f} s are left"
                results.append(f"{names.pop(0)}: not started, {reason}")
            elif needed <= len(free):
                gpus = set(sorted(free)[:needed])
                free -= gpus
                running.append(Running(names.pop(0), step, gpus, arguments, left))
            else:
                break
        time.sleep(1)
        for each in [each for each in running if each.has_ended()]:
            running.remove(each)
            free |= each.gpus
            results.append(each.report())
            print(results[-1], flush=True)
        logs = [
            path.read_text(errors="replace") for path in sorted(arguments.work.glob("*/log.txt"))
        ]
        (arguments.out / "log.txt").write_text("\n".join(logs))
    return results


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
    parser.add_argument("--gpus", type=int, default=0, help="all by default")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpu_campaign")
    arguments = parser.parse_args()
    arguments.gpus = arguments.gpus or torch.cuda.device_count()
    if arguments.small:
        arguments.gpus = 4
    elif not arguments.gpus:
        sys.exit("this machine has no GPU: give --small to check that every step runs")
    arguments.out = arguments.out.absolute()
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = list(known)
    names = arguments.only or names[names.index(arguments.first or names[0]) :]
    print("\n== results", *run(names, known, arguments), sep="\n", flush=True)


if __name__ == "__main__":
    main()
