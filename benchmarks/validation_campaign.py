"""Calibrates the GPUs of one host, then predicts, runs and compares layouts that no calibration saw.

    python benchmarks/validation_campaign.py OUT --gpus 4               # everything, 20 minutes
    python benchmarks/validation_campaign.py OUT --gpus 4 --parts calibrate two_gpus
    python benchmarks/validation_campaign.py OUT --gpus 2 --parts calibrate traces fresh_two_gpus \\
        fresh_one_gpu,fresh_other_gpu                                   # side by side, a GPU each
    python benchmarks/validation_campaign.py OUT --gpus 2 --from hardware/h200-sxm.json --blocks \\
        --parts contention blocks_one_gpu,blocks_other_gpu blocks_two_gpus
    python benchmarks/validation_campaign.py OUT --gpus 2 --from hardware/h200-sxm.json --now \\
        --parts today now_two_gpus now_one_gpu,now_other_gpu            # seven minutes
    python benchmarks/validation_campaign.py OUT --trial                # on a CPU, to try it

Parts are the lists of benchmarks/validation/; the calibration, or of it what changes from machine
to machine (contention, links, host; "today" is contention, compiled rotation and compiled hosts),
beside a file that is there; and traces of two layouts (kernels_beside_collectives.py). With --blocks a few blocks of
each network are timed before a list is predicted; with --now its operations at their shapes, and
before each eager row its host. Each part goes on where it stopped: run it again after a limit has
ended it. OUT then has hardware.json, the run of each part with its report.html, and summary.json: of
each part the errors by term. Predictions are on disk before a row is run; what is expected to miss
stands in the lists. The targets: mean absolute error of the step 1.8 % and no row above 5, of the
peak 0.5 % and 1.5, the fastest of a group ranked first in 95 % of the groups.
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
USUAL = {"four_gpus": 4, "two_gpus": 2, "one_gpu": 1}  # in their order; how many GPUs each needs


CALIBRATED: dict[str, list[str]] = {
    "calibrate": [],
    "contention": ["contention"],
    "links": ["links"],
    "host": ["host"],
    # what the file may not have; with --now each eager row's host is timed before it
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


def side_by_side(out: Path, parts: list[str], options: list[str]) -> int:
    """Each part in a process of its own, which sees one GPU."""
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(out), "--parts", part, *options],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)},
        )
        for gpu, part in enumerate(parts)
    ]
    return max([process.wait() for process in started])


def run_part(out: Path, part: str, gpus: int, trial: bool, options: list[str]) -> int:
    if part in CALIBRATED:
        return calibrate(out, gpus, trial, CALIBRATED[part])
    if part == "traces":
        options = ["--trial"] if trial else []
        script = str(HERE / "kernels_beside_collectives.py")
        return subprocess.call([sys.executable, script, str(out / "traces"), *options])
    names = part.split(",")
    if len(names) > 1:
        return side_by_side(out, names, options)
    return validate(out, part, options)


def summarise(out: Path) -> None:
    """The errors of each part that has run, and of all."""
    every, told = [], {}
    for path in sorted((HERE / "validation").glob("*.toml")):
        if (out / path.stem).is_dir():
            records = RunStore(out / path.stem).read().latest()
            told[path.stem] = {
                "rows": json.loads(error_table(records).to("json")),
                "groups": [group.rank for group in groups(errors(records))],
            }
            every += records
    (out / "summary.json").write_text(json.dumps({**told, "all": sentence(every)}, indent=1))
    print(sentence(every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--parts", nargs="+")
    parser.add_argument("--from", dest="base", type=Path, help="a hardware file to begin with")
    parser.add_argument("--blocks", action="store_true", help="time a few blocks of each network")
    parser.add_argument("--now", action="store_true", help="time shapes and hosts of the rows")
    parser.add_argument("--trial", action="store_true", help="on two processes of a CPU")
    asked = parser.parse_args()
    lists = ["trial"] if asked.trial else [n for n, least in USUAL.items() if least <= asked.gpus]
    parts = asked.parts or ["calibrate", *lists]
    here = asked.out / "hardware.json"
    if asked.base and not here.exists():
        asked.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(asked.base, here)
    options = [f"--{name}" for name in ("blocks", "now") if getattr(asked, name)]
    failed = [p for p in parts if run_part(asked.out, p, asked.gpus, asked.trial, options)]
    summarise(asked.out)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
