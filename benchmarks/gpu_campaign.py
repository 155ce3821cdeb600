"""Runs the tests and measurements for which a host has GPUs, several steps at the
same time if they fit.

    gpu_campaign.py OUT                 # as many steps as fit in --seconds
    gpu_campaign.py OUT --from layouts  # this step and those after it
    gpu_campaign.py OUT --only rounds   # some steps
    gpu_campaign.py OUT --small         # on a CPU, to check that it runs

step            GPUs    s  runs
parallel-tests     2  120  GPU tests of parallel, and those of measure for two
other-tests        1  200  those of kernels, measure, bench, train, calibrate
calibration        1  350  calibrates one GPU and its host
rounds             2  110  data_parallel_rounds.py: our wrappers and torch's
layouts            2  170  layout_rows.py: Llama 3 8B and one long sequence
blocks2            2   90  data_parallel_rounds.py: ZeRO 3 next to fully_shard
tensor2            2   90  tensor_parallel_campaign.py: ours next to torch's
tensor4            4   90  the same on four GPUs
sharded4           4   80  layout_rows.py: ZeRO 3 next to torch's fully_shard
pairs4             4  120  layout_rows.py: two axes at once
pipelines4         4  300  layout_rows.py: schedules next to torch's
bert4              4   60  layout_rows.py: BERT with four stages
products           1   90  products_in_steps.py: products in a step and alone
sequences2         2   90  layout_rows.py: tensor parallel, several sequences
sequences4         4  120  the same on four GPUs, and with ZeRO 3
llama4             4  200  layout_rows.py: Llama 3 8B under each layout
validation         2  240  host times, then validation/after_two_gpus.toml
validation4        4  400  links and contention, then four lists of rows; takes
                           the rest from calibration, which must have run
pipelines          2  170  layout_rows.py: 1F1B and ZBV, BERT and a decoder

A step starts when the steps before it have started and enough GPUs are free. It
gets its share of the CPU cores. A step that fails or reaches its limit does not
end the run, but then the exit status is 1. While a step runs, its records are
copied to OUT/STEP.jsonl, its hardware file to OUT/STEP-hardware.json and all
output to OUT/log.txt, so that an interrupted run keeps them. Steps work in
folders of --work. A repeated step skips rows that are finished there: delete
its folder to measure them again. CUDA_VISIBLE_DEVICES limits the GPUs.
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
POLL_S = 1.0  # between two looks at the steps that run
SMALL_GPUS = ["0", "1", "2", "3"]  # with --small: so many that every step can start
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
    limit    seconds after which the step is stopped
    small    additional arguments on a CPU
    on_gpus  additional arguments on GPUs
    """

    gpus: int
    command: Sequence[str]
    limit: int
    small: Sequence[str] = ()
    on_gpus: Sequence[str] = ()


def tests(gpus: int, workers: int, paths: Sequence[str]) -> Step:
    pytest = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--timeout", "100"]
    pytest += [str(ROOT / "tests" / path) for path in paths]
    return Step(gpus, pytest, 220, small=["-n", "2"], on_gpus=["-n", str(workers)])


def rounds(parts: Sequence[str]) -> Step:
    script = str(HERE / "data_parallel_rounds.py")
    command = [script, "{work}", "--seconds", "{seconds}", "--only", *parts]
    small = ["--size", "nano", "--batch", "2", "--steps", "2", "--device", "cpu"]
    return Step(2, command, 150, small=small)


def rows(gpus: int, limit: int, parts: Sequence[str], only: Sequence[str] = ("",)) -> Step:
    script = str(HERE / "layout_rows.py")
    command = [script, "{work}", "--gpus", str(gpus), "--seconds", "{seconds}"]
    return Step(gpus, [*command, "--parts", *parts, "--only", *only], limit, small=["--small"])


def tensor(gpus: int) -> Step:
    script = str(HERE / "tensor_parallel_campaign.py")
    ways = ["one GPU", "plain", "plain graph", "overlapped", "overlapped graph", "torch"]
    on_gpus = ["--ranks", str(gpus)]
    return Step(gpus, [script, "--only", *ways], 160, small=["--small"], on_gpus=on_gpus)


