"""Device memory, and reading and writing hardware files."""

import dataclasses
import json
import math
import tomllib
from pathlib import Path

import pytest

from stepgauge.cost.rates.network import Links
from stepgauge.spec.calibration import Contention, OperationTable
from stepgauge.spec.fabric import Fabric
from stepgauge.spec.hardware import ACCELERATORS, NOT_FOR_TENSORS, SHIPPED, HardwareFile, fits
from stepgauge.spec.hardware_files import file_named

GIB = 2**30
H200 = dataclasses.asdict(ACCELERATORS["NVIDIA H200"])


@pytest.mark.parametrize(
    ("needed", "architecture", "text"),
    [
        (30 * GIB, "sm80", "A100-SXM4-40GB"),
        (40 * GIB - NOT_FOR_TENSORS, "sm80", "A100-SXM4-40GB"),
        (40 * GIB - NOT_FOR_TENSORS + 1, "sm80", "A100 80GB PCIe"),
        (100 * GIB, "sm80", "no: the largest, A100-SXM4-80GB, has 80 GB"),
        (100 * GIB, "sm90", "H200"),
        (191.7 * GIB, "sm90", "no: the largest, H200, has 141 GB"),
        (GIB, "cpu", ""),
    ],
)
def test_fits_names_the_smallest_device_that_holds_the_bytes(needed, architecture, text):
    assert fits(needed, architecture) == text


def test_a_file_keeps_times_by_ranks_and_contention(tmp_path):
    alone, shared = (OperationTable(("bytes",), ((1e6, us),)) for us in (10.0, 25.0))
    written = HardwareFile(
        name="box",
        operations={"traffic": alone, "matmul nt fp32": alone},
        by_ranks={2: {"traffic": shared}},
    ).with_contention([Contention("matmul", "all_reduce", 1.24, 1.1)])
    written = written.with_contention([Contention("traffic", "all_reduce", 1.6, 1.3, 2)])
    written = written.with_contention([Contention("traffic", "all_reduce", 1.9, 1.5, 8)])
    written.write(tmp_path / "box.json")
    read = HardwareFile.read(tmp_path / "box.json")
    assert read.on_ranks(2).operations["traffic"] == shared
    assert "matmul nt fp32" not in read.on_ranks(2).operations  # not timed on two ranks
    assert read.on_ranks(4).operations == read.operations
    assert read.contention_of("matmul nt bf16", "all_reduce", 4).kernel_slowdown == 1.24
    norm = [read.contention_of("rmsnorm forward fp32", "all_reduce", n) for n in (2, 4, 8, 64)]
    assert [row.collective_slowdown for row in norm] == [1.3, 1.3, 1.5, 1.5]
    assert read.contention_of("attention sdpa forward fp32", "all_reduce", 2) is None
    with pytest.raises(ValueError, match="not a row of the contention table"):
        Contention.from_row(["matmul", "all_reduce", 1.2])


def test_hosts_are_those_of_the_nearest_number_of_ranks():
    """What was not timed there comes from the next nearest: ranks launch the same work."""
    one, two, four, flat = (
        OperationTable(("layers",), ((2.0, us),)) for us in (1.0, 2.0, 4.0, 5.0)
    )
    file = HardwareFile(
        name="box",
        operations={"host eager bf16": one, "traffic": one},
        by_ranks={
            2: {"host eager bf16": two, "host eager bf16 tp2": two, "host wrapper flat": flat},
            4: {"host eager bf16": four, "host eager bf16 tp4": four},
        },
    )
    assert file.on_ranks(1).operations == file.operations
    assert file.on_ranks(2).operations == {**file.by_ranks[2], "traffic": one}
    assert file.on_ranks(8).operations == {
        **file.by_ranks[4], "host wrapper flat": flat, "traffic": one
    }  # fmt: skip


