"""Calibrates the GPUs of one host, then predicts, runs and compares layouts that no calibration saw.

    python benchmarks/validation_campaign.py OUT --gpus 4               # everything, 20 minutes
    python benchmarks/validation_campaign.py OUT --gpus 4 --parts calibrate two_gpus
    python benchmarks/validation_campaign.py OUT --trial                # on a CPU, to try it

Parts run from the most GPUs to one, rows from the most telling on. Each part goes on where it
stopped: run it again after a limit has ended it. OUT then has
hardware.json, the run of each part with its report.html, and summary.json: of each part the errors
by term. Predictions are on disk before a part's first row is run; what is expected to miss stands
in the lists of benchmarks/validation/. The targets: mean absolute error of the step 1.8 % and no
row above 5, of the peak 0.5 % and 1.5, the fastest of a group ranked first in 95 % of the groups.
"""

import argparse
import json
import sys
from pathlib import Path

from stepgauge import cli
from stepgauge.spec.store import RunStore
from stepgauge.validate.errors import errors, groups, sentence
from stepgauge.validate.views import error_table

LISTS = Path(__file__).parent / "validation"
PARTS = {"four_gpus": 4, "two_gpus": 2, "one_gpu": 1}  # in their order; how many GPUs each needs


def calibrate(out: Path, gpus: int, trial: bool) -> int:
    ranks = ["2"] if trial else [str(number) for number in (2, 4) if number <= gpus]
    return cli.run([
        "calibrate", str(out / "hardware.json"), "--out", str(out / "calibration"),
        "--device", "cpu" if trial else "cuda", *(["--ranks", *ranks] if ranks else []),
    ])  # fmt: skip


def validate(out: Path, part: str) -> int:
    return cli.run([
        "validate", str(LISTS / f"{part}.toml"), "--hardware", str(out / "hardware.json"),
        "--out", str(out / part),
    ])  # fmt: skip


def summarise(out: Path, parts: list[str]) -> None:
    """The errors of each part that has run, and of all."""
    every, told = [], {}
    for part in parts:
        if (out / part).is_dir():
            records = RunStore(out / part).read().latest()
            told[part] = {
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
    parser.add_argument("--parts", nargs="+", choices=["calibrate", *PARTS])
    parser.add_argument("--trial", action="store_true", help="on two processes of a CPU")
    asked = parser.parse_args()
    lists = ["trial"] if asked.trial else [n for n, least in PARTS.items() if least <= asked.gpus]
    parts = asked.parts or ["calibrate", *lists]
    failed = []
    for part in parts:
        status = (
            calibrate(asked.out, asked.gpus, asked.trial)
            if part == "calibrate"
            else validate(asked.out, part)
        )
        failed += [part] if status else []
    summarise(asked.out, lists)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
