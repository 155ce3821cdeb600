"""Recording on a machine without CUDA: what is handed to a capture, and what is said when it fails."""

import contextlib

import pytest
import torch

from stepgauge.runtime import recording

DEVICE = torch.device("cuda", 0)


class Graph:
    def replay(self):
        self.replayed = True


@pytest.fixture
def ended(monkeypatch):
    """Captures that run the work; the pools of those that failed."""
    pools = []

    @contextlib.contextmanager
    def capture(graph, *, pool, stream, capture_error_mode):
        assert (stream, capture_error_mode) == ("stream", "thread_local")
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(recording, "capture_stream", lambda device: "stream")
    monkeypatch.setattr(recording, "_end_failed_capture", lambda pool, device: pools.append(pool))
    return pools


def test_a_recording_gives_the_outputs_and_the_replay(ended):
    outputs, replay = recording.record(lambda: "outputs", DEVICE)
    replay()
    assert outputs == "outputs" and replay.__self__.replayed and not ended


@pytest.mark.parametrize("pool", [None, (0, 9)])
def test_a_failed_recording_is_ended_and_says_why(ended, pool):
    def run():
        raise RuntimeError("operation not permitted\nand a long tail")

    with pytest.raises(recording.CannotRecordError, match="graphs: operation not permitted; run"):
        recording.record(run, DEVICE, pool)
    assert ended == [pool or (0, 7)]
    assert recording.record_repeated(run, 3, DEVICE) is None


def test_running_out_of_memory_is_not_hidden(ended):
    def run():
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        recording.record_repeated(run, 1, DEVICE)


def test_calls_are_repeated_in_one_recording(ended):
    ran = []
    assert recording.record_repeated(lambda: ran.append(1), 3, DEVICE) is not None
    assert len(ran) == 3


def test_a_device_has_one_stream_however_it_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: object())
    recording._stream.cache_clear()
    streams = [
        recording.capture_stream(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:0")
    ]
    recording._stream.cache_clear()
    assert streams[0] is streams[1] and streams[0] is not streams[2]