def validation(gpus: int, limit: int, parts: Sequence[str], base: str = "") -> Step:
    """Returns a validation of some parts.

    base  the hardware file with what these parts do not calibrate
    """
    command = [str(HERE / "validation_campaign.py"), "{work}", "--gpus", str(gpus)]
    on_gpus = ["--now", "--parts", *parts, *(["--from", base] if base else [])]
    return Step(gpus, command, limit, small=["--trial"], on_gpus=on_gpus)


def steps() -> dict[str, Step]:
    h200 = str(ROOT / "hardware" / "h200-sxm.json")
    calibrated = "{shared}/calibration/hardware.json"
    validated_on_four = ["links", "contention", *VALIDATED_ON_FOUR]
    return {
        "parallel-tests": tests(2, 8, TWO_GPU_TESTS),
        "other-tests": tests(1, 10, OTHER_TESTS),
        "calibration": validation(1, 450, ["calibrate"]),
        "rounds": rounds(["narrow", "small", "wide"]),
        "layouts": rows(
            2, 240, ["llama", "context"], ["none", "tp2 overlap", "ulysses", "dp2 zero2"]
        ),
        "blocks2": rounds(["blocks"]),
        "tensor2": tensor(2),
        "tensor4": tensor(4),
        "sharded4": rows(4, 120, ["sharded"]),
        "pairs4": rows(4, 180, ["pairs"]),
        "pipelines4": rows(4, 400, ["pipeline"]),
        "bert4": rows(4, 90, ["bert"], ["1 x", "4 x"]),
        "products": Step(1, [str(HERE / "products_in_steps.py"), "{work}"], 150, small=["--small"]),
        "sequences2": rows(2, 150, ["sequences"]),
        "sequences4": rows(4, 200, ["sequences"]),
        "llama4": rows(4, 240, ["llama"]),
        "validation": validation(2, 330, ["host", "after_two_gpus"], h200),
        "validation4": validation(4, 480, validated_on_four, calibrated),
        "pipelines": rows(2, 260, ["bert", "pipeline"], ["1f1b", "zbv"]),
    }


class Running:
    """A step that runs on some GPUs of the host. `result` says how it ended."""

    def __init__(
        self, name: str, step: Step, gpus: set[int], arguments: argparse.Namespace, left: float
    ):
        self.name, self.gpus, self.result = name, gpus, ""
        self.limit, self.started = min(step.limit, left), time.monotonic()
        self.work, self.out = arguments.work / name, arguments.out
        self.work.mkdir(parents=True, exist_ok=True)
        self.log = self.work / "log.txt"
        values = {"work": self.work, "shared": arguments.work, "seconds": int(self.limit - STOP_S)}
        command = [*step.command, *(step.small if arguments.small else step.on_gpus)]
        self.process = self._start([part.format_map(values) for part in command], arguments)
        os.sched_setaffinity(self.process.pid, cores_of(gpus, len(arguments.gpus)))

    def _start(self, command: list[str], arguments: argparse.Namespace) -> subprocess.Popen[bytes]:
        with self.log.open("a") as log:
            log.write(f"== {self.name}: python {' '.join(command)}\n")
            log.flush()
            return subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._environment(arguments),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its processes can be stopped together
            )

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
            "CUDA_VISIBLE_DEVICES": ",".join(arguments.gpus[gpu] for gpu in sorted(self.gpus)),
        }

    def poll(self) -> str:
        """Copies new results, and stops a step that has reached its limit. Returns `result`, which is
        empty while the step runs.
        """
        self.copy_results()
        status = self.process.poll()
        if status is not None:
            self.result = f"failed with {status}" if status else "ok"
        elif time.monotonic() - self.started > self.limit:
            self.stop()
            self.result = f"stopped at its limit of {self.limit:.0f} s"
        return self.result

    def stop(self) -> None:
        """Interrupts the step and all its processes; kills them if that takes too long."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def copy_results(self) -> int:
        """Copies the records to one file of OUT, and the hardware file; returns how many records."""
        parts = [path.read_bytes() for path in sorted(self.work.rglob("*.jsonl"))]
        target = self.out / f"{self.name}.jsonl"
        if parts and (not target.exists() or target.stat().st_size != sum(map(len, parts))):
            target.write_bytes(b"".join(parts))
        hardware = self.work / "hardware.json"
        if hardware.exists():
            shutil.copy(hardware, self.out / f"{self.name}-hardware.json")
        return sum(part.count(b"\n") for part in parts)

    def report(self) -> str:
        """Prints the end of the step's output, and returns its result as one line."""
        num_rows = self.copy_results()
        output = self.log.read_text(errors="replace").splitlines()
        print(f"\n== {self.name}", *output[-SHOWN_LINES:], sep="\n")
        seconds = time.monotonic() - self.started
        line = f"{self.name}: {self.result}, {seconds:.0f} s, {num_rows} rows"
        print(line, flush=True)
        return line


