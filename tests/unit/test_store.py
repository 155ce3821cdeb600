"""No measured record is lost: full disks, incomplete lines, folders that cannot be written."""

import dataclasses
import fcntl
import json
import resource
import shutil
import signal
from pathlib import Path

import pytest

from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.record import Record, now
from stepgauge.spec.store import RunStore, StoreError


def numbered(number):
    return Record(kind="any", spec={"number": number}, environment={"device": "d", "torch": "t"})


def test_appends_and_reads(tmp_path):
    store = RunStore(tmp_path / "new" / "run")
    store.prepare()
    for number in range(3):
        store.append(numbered(number))
    contents = store.read()
    assert [record.spec["number"] for record in contents.records] == [0, 1, 2]
    assert contents.problems == []


OTHER = '{"ranks": 4, "way": "one GPU", "length": 8192, "attention": "sdpa", "step_ms": 1.5}\n'


def test_a_file_of_other_rows_is_refused_in_one_sentence(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(2 * OTHER)
    with pytest.raises(StoreError) as raised:
        RunStore(path).read()
    fields = "rows with the fields ranks, way, length, attention and 1 more"
    assert str(raised.value) == (
        f"{path} holds no records of stepgauge but {fields}: read it as lines of JSON, as a script "
        "(such as those in benchmarks/) wrote them"
    )
    path.write_text(2 * OTHER + numbered(0).to_json() + '\n{"schema": 1, "ki')
    contents = RunStore(path).read()
    assert [record.spec["number"] for record in contents.records] == [0]
    damaged, skipped = contents.problems
    assert damaged == f"{path} line 4 is damaged and skipped: it is not JSON"
    assert skipped == f"{path}: 2 of the lines are skipped: {fields}"
    HardwareFile(name="box").write(path := tmp_path / "box.json")
    with pytest.raises(
        StoreError, match="no records of stepgauge but rows with the fields schema, "
    ):
        RunStore(path).read()


def test_a_record_without_a_date_is_dated_when_it_is_written(tmp_path):
    store = RunStore(tmp_path / "run")
    store.prepare()
    store.append(dataclasses.replace(numbered(0), created="2020-01-01T00:00:00+00:00"))
    before = now()
    store.append(numbered(1))
    dated, undated = store.read().records
    assert dated.created == "2020-01-01T00:00:00+00:00"
    assert before <= undated.created <= now()


def test_a_new_folder_without_records_is_removed(tmp_path):
    new, old, written = (RunStore(tmp_path / name) for name in ("new", "old", "written"))
    old.prepare()
    for store in (new, old, written):
        with pytest.raises(ZeroDivisionError), store.held():
            if store is written:
                store.append(numbered(0))
            raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "written"]
    assert len(written.read().records) == 1


@pytest.mark.parametrize("name", ["failures.log", "checkpoints"])
def test_a_folder_that_holds_anything_else_stays(tmp_path, name):
    store = RunStore(tmp_path / "run")
    with store.held():
        (store.folder / name).mkdir()
    assert (store.folder / name).exists()


def test_a_lock_file_that_is_removed_meanwhile_is_locked_again(tmp_path, monkeypatch):
    store, locked, tries = RunStore(tmp_path / "run"), fcntl.flock, []

    def flock(file, how):
        tries.append(file)
        if len(tries) == 1:
            shutil.rmtree(store.folder)
        locked(file, how)

    monkeypatch.setattr("stepgauge.spec.store.fcntl.flock", flock)
    with store.held():
        assert len(tries) == 2
        with pytest.raises(StoreError, match="in use"), RunStore(store.folder).held():
            pass


def test_damaged_lines_are_reported_and_the_others_read(tmp_path):
    store = RunStore(tmp_path)
    for number in range(3):
        store.append(numbered(number))
    lines = store.path.read_bytes().splitlines()
    lines[1] = lines[1][:40]
    store.path.write_bytes(b"\n".join([*lines, b"\xff\xfe", b'{"schema": 1, "metr']))
    contents = store.read()
    assert [record.spec["number"] for record in contents.records] == [0, 2]
    assert [problem.split(" is damaged")[0][-6:] for problem in contents.problems] == [
        "line 2",
        "line 4",
        "line 5",
    ]


def test_an_incomplete_last_line_does_not_damage_the_next_record(tmp_path):
    store = RunStore(tmp_path)
    store.append(numbered(0))
    with store.path.open("ab") as file:
        file.write(b'{"schema": 1, "ki')
    store.append(numbered(1))
    contents = store.read()
    assert [record.spec["number"] for record in contents.records] == [0, 1]
    assert len(contents.problems) == 1


def test_on_a_full_disk_the_file_stays_valid_and_the_error_has_the_record(tmp_path):
    store = RunStore(tmp_path)
    store.append(numbered(0))
    size = store.path.stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # The limit is in the middle of the next line: as on a full disk, the write is cut short and then
    # refused.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot write a record") as error:
            store.append(numbered(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert Record.from_json(error.value.args[1]).spec == {"number": 1}
    assert store.path.stat().st_size == size
    store.append(numbered(2))
    assert [record.spec["number"] for record in store.read().records] == [0, 2]


def test_an_error_on_dev_full_is_one_sentence(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    store = RunStore(tmp_path)
    store.path.symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left on device"):
        store.append(numbered(0))


def test_a_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot write to"):
        RunStore(tmp_path / "file" / "run").prepare()


def test_a_missing_run_is_reported(tmp_path):
    with pytest.raises(StoreError, match="no run at"):
        RunStore(tmp_path / "none").read()


def test_latest_keeps_one_record_per_spec_and_place(tmp_path):
    store = RunStore(tmp_path)
    elsewhere = Record(
        kind="any", spec={"number": 0}, environment={"device": "other", "torch": "t"}
    )
    again = Record(
        kind="any", spec={"number": 0}, environment={"device": "d", "torch": "t"}, note="again"
    )
    for record in (numbered(0), numbered(1), elsewhere, again):
        store.append(record)
    latest = store.read().latest()
    assert [(r.spec["number"], r.environment["device"], r.note) for r in latest] == [
        (0, "d", "again"),
        (1, "d", ""),
        (0, "other", ""),
    ]


@pytest.mark.parametrize("indent", [None, 1])
def test_records_printed_as_json_are_read_from_a_file(tmp_path, indent):
    """`--format json` prints them as a list."""
    path = tmp_path / "printed.json"
    path.write_text(json.dumps([numbered(n).to_dict() for n in range(2)], indent=indent) + "\n")
    contents = RunStore(path).read()
    assert [record.spec["number"] for record in contents.records] == [0, 1]
    assert not contents.problems
    path.write_text('[{"schema": 1},\n')
    assert len(RunStore(path).read().problems) == 1
