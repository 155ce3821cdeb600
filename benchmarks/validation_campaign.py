"""Calibrates the GPUs of a host, then predicts and measures layouts that calibration has not seen.

    python benchmarks/validation_campaign.py OUT --gpus 4               # everything, 20 minutes
    python benchmarks/validation_campaign.py OUT --gpus 4 --parts calibrate two_gpus
    python benchmarks/validation_campaign.py OUT --gpus 2 --parts calibrate traces fresh_two_gpus \\
        fresh_one_gpu,fresh_other_gpu        # the last two at the same time, on GPUs of their own
    python benchmarks/validation_campaign.py OUT --gpus 2 --from hardware/h200-sxm.json --blocks \\
        --parts contention blocks_one_gpu,blocks_other_gpu blocks_two_gpus
    python benchmarks/validation_campaign.py OUT --gpus 2 --from hardware/h200-sxm.json --now \\
        --parts today now_two_gpus now_one_gpu,now_other_gpu            # seven minutes
    python benchmarks/validation_campaign.py OUT --trial                # on a CPU, to check that it runs

| part | what it does |
| --- | --- |
| calibrate | calibrates the machine |
| contention, links, host | calibrates only this; the rest comes from --from |
| today | calibrates contention, compiled rotation and the host time of compiled blocks |
| traces | traces two layouts (kernels_beside_collectives.py) |
| other names | predicts and measures the rows of benchmarks/validation/NAME.toml |

--blocks times a few blocks of each network before the rows are predicted. --now times the network's
operations at their shapes, and the host before each eager row. After an interruption the same
command continues where it stopped. Every prediction is on disk before its row is measured.

Writes OUT/hardware.json, a folder per part with its report.html, and OUT/summary.json with the
errors of each part by term. The targets: for the step a mean absolute error of 1.8 % and none above
5 %, for the peak 0.5 % and 1.5 %, and the fastest row ranked first in 95 % of the groups. The lists
say which rows are expected to miss them.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from stepgauge import cli
from stepgauge.report.prediction_errors import errors, groups, sentence
from stepgauge.report.prediction_tables import error_table
from stepgauge.spec.store import RunStore

HERE = Path(__file__).parent
# Lists that run by default, in this order, and how many GPUs each needs.
DEFAULT_LISTS = {"four_gpus": 4, "two_gpus": 2, "one_gpu": 1}
# Part -> what it calibrates; everything if the list is empty.
CALIBRATED: dict[str, list[str]] = {
    "calibrate": [],
    "contention": ["contention"],
    "links": ["links"],
    "host": ["host"],
    # What an older file may not have. The host of eager rows is not here: --now times it for each row.
    "today": ["contention", "compiled heads", "host compiled", "host blocks"],
}


def calibrate(out: Path, gpus: int, trial: bool, only: list[str]) -> int:
    ranks = ["2"] if trial else [str(number) for number in (2, 4) if number <= gpus]
    return cli.run([
        "calibrate", str(out / "hardware.json"), "--out", str(out / "calibration"),
        "--device", "cpu" if trial else "cuda", *(["--ranks", *ranks] if ranks else []),
        *(["--only", *only] if only else []),
    ])  # fmt: skip


def validate(out: Path, part: str, options: list[str]) -> int:
    return cli.run([
        "validate", str(HERE / "validation" / f"{part}.toml"),
        "--hardware", str(out / "hardware.json"), "--out", str(out / part), *options,
    ])  # fmt: skip


def gpus_of(part: str) -> int:
    """Returns how many GPUs a part needs if its lists run at the same time, as their names say."""
    return sum(2 if name.endswith("two_gpus") else 1 for name in part.split(","))


def run_in_parallel(out: Path, parts: list[str], gpus: int, options: list[str]) -> int:
    """Runs each part in a process of its own, which sees as many GPUs as the part needs and has their
    share of the CPU cores. Returns the highest exit status.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))
    names, cores = visible.split(","), sorted(os.sched_getaffinity(0))
    started, first = [], 0
    for part in parts:
        end = first + gpus_of(part)
        process = subprocess.Popen(
            [sys.executable, __file__, str(out), "--parts", part, *options],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(names[first:end])},
        )
        own = cores[first * len(cores) // gpus : end * len(cores) // gpus]
        os.sched_setaffinity(process.pid, own or cores)
        started.append(process)
        first = end
    return max([process.wait() for process in started])


def run_part(out: Path, part: str, gpus: int, trial: bool, options: list[str]) -> int:
    """Runs a part and returns its exit status."""
    if part in CALIBRATED:
        return calibrate(out, gpus, trial, CALIBRATED[part])
    if part == "traces":
        options = ["--trial"] if trial else []
        script = str(HERE / "kernels_beside_collectives.py")
        return subprocess.call([sys.executable, script, str(out / "traces"), *options])
    names = part.split(",")
    if len(names) > 1:
        return run_in_parallel(out, names, gpus, options)
    return validate(out, part, options)


def summarise(out: Path) -> None:
    """Writes the errors of each part that has run, and prints those of all parts."""
    all_records, summary = [], {}
    for path in sorted((HERE / "validation").glob("*.toml")):
        if (out / path.stem).is_dir():
            records = RunStore(out / path.stem).read().latest()
            summary[path.stem] = {
                "rows": json.loads(error_table(records).to("json")),
                "groups": [group.rank for group in groups(errors(records))],
            }
            all_records += records
    (out / "summary.json").write_text(
        json.dumps({**summary, "all": sentence(all_records)}, indent=1)
    )
    print(sentence(all_records))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--parts", nargs="+", help="calibrate and the default lists by default")
    parser.add_argument("--from", dest="base", type=Path, help="start from this hardware file")
    parser.add_argument("--blocks", action="store_true", help="time a few blocks of each network")
    parser.add_argument(
        "--now", action="store_true", help="time the operations and hosts of the rows"
    )
    parser.add_argument("--trial", action="store_true", help="small, in two processes of a CPU")
    arguments = parser.parse_args()
    for part in arguments.parts or []:
        if "," in part and gpus_of(part) > arguments.gpus:
            parser.error(f"{part} needs {gpus_of(part)} GPUs, and --gpus is {arguments.gpus}")
    if arguments.base and not arguments.base.is_file():
        parser.error(f"--from {arguments.base}: there is no such hardware file")
    lists = (
        ["trial"]
        if arguments.trial
        else [n for n, least in DEFAULT_LISTS.items() if least <= arguments.gpus]
    )
    parts = arguments.parts or ["calibrate", *lists]
    hardware = arguments.out / "hardware.json"
    if arguments.base and not hardware.exists():
        arguments.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(arguments.base, hardware)
    options = [f"--{name}" for name in ("blocks", "now") if getattr(arguments, name)]
    failed = [
        p for p in parts if run_part(arguments.out, p, arguments.gpus, arguments.trial, options)
    ]
    summarise(arguments.out)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