def cores_of(gpus: set[int], total: int) -> set[int]:
    """Returns the CPU cores of some GPUs: each GPU of the host has the same number. If there
    are fewer cores than GPUs, some get all of them.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // total)
    own = {core for gpu in gpus for core in cores[gpu * share : (gpu + 1) * share]}
    return own or set(cores)


class Run:
    """Runs steps one after the other, or beside each other if the GPUs allow it.

    results  a line about each step that has ended or could not be started
    failed   True if a step failed or was stopped
    """

    def __init__(self, known: dict[str, Step], arguments: argparse.Namespace):
        self.known, self.arguments = known, arguments
        self.end = time.monotonic() + arguments.seconds
        self.free = set(range(len(arguments.gpus)))
        self.running: list[Running] = []
        self.results: list[str] = []
        self.failed = False

    def run(self, names: Sequence[str]) -> None:
        waiting = list(names)
        try:
            while waiting or self.running:
                while waiting and self._start_or_refuse(waiting[0]):
                    del waiting[0]
                time.sleep(POLL_S)
                for each in [each for each in self.running if each.poll()]:
                    self._finish(each)
                self._write_log()
        finally:  # after an interruption
            for each in self.running:
                each.stop()

    def _start_or_refuse(self, name: str) -> bool:
        """Returns False if the step has to wait for GPUs."""
        step, left, total = self.known[name], self.end - time.monotonic(), len(self.arguments.gpus)
        # a CPU has no GPUs to share: one step after the other
        needed = total if self.arguments.small else step.gpus
        if needed > total:
            self.results.append(f"{name}: not started, needs {needed} GPUs")
        elif left < LEAST_S:
            self.results.append(f"{name}: not started, {max(0.0, left):.0f} s are left")
        elif needed <= len(self.free):
            gpus = set(sorted(self.free)[:needed])
            self.free -= gpus
            self.running.append(Running(name, step, gpus, self.arguments, left))
        else:
            return False
        return True

    def _finish(self, step: Running) -> None:
        self.running.remove(step)
        self.free |= step.gpus
        self.failed |= step.result != "ok"
        self.results.append(step.report())

    def _write_log(self) -> None:
        logs = sorted(self.arguments.work.glob("*/log.txt"))
        text = "\n".join(path.read_text(errors="replace") for path in logs)
        (self.arguments.out / "log.txt").write_text(text)


def visible_gpus() -> list[str]:
    """Returns this process's GPUs as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return chosen.split(",")[:count] if chosen else [str(gpu) for gpu in range(count)]


def main() -> None:
    known = steps()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--only", nargs="+", choices=known, metavar="STEP", help="these steps, in this order"
    )
    chosen.add_argument(
        "--from", dest="first", choices=known, metavar="STEP", help="this step and those after it"
    )
    parser.add_argument("--seconds", type=float, default=570, help="for all steps [570]")
    parser.add_argument("--small", action="store_true", help="small sizes, on a CPU")
    work = Path(tempfile.gettempdir()) / "gpu_campaign"
    parser.add_argument("--work", type=Path, default=work, help=f"[{work}]")
    arguments = parser.parse_args()
    arguments.gpus = SMALL_GPUS if arguments.small else visible_gpus()
    if not arguments.gpus:
        parser.error("this machine has no GPU: give --small to check that every step runs")
    for folder in ("out", "work"):
        path = getattr(arguments, folder).absolute()
        if path.exists() and not path.is_dir():
            parser.error(f"{path} is a file: give a folder")
        path.mkdir(parents=True, exist_ok=True)
        setattr(arguments, folder, path)
    first = list(known).index(arguments.first) if arguments.first else 0
    run = Run(known, arguments)
    run.run(arguments.only or list(known)[first:])
    print("\n== results", *run.results, sep="\n", flush=True)
    sys.exit(int(run.failed))


if __name__ == "__main__":
    main()