def test_products_have_the_contention_of_their_time_where_the_file_has_it():
    rows = [
        Contention(kernels, "all_reduce", slowdown, 1.5, 2)
        for kernels, slowdown in (("short-matmul", 1.9), ("matmul", 1.4), ("long-matmul", 1.1))
    ]

    def slowdowns(*rows):
        file = HardwareFile(name="box").with_contention(rows)
        found = [file.contention_of("matmul nt bf16", "all_reduce", 2, us) for us in (80, 200, 400)]
        return [row.kernel_slowdown for row in found]

    assert slowdowns(*rows) == [1.9, 1.4, 1.4]  # only older files have "long-matmul"
    assert slowdowns(rows[1]) == [1.4, 1.4, 1.4]  # an older file


def test_a_file_is_written_through_a_symbolic_link(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "box.json")
    HardwareFile(name="box").write(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert HardwareFile.read(tmp_path / "box.json").name == "box"


def test_older_names_in_a_file_are_read(tmp_path):
    """Until 2026-11-28 a link's settings and the tables of exact shapes were called "asked"."""
    path = tmp_path / "box.json"
    HardwareFile.read(SHIPPED / "h200-nvlink.json").write(path)
    older = json.loads(path.read_text().replace('"settings"', '"asked"'))
    table = {"axes": ["bytes"], "rows": [[8, 1.5]]}
    path.write_text(json.dumps({**older, "operations": {"traffic asked": table}}))
    read = HardwareFile.read(path)
    assert read.links == HardwareFile.read(SHIPPED / "h200-nvlink.json").links
    assert read.operations == {"traffic exact": OperationTable.from_dict(table)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"links": None}, "is damaged"),
        ({"operations": [1]}, "is damaged"),
        (
            {"peaks": {"flops": {}}},
            "file box: peaks has no memory_bytes_per_s, no memory_gb, no so",
        ),
        (
            {"peaks": {"bf16": 1e15}},
            "peaks has no flops, .*, an unknown 'bf16'; its keys are flops, ",
        ),
        ({"peaks": "x"}, "file box: peaks is 'x'; its keys are flops, memory_bytes_per_s, "),
        (
            {"peaks": H200 | {"flops": {"bf16": -1}}},
            r"peaks\.flops\.bf16 is -1; .* 2.25e15 for 2250 TF",
        ),
        (
            {"peaks": H200 | {"flops": {"bf16": 989.4}}},
            r"peaks\.flops\.bf16 is 989.4; it must be at ",
        ),
        (
            {"peaks": H200 | {"flops": {"fp8": 1e15}}},
            r"peaks\.flops has an unknown 'fp8'; its keys are .*float8",
        ),
        ({"peaks": H200 | {"flops": "1e15"}}, r"peaks\.flops is '1e15'; its keys are fp32, "),
        ({"peaks": H200 | {"memory_bytes_per_s": 4800}}, r"peaks\.memory_bytes_per_s is 4800; "),
        ({"peaks": H200 | {"memory_gb": "141"}}, r"peaks\.memory_gb is '141'; it must be a number"),
        ({"device": ["a"]}, "device is"),
        (
            {"operations": {"traffic": {"axes": ["bytes"], "rows": [[1, 0.0]]}}},
            "traffic takes 0.0 µs",
        ),
        ({"base": "box.json"}, "is its own base"),
        ({"base": "../{folder}/box.json"}, "is its own base"),
        ({"base": 3}, "no hardware file at"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, changed, message):
    path = tmp_path / "box.json"
    text = json.dumps({"schema": 1, "name": "box", **changed})
    path.write_text(text.replace("{folder}", tmp_path.name))
    with pytest.raises(ValueError, match=message):
        assert HardwareFile.read(path).peaks is None  # peaks are only checked when they are used


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node is 0"),
        ({"within": {"bytes_per_s": -1e9}}, "bytes_per_s is -1000000000"),
        (
            {"between": {"efficiency": 2.0}},
            r"^fabric\.between\.efficiency is 2\.0; .*: 0.8 is 80 %",
        ),
        ({"between": {"efficiency": 80}}, "efficiency is 80; it must be above 0 and at most 1"),
        ({"between": {"latency_us": -1}}, "latency_us is -1; it must be at least 0"),
        ({"within": {"bytes_per_s": True}}, r"within\.bytes_per_s is True; it must be a number"),
        ({"within": {"bytes_per_s": "9e9"}}, r"within\.bytes_per_s is '9e9'; it must be a number"),
        ({"between": {"bytes_per_s": math.inf}}, r"between\.bytes_per_s is inf"),
        ({"gpus_per_node": math.inf}, "gpus_per_node is inf; it must be a whole number"),
        ({"within": {"bandwidth": 1}}, r"fabric\.within has an unknown 'bandwidth'; its keys"),
    ],
)
def test_impossible_numbers_of_a_fabric_are_refused(changed, message):
    with pytest.raises(
        ValueError, match=r"^fabric is .*; its keys are gpus_per_node, within, between"
    ):
        Fabric.from_dict([])
    wire = {"bytes_per_s": 1e9, "latency_us": 1.0, "efficiency": 0.8, "source": "made up"}
    value = {"gpus_per_node": 8, "within": wire, "between": wire}
    for name, part in changed.items():
        value[name] = {**wire, **part} if isinstance(part, dict) else part
    with pytest.raises(ValueError, match=message):
        Fabric.from_dict(value)


