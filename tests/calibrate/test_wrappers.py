"""What wrappers take of the host, on one rank of a CPU: which networks, and where it goes."""

import pytest
import torch
import torch.distributed as dist

from stepgauge.calibrate import wrappers
from stepgauge.calibrate.machine import hardware_file, jobs
from stepgauge.calibrate.run import job, table_of
from stepgauge.runtime.world import default_backend
from stepgauge.spec.calibration import (
    CALIBRATED_WRAPPERS,
    WRAPPER_PHASES,
    CalibrationSpec,
    launched_under,
)
from stepgauge.spec.hardware import HardwareFile
from stepgauge.spec.layout import Layout
from stepgauge.spec.record import Record

HERE = torch.device("cpu")
PARAMETERS = {2: 2 * 6 + 3, 10: 10 * 6 + 3}  # of networks of so many layers


@pytest.fixture
def one_rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # which wait for no turn of the scheduler
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def one_rank_of_a_gpu():
    dist.init_process_group(
        default_backend("cuda"), store=dist.HashStore(), rank=0, world_size=1,
        device_id=torch.device("cuda", 0),
    )  # fmt: skip
    yield
    dist.destroy_process_group()


def asked(wrapper, **fields):
    return CalibrationSpec(operation=f"host wrapper {wrapper}", milliseconds=0.0, **fields)


@pytest.mark.parametrize(
    ("wrapper", "messages"),
    [
        ("bucketed", {(15, 1), (63, 2), (63, 48)}),
        ("zero3", {(15, 3), (63, 11)}),
    ],
)
def test_two_sizes_are_timed_in_few_messages_and_in_many(one_rank, wrapper, messages):
    table = wrappers.measure(asked(wrapper), HERE)
    assert table.axes == ("parameters", "messages", "phase")
    assert {row[:2] for row in table.rows} == messages
    assert {row[2] for row in table.rows} == set(WRAPPER_PHASES.values())


def test_of_ranks_it_joins_what_a_single_process_takes_of_the_host():
    """though other operations of ranks are of a CPU that they share."""
    rows = [[15, 1, n, 10.0] for n in range(4)] + [[63, 1, n, 58.0] for n in range(4)]
    record = Record(
        kind=CalibrationSpec.kind,
        spec=vars(asked("flat", ranks=2)),
        tables={"times": [["parameters", "messages", "phase", "us"], *rows]},
        environment={"device": "a GPU", "cpu": "a CPU"},
    )
    file = hardware_file([record], HardwareFile(name="box"))
    assert file.operations["host wrapper flat"] == table_of(record) and not file.by_ranks


def test_it_takes_ranks_and_a_wrapper_that_is_predicted():
    for wrapper in CALIBRATED_WRAPPERS:
        assert job(asked(wrapper, ranks=2)).spec.operation == f"host wrapper {wrapper}"
    with pytest.raises(ValueError, match="operation is 'host wrapper flat'"):
        job(asked("flat"))
    with pytest.raises(ValueError, match="operation is 'host wrapper torch-ddp'"):
        job(asked("torch-ddp", ranks=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_each_wrapper_is_timed_over_nccl(one_rank_of_a_gpu):
    for wrapper in CALIBRATED_WRAPPERS:
        table = wrappers.measure(asked(wrapper), torch.device("cuda", 0))
        assert len(table.rows) in (2 * len(WRAPPER_PHASES), 3 * len(WRAPPER_PHASES))


def test_ranks_that_launch_otherwise_are_calibrated_under_the_names_that_predictions_ask_for(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = jobs(torch.device("cuda"), (2,), only=("host eager bf16",))
    named = {found_job.spec.operation: found_job.spec.ranks for found_job in found}
    assert named["host eager bf16"] == named["host eager bf16 keeping selective"] == 1
    layouts = ("tp2", "tp2 overlap", "dp2 torch-ddp", "dp2 torch-fsdp", "zero1 cp2",
               "zero2 cp2 ulysses")  # fmt: skip
    for layout in layouts:
        assert named[f"host eager bf16{launched_under(Layout.parse(layout), 'none')}"] == 2
