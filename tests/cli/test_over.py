"""`show --over`: merges rows that differ in only one field."""

import pytest

from stepgauge.cli.records import show
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.store import RunStore

NETWORK = ModelSpec(d_model=16, d_ff=32, num_layers=1, num_heads=2)


def run_of(folder, *rows, device=""):
    """Adds a record for each (seed, ms of each step, status) to the run."""
    store = RunStore(folder)
    store.prepare()
    for seed, ms, status in rows:
        metrics = {"step_ms": Sample.of(ms, "ms")} if ms else {}
        spec = StepSpec(model=NETWORK, seed=seed)
        store.append(
            Record.of(spec, status=status, environment={"device": device}, metrics=metrics)
        )
    return folder


def test_merged_figures_average_each_rows_mean_and_failed_rows_are_noted(tmp_path, capsys):
    rows = (1, [1.0, 3.0], "ok"), (2, [6.0], "ok"), (3, [], "failed")
    show(run_of(tmp_path, *rows), over="seed", format="csv")
    out, err = capsys.readouterr()
    head, row = out.splitlines()
    found = dict(zip(head.split(","), row.split(","), strict=True))
    assert found["seed"] == "1 2" and float(found["step ms mean"]) == 4.0
    assert "1 of 3 rows have no result and are left out" in err


def test_rows_without_any_result_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none of the 2 rows has a result"):
        show(run_of(tmp_path, (1, [], "failed"), (2, [], "oom")), over="seed")


def test_rows_of_two_devices_are_not_averaged(tmp_path, capsys):
    run_of(tmp_path, (1, [1.0], "ok"), (2, [3.0], "ok"), device="one GPU")
    run_of(tmp_path, (1, [10.0], "ok"), (2, [30.0], "ok"), device="another")
    show(tmp_path, over="seed", format="csv")
    head, *rows = capsys.readouterr().out.splitlines()
    found = [dict(zip(head.split(","), row.split(","), strict=True)) for row in rows]
    means = {row["measured on"]: float(row["step ms mean"]) for row in found}
    assert means == {"one GPU": 2.0, "another": 20.0}