def test_a_missing_key_of_a_wire_is_named_with_the_file_and_its_path():
    wire = {"bytes_per_s": 1e9, "latency_us": 1.0, "efficiency": 0.8}
    fabric = {"gpus_per_node": 8, "within": wire, "between": {**wire, "source": "made up"}}
    with pytest.raises(ValueError, match=r"file box: fabric\.within has no source; its keys are"):
        Links(HardwareFile(name="box", other={"fabric": fabric}))


def test_peaks_of_an_unknown_device_may_leave_out_its_architecture():
    fields = {name: value for name, value in H200.items() if name != "architecture"}
    assert HardwareFile(name="box", other={"peaks": fields}).peaks.architecture == ""


def test_files_of_the_package_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for name in ("dgx-h100", "dgx-h100.json"):
        read = HardwareFile.read(file_named(name))
        assert read.name == "dgx-h100" and read.base.operations
    with pytest.raises(ValueError, match=r"no hardware file at dgx-b200: .* dgx-a100, dgx-h100"):
        file_named("dgx-b200")
    with pytest.raises(ValueError, match=r"no hardware file at elsewhere/dgx-h100\.json"):
        file_named("elsewhere/dgx-h100.json")  # paths are not searched for
    own = tmp_path / "hardware"
    own.mkdir()
    HardwareFile(name="mine", device="A").write(own / "dgx-h100.json")
    assert HardwareFile.read(file_named("dgx-h100")).name == "mine"
    (own / "faster.json").write_text(json.dumps({"schema": 1, "base": "h100-sxm.json"}))
    assert HardwareFile.read(file_named("faster")).base.name == "h100-sxm"  # comes with the package


def test_a_file_written_to_another_folder_still_finds_its_base(tmp_path):
    """`validate --now` writes the extended file to the folder of the run."""
    mine, table = tmp_path / "mine", OperationTable(("m", "n"), ((2, 3, 4.0),))
    HardwareFile(name="box", operations={"norm": table}).write(mine / "bases" / "box.json")
    (mine / "box.json").symlink_to("bases/box.json")
    bases = {"near": "box.json", "below": "bases/box.json", "beside": "../mine/bases/box.json",
             "package": "h100-sxm.json", "plain": None}  # fmt: skip
    for name, base in bases.items():
        path, copy = mine / f"{name}.json", tmp_path / "run" / f"{name}.json"
        path.write_text(json.dumps({"schema": 1, "device": "A", "base": base}))
        file = HardwareFile.read(path)
        file.write(copy)
        assert HardwareFile.read(copy).base == file.base
        file.write(path)
        assert json.loads(path.read_text())["base"] == base  # the folder may move


def test_hardware_files_are_in_the_package_and_linked_from_the_checkout():
    root = Path(__file__).parents[2]
    with (root / "pyproject.toml").open("rb") as file:
        packaged = tomllib.load(file)["tool"]["setuptools"]["package-data"]["stepgauge.spec"]
    assert f"{SHIPPED.name}/*.json" in packaged
    shipped = sorted(SHIPPED.glob("*.json"))
    assert shipped and all((root / "hardware" / f.name).samefile(f) for f in shipped)
