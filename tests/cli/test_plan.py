"""`plan`: rows for other programs, and what it refuses."""

import json
from pathlib import Path

import pytest

from stepgauge.cli import console

HARDWARE = Path(__file__).parents[2] / "hardware"
SMALL = ("--size", "medium", "--context", "1024", "--gpus", "8", "--global-batch", "32")


def test_rows_are_modelled_records_of_bench_layout(stepgauge):
    status, out, err = stepgauge(
        "plan", *SMALL, "--precision", "bf16", "--tokens", "10B", "--top", "2", "--format", "json",
        "--hardware", HARDWARE / "dgx-h200.json",
    )  # fmt: skip
    assert status == 0, err
    rows = json.loads(out)
    assert [(row["kind"], row["provenance"]) for row in rows] == [("layout", "modelled")] * 2
    assert all(row["metrics"]["days"]["median"] > 0 for row in rows)
    assert {"terms", "memory"} <= rows[0]["tables"].keys()


def test_tables_fit_80_columns_and_say_once_what_rows_share(monkeypatch, stepgauge):
    tables = []
    monkeypatch.setattr("stepgauge.cli.plan.print_table", tables.append)
    asked = ("--top", "3", "--tokens", "1T", "--hardware", HARDWARE / "dgx-h100.json")
    assert stepgauge("plan", *SMALL, *asked)[0] == 0
    assert "tokens a step in fp32 on 8 x NVIDIA H100" in tables[0].caption
    assert "accumulation 1" in tables[0].caption and "accumulation" in tables[0].hidden
    for table in tables:
        parts = console._parts(table.for_eyes(), 80)
        assert parts and all(list(part.columns[:2]) == ["#", "layout"] for part in parts)
        for part in parts:
            every = range(len(part.columns))
            assert sum(console._width(part, n) + console.GAP for n in every) - console.GAP <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "many"), "tokens is 'many'; it must be a number such as 300B"),
        (("--top", "0"), "top is 0; it must be at least 1"),
        (("--num-experts", "8", "--experts-per-token", "2"), "num_experts is 8, which has no cost"),
        (("--d-model", "17"), "num_heads is 16, which does not divide d_model 17"),
    ],
)
def test_what_cannot_be_planned_is_told(stepgauge, arguments, said):
    status, _, err = stepgauge("plan", *SMALL, *arguments, "--hardware", HARDWARE / "dgx-h100.json")
    assert status == 2 and said in err


def test_a_machine_without_operations_or_a_base(stepgauge):
    status, _, err = stepgauge("plan", *SMALL, "--hardware", HARDWARE / "h200-nvlink.json")
    assert status == 2 and "has no operations" in err
