"""Reading traces: both formats, gzipped or not, in chunks; files that are not traces."""

import gzip
import json

import pytest

from stepgauge.trace import read as reading
from stepgauge.trace.read import TraceError, read

EVENTS = [
    {"ph": "X", "name": f'event {n} ü \\ " }}', "ts": n, "args": {"a": [n, {"b": None}]}}
    for n in range(50)
]
OBJECT = {"schemaVersion": 1, "traceEvents": EVENTS, "traceName": "x", "number": 12345}


def write(path, text, packed=False):
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    return path


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_events_are_read_with_any_chunk_size(tmp_path, monkeypatch, packed, indent, chunk):
    monkeypatch.setattr(reading, "CHUNK", chunk)
    path = write(tmp_path / "trace", json.dumps(OBJECT, indent=indent), packed)
    parts = list(read(path))
    assert [value for key, value in parts if not key] == EVENTS
    assert {key: value for key, value in parts if key} == {
        k: v for k, v in OBJECT.items() if k != "traceEvents"
    }


def test_braces_inside_events_and_strings_do_not_end_an_event(tmp_path):
    events = [
        {"name": "}, {", "args": {"list": [{"a": n}, {"b": 1}], "text": "},\\n{"}, "n": n}
        for n in range(2000)
    ]
    path = write(tmp_path / "t", json.dumps(events))
    assert [event for _, event in read(path)] == events


def test_a_plain_list_is_a_trace(tmp_path):
    assert [event for _, event in read(write(tmp_path / "t", json.dumps(EVENTS)))] == EVENTS
    assert list(read(write(tmp_path / "t", '{"traceEvents": []}'))) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("hello", "is not a Chrome trace"),
        ('{"a": 1}', "it has no traceEvents"),
        ('{"traceEvents": 5}', "is not a Chrome trace"),
        (json.dumps(OBJECT)[:1000], "ends in the middle: it was cut off"),
        ('{"traceEvents": [{"ph": "X"}', "ends in the middle: it was cut off"),
        ('{"traceEvents": [{"ph": nonsense, "name": "x"}]}', "is damaged"),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_a_reason(tmp_path, text, words):
    path = write(tmp_path / "trace.json", text)
    with pytest.raises(TraceError, match=words) as error:
        list(read(path))
    assert str(error.value).startswith(str(path))


def test_a_cut_gzip_file_a_binary_file_and_a_missing_one_are_refused(tmp_path):
    packed = gzip.compress(json.dumps(OBJECT).encode())
    for content, words in (
        (packed[:-200], "its gzip data was cut off"),
        (b"\x1f\x8bnonsense", "damaged|cut off"),
        (b"\xff\xfe\x00\x01", "it is not text"),
    ):
        path = tmp_path / "trace.gz"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=words):
            list(read(path))
    with pytest.raises(TraceError, match=r"cannot read .*No such file"):
        list(read(tmp_path / "absent"))


def test_bytes_after_gzip_data_are_ignored_but_a_wrong_checksum_is_not(tmp_path):
    packed = gzip.compress(json.dumps(OBJECT).encode())
    path = tmp_path / "trace.gz"
    path.write_bytes(packed)
    whole = list(read(path))
    for trailer in (b"a trailer of a copy", b"\0" * 600, b"\0" * 10 + b"more"):
        path.write_bytes(packed + trailer)
        assert list(read(path)) == whole
    path.write_bytes(packed[:-8] + b"\1\2\3\4" + packed[-4:])
    with pytest.raises(TraceError, match="is damaged: CRC check failed"):
        list(read(path))


def test_memory_does_not_grow_with_the_file(tmp_path):
    import tracemalloc

    path = tmp_path / "large"
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        file.write(
            ",\n".join(json.dumps({"ph": "X", "name": "x" * 500, "ts": n}) for n in range(20_000))
        )
        file.write("]}")
    assert path.stat().st_size > 10e6
    tracemalloc.start()
    assert sum(1 for _ in read(path)) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6
