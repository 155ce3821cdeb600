"""Traces that torch.profiler would not write are analysed correctly, with a note, or refused."""

import json
import math

import pytest

from stepgauge.report.profile import answer
from stepgauge.trace.analysis import analyse
from stepgauge.trace.read import TraceError


@pytest.fixture
def events(gpu_trace, gpu_step):
    """Two steps with 1120 µs of kernels and 46 µs of idle time."""
    trace = gpu_trace()
    for number in range(2):
        gpu_step(trace, number)
    return json.loads(trace.text())["traceEvents"]


def kernels(events):
    return [event for event in events if event.get("cat") == "kernel"]


def analysed(events, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    return analyse(tmp_path / "t.json")


def is_whole(found, steps=2):
    assert found.steps == steps
    assert sum(cell.us for cell in found.cells) == pytest.approx(1120)
    assert sum(cell.idle_us for cell in found.cells) == pytest.approx(46)
    return True


@pytest.mark.parametrize("categories", [("kernel",), ("kernel", "cuda_runtime")])
def test_kernels_that_all_have_correlation_zero_count_by_start_time(events, tmp_path, categories):
    """Zero means that there is no number: the kernels do not all belong to one launch."""
    for event in events:
        if event.get("cat") in categories and "correlation" in event["args"]:
            event["args"]["correlation"] = 0
    found = analysed(events, tmp_path)
    assert is_whole(found) and found.steps == 2
    (note,) = found.notes
    assert note.startswith("No kernel has its launch in the trace")


@pytest.mark.parametrize("category", ["xpu_driver", "privateuse1_driver", "hpu_op"])
def test_launches_of_other_drivers_are_found(events, tmp_path, category):
    for event in events:
        if event.get("cat") == "cuda_runtime":
            event["cat"] = category
    found = analysed(events, tmp_path)
    assert is_whole(found) and found.notes == []
    assert found.phases_us["forward"] == [150, 152]


def test_numbers_written_as_text_are_numbers(events, tmp_path):
    for event in events[1:]:
        event |= {"ts": str(event["ts"]), "dur": str(event["dur"])}
    for kernel in kernels(events):
        kernel["args"] |= {"stream": f"stream {kernel['tid']}", "device": "0"}
        kernel["args"]["correlation"] = str(kernel["args"]["correlation"])
    found = analysed(events, tmp_path)
    assert is_whole(found)
    assert found.notes == []
    assert found.phases_us["forward"] == [150, 152]


@pytest.mark.parametrize("text", ["--5", "²", "9" * 5000])
def test_invalid_numbers_count_as_missing(events, tmp_path, text):
    for event in events:
        if event["args"].get("Sequence number"):
            event["args"]["Sequence number"] = text
        if event["name"].startswith("ProfilerStep#0"):
            event["name"] = f"ProfilerStep#{text}"
    assert is_whole(analysed(events, tmp_path))


def test_arguments_of_wrong_types_count_as_missing(events, tmp_path):
    for event in events:
        if event.get("cat") == "cpu_op":
            event["args"] |= {"Input Dims": "[[1]]", "Input type": 5, "Sequence number": [1]}
            event["tid"] = [event["tid"]]
    assert is_whole(analysed([*events, None, 5, []], tmp_path))


def test_a_list_may_lack_its_end_as_chromes_format_allows(events, tmp_path):
    whole = json.dumps(events)
    for text in (whole[:-1], whole[:-1] + ",\n"):
        (tmp_path / "t.json").write_text(text)
        assert is_whole(analyse(tmp_path / "t.json"))
    (tmp_path / "t.json").write_text(whole[:-30])
    with pytest.raises(TraceError, match="it was cut off"):
        analyse(tmp_path / "t.json")


def test_a_byte_order_mark_and_invalid_utf8_are_accepted(events, tmp_path):
    text = json.dumps({"traceEvents": events}).encode().replace(b"scores", b"sc\xffres")
    (tmp_path / "t.json").write_bytes(b"\xef\xbb\xbf" + text)
    found = analyse(tmp_path / "t.json")
    assert is_whole(found)
    assert "blocks.*.attention.sc\ufffdres" in {cell.range for cell in found.cells}


@pytest.mark.parametrize(
    "time", [math.nan, math.inf, None, "soon", [1], pytest.param(10**400, id="huge")]
)
def test_an_invalid_time_is_refused(events, tmp_path, time):
    kernels(events)[3]["ts"] = time
    with pytest.raises(TraceError, match="an event has no valid name or time"):
        analysed(events, tmp_path)


def test_impossible_durations_count_as_zero_with_a_note(events, tmp_path):
    kernels(events)[0]["dur"] = -100
    del kernels(events)[5]["dur"]
    found = analysed(events, tmp_path)
    assert sum(cell.us for cell in found.cells) == pytest.approx(1120 - 200)
    assert found.notes == ["2 events have no duration or a negative one. They count as 0 µs."]


def test_events_that_are_not_complete_calls_are_refused(events, tmp_path):
    for event in events[1:]:
        event["ph"] = "B"
    with pytest.raises(TraceError, match="56 calls are written as pairs of begin and end"):
        analysed(events, tmp_path)
    for event in events[1:]:
        del event["ph"]
    with pytest.raises(TraceError, match=r"56 events have no type \(ph\)"):
        analysed(events, tmp_path)


def test_repeated_events_count_once(events, tmp_path):
    found = analysed(events + events, tmp_path)
    assert is_whole(found)
    assert "10 kernels are repeated in the trace." in found.notes[0]


def test_traces_of_two_processes_in_one_file_give_a_note(events, tmp_path):
    others = json.loads(json.dumps(events))
    for event in others[1:]:
        event["pid"] += 10
        event["args"] |= {"device": 1} if event["cat"] == "kernel" else {}
    found = analysed(events + others, tmp_path)
    assert sum(cell.us for cell in found.cells) == pytest.approx(2 * 1120)
    assert "10 launches share their number (correlation)" in found.notes[0]
    assert "The trace has 2 devices (0, 1) on one time line" in found.notes[1]


def test_clocks_that_differ_or_jump_give_a_note(events, tmp_path):
    second = next(e["ts"] for e in events if e["name"] == "ProfilerStep#1")
    for kernel in kernels(events):
        kernel["ts"] -= 1e6
    found = analysed(events, tmp_path)
    assert is_whole(found)
    assert "10 kernels begin before their launch, by up to" in found.notes[0]
    for kernel in kernels(events):
        kernel["ts"] += 1e6
    for event in events[1:]:
        event["ts"] -= 1e6 if event["ts"] >= second else 0
    found = analysed(events, tmp_path)
    # The 40 µs between the steps do not count, nor does the jump.
    assert sum(cell.idle_us for cell in found.cells) == pytest.approx(46 - 42)
    assert "The steps' numbers decrease over time" in found.notes[0]


def test_kernels_without_launches_give_a_note(events, tmp_path):
    found = analysed([e for e in events if e.get("cat") != "cuda_runtime"], tmp_path)
    assert is_whole(found)
    assert "No kernel has its launch in the trace" in found.notes[0]


def test_some_kernels_without_launches_count_and_give_a_note(events, tmp_path):
    for kernel in kernels(events)[4:6]:
        del kernel["args"]["correlation"]
    found = analysed(events, tmp_path)
    assert is_whole(found)
    assert "2 of 10 kernels and copies have no launch in the trace" in found.notes[0]


def test_a_step_that_two_threads_mark_counts_once(events, tmp_path):
    marks = [event for event in events if event["name"].startswith("ProfilerStep")]
    others = [mark | {"tid": 555, "ts": mark["ts"] + 0.5} for mark in marks]
    assert is_whole(analysed(events + others, tmp_path))


def test_events_of_a_process_without_a_name_are_named_by_category(events, tmp_path):
    strange = {
        "ph": "X",
        "cat": "npu_kernel",
        "name": "x",
        "pid": 9,
        "tid": 3,
        "ts": 1100,
        "dur": 1,
    }
    found = analysed([*events, strange, strange | {"cat": None}], tmp_path)
    assert is_whole(found)
    assert "(1 of category 'npu_kernel', 1 of category 'none')" in found.notes[0]


def test_a_device_whose_kernels_were_not_recorded_gives_a_note(events, tmp_path):
    host = [event for event in events if event.get("cat") != "kernel"]
    document = {"deviceProperties": [{"name": "Some GPU"}], "traceEvents": host}
    (tmp_path / "t.json").write_text(json.dumps(document))
    found = analyse(tmp_path / "t.json")
    assert found.notes[0].startswith("The trace names a device (Some GPU) but has none of its")
    assert answer(found).startswith("A step takes ") and " on the host: " in answer(found)


def test_a_cuda_graph_is_one_launch_of_many_kernels(gpu_trace, tmp_path):
    trace = gpu_trace()
    with trace.range("ProfilerStep#0"), trace.range("forward"):
        trace.launch("gemm", 50)
        trace.events[-1]["args"]["graph node id"] = 0
        for number in range(1, 5):
            node = trace.events[-1]
            trace.events.append(
                node | {"ts": node["ts"] + 60, "args": node["args"] | {"graph node id": number}}
            )
    found = analyse(trace.write(tmp_path / "t.json"))
    assert found.phases_us["forward"] == [4 * 60 + 50]
    assert sum(cell.calls for cell in found.cells) == 5 and found.notes == []


def test_kernels_of_two_contexts_on_one_stream_number_are_all_counted(events, tmp_path):
    others = json.loads(
        json.dumps([e for e in events if e.get("cat") in ("kernel", "cuda_runtime")])
    )
    for event in others:
        event["ts"] += 5
        event["args"] |= {"context": 2, "correlation": event["args"].get("correlation", 0) + 1000}
    found = analysed(events + others, tmp_path)
    assert sum(cell.us for cell in found.cells) == pytest.approx(2 * 1120)
    assert sum(cell.busy_us for cell in found.cells) == pytest.approx(1000 + 14)


def test_negative_times_are_valid(events, tmp_path):
    for event in events[1:]:
        event["ts"] -= 5000
    assert is_whole(analysed(events, tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"traceEvents": []} {"traceEvents": []}', "more than one trace, one after the other"),
        ("[]\n[]", "more than one trace, one after the other"),
        ("[" * 100_000, "nested too deeply"),
        ('{"traceEvents": [{"ts": ' + "9" * 5000 + "}]}", "thousands of digits"),
    ],
)
def test_a_file_that_cannot_be_read_completely_is_refused(tmp_path, text, words):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=words):
        analyse(tmp_path / "t.json")
