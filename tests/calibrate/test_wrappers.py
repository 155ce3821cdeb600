"""Host times of wrappers, measured on one CPU rank."""

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
PARAMETERS = {2: 2 * 6 + 3, 10: 10 * 6 + 3}  # of networks with 2 and 10 layers


@pytest.fixture
def one_rank():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that threads do not wait for each other
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


def calibration(wrapper, **fields):
    return CalibrationSpec(operation=f"host wrapper {wrapper}", milliseconds=0.0, **fields)


@pytest.mark.parametrize(
    ("wrapper", "messages"),
    [
        ("bucketed", {(15, 1), (63, 2), (63, 48)}),
        ("zero3", {(15, 3), (63, 11)}),
    ],
)
def test_two_networks_are_timed_and_the_larger_one_in_few_and_many_messages(
    one_rank, wrapper, messages
):
    table = wrappers.measure(calibration(wrapper), HERE)
    assert table.axes == ("parameters", "messages", "phase")
    assert {row[:2] for row in table.rows} == messages
    assert {row[2] for row in table.rows} == set(WRAPPER_PHASES.values())


def test_host_times_are_kept_by_the_number_of_ranks_that_shared_the_host():
    rows = [[15, 1, n, 10.0] for n in range(4)] + [[63, 1, n, 58.0] for n in range(4)]
    record = Record(
        kind=CalibrationSpec.kind,
        spec=vars(calibration("flat", ranks=2)),
        tables={"times": [["parameters", "messages", "phase", "us"], *rows]},
        environment={"device": "a GPU", "cpu": "a CPU"},
    )
    file = hardware_file([record], HardwareFile(name="box"))
    assert file.by_ranks == {2: {"host wrapper flat": table_of(record)}}
    assert "host wrapper flat" not in file.operations
    for ranks, known in ((1, False), (2, True), (4, True)):  # of another number, the nearest
        assert ("host wrapper flat" in file.on_ranks(ranks).operations) is known


def test_only_calibrated_wrappers_over_several_ranks_are_accepted():
    for wrapper in CALIBRATED_WRAPPERS:
        assert job(calibration(wrapper, ranks=2)).spec.operation == f"host wrapper {wrapper}"
    with pytest.raises(ValueError, match="operation is 'host wrapper flat'"):
        job(calibration("flat"))
    with pytest.raises(ValueError, match="operation is 'host wrapper torch-ddp'"):
        job(calibration("torch-ddp", ranks=2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_each_wrapper_is_timed_over_nccl_on_a_gpu(one_rank_of_a_gpu):
    for wrapper in CALIBRATED_WRAPPERS:
        table = wrappers.measure(calibration(wrapper), torch.device("cuda", 0))
        assert len(table.rows) in (2 * len(WRAPPER_PHASES), 3 * len(WRAPPER_PHASES))


def test_layouts_with_other_launches_are_calibrated_under_the_names_that_predictions_use(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("stepgauge.calibrate.machine.run_isolated", lambda function, ranks: [])
    found = jobs(torch.device("cuda"), (2,), only=("host eager bf16",))
    named = {(found_job.spec.operation, found_job.spec.ranks) for found_job in found}
    for single in ("host eager bf16", "host eager bf16 keeping selective"):
        assert {(single, 1), (single, 2)} <= named
    layouts = ("tp2", "tp2 overlap", "dp2 torch-ddp", "dp2 torch-fsdp", "zero1 cp2",
               "zero2 cp2 ulysses")  # fmt: skip
    for layout in layouts:
        assert launched_under(Layout.parse(layout), "none") == f" {layout}"
        assert (f"host eager bf16 {layout}", 2) in named
    shared = jobs(torch.device("cuda"), (2,), only=("host eager bf16 ranks", "wrapper zero1"))
    assert {found_job.spec.ranks for found_job in shared} == {2} and len(shared) == 2
    with pytest.raises(ValueError, match="'wrapper zero1', which needs several ranks"):
        jobs(torch.device("cuda"), (), only=("wrapper zero1",))
