import contextlib
import dataclasses
import fcntl
import importlib.util
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Examples take longer on a busy machine.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
os.environ.setdefault("MPLBACKEND", "agg")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
    # before torch is imported: more threads than cores wait for each other in every operator
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
os.environ["XDG_DATA_HOME"] = os.devnull  # ignore the hardware files of the user who runs the tests
REPOSITORY = Path(__file__).parents[1]


@contextlib.contextmanager
def turn_on_the_gpus(*, alone):
    """Lets tests with `alone` run while no other process of this user runs a test on a GPU.

    The others share a file lock. Whoever waits for it holds a second one, so that those who come
    later do not overtake.
    """
    folder = Path(tempfile.gettempdir())
    with (
        open(folder / f"stepgauge-gpu-queue-{os.getuid()}", "w") as queue,
        open(folder / f"stepgauge-gpu-tests-{os.getuid()}", "w") as tests,
    ):
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the test's time limit, and all fixtures
def pytest_runtest_protocol(item):
    if item.get_closest_marker("gpu") is None:
        return (yield)
    with turn_on_the_gpus(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture
def record():
    """Makes a measured record of a step: record(size="small", step=[10.0, 11.0])."""
    from stepgauge.spec.model import ModelSpec
    from stepgauge.spec.record import Record, Sample
    from stepgauge.spec.step import StepSpec

    def make(size="small", step=(10.0,), device="Test GPU", status="ok", note="", **spec):
        step_spec = StepSpec(model=ModelSpec.preset(size), size=size, **spec)
        metrics = (
            {}
            if status != "ok"
            else {"step_ms": Sample.of(step, "ms"), "peak_bytes": Sample.exact(2**30, "bytes")}
        )
        return Record(
            kind="step",
            spec=dataclasses.asdict(step_spec),
            metrics=metrics,
            environment={"device": device, "torch": "2.13.0"},
            status=status,
            note=note,
        )

    return make


@pytest.fixture
def stepgauge(capfd, monkeypatch):
    """Runs the command line in this process: stepgauge("show", path) -> (status, stdout, stderr).

    Tables have their default width, whatever COLUMNS is in pytest's workers.
    """
    from stepgauge import cli

    monkeypatch.delenv("COLUMNS", raising=False)

    def run(*arguments):
        capfd.readouterr()
        status = cli.run([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return run


@pytest.fixture
def closed_pipe(monkeypatch):
    """closed_pipe() makes standard output a pipe whose reader has closed it, within a block."""

    @contextlib.contextmanager
    def closed():
        reader, writer = os.pipe()
        os.close(reader)
        with monkeypatch.context() as patched, open(writer, "w", buffering=1) as pipe:
            patched.setattr("sys.stdout", pipe)
            yield

    return closed


def _gpu_trace():
    spec = importlib.util.spec_from_file_location(
        "gpu_trace", Path(__file__).with_name("gpu_trace.py")
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def gpu_trace():
    """The class that builds the trace of a GPU, event by event."""
    return _gpu_trace().GpuTrace


@pytest.fixture
def gpu_step():
    """gpu_step(trace, number) adds one whole step."""
    return _gpu_trace().step


@pytest.fixture
def gpu_trace_text(gpu_trace, gpu_step):
    """The text of a trace of one step with communication."""
    trace = gpu_trace()
    gpu_step(trace)
    return trace.text()
