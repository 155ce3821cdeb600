"""The facts at the top of a page: the machine, the software, the number of rows."""

import dataclasses

from stepgauge.report.facts import measured_where, page_facts

MACHINE = {
    "device": "Test GPU", "device_bytes": 80 * 2**30, "cpu": "Test CPU", "cores": 8, "os": "Linux 6",
    "python": "3.12.1", "torch": "2.13.0", "triton": "3.8.0", "stepgauge": "0.1", "commit": "abc",
}  # fmt: skip


def test_facts_name_machine_software_and_times(record):
    rows = [
        dataclasses.replace(record(), environment=MACHINE, created=f"2026-01-0{day}T00:00:00Z")
        for day in (2, 1)
    ]
    assert measured_where(rows) == {
        "Device": "Test GPU, 80 GiB",
        "Host": "Test CPU, 8 cores, Linux 6",
        "Software": "Python 3.12.1, torch 2.13.0, Triton 3.8.0, stepgauge 0.1",
        "Commit": "abc",
        "Measured": "2026-01-01 00:00 UTC to 2026-01-02 00:00 UTC",
    }


def test_unknown_facts_are_left_out(record):
    failed = dataclasses.replace(record(status="failed", note="why"), environment={})
    assert measured_where([failed]) == {}
    assert measured_where(
        [dataclasses.replace(record(), environment={"device": "Test GPU"}), failed]
    ) == {"Device": "Test GPU"}


def test_the_machine_is_that_of_measured_rows_if_there_are_any(record):
    measured = dataclasses.replace(record(), environment=MACHINE)
    predicted = dataclasses.replace(
        record(), environment={"device": "Laptop CPU"}, provenance="modelled"
    )
    assert measured_where([measured, predicted])["Device"] == "Test GPU, 80 GiB"
    assert measured_where([predicted]) == {"Device": "Laptop CPU"}


def test_disturbed_rows_are_counted_among_the_measured_rows(record):
    rows = [record(step=[1.0, 9.0]), record(size="tiny", step=[1.0, 1.0])]
    predicted = [dataclasses.replace(row, provenance="modelled") for row in rows]
    text = page_facts([*rows, *predicted])["Disturbed"]
    assert text.startswith("1 of 2 measured rows (") and "--fresh" not in text
    assert "--fresh" in page_facts(rows[:1])["Disturbed"]
