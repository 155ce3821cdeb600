"""The topology, read from a made-up /sys and from a made-up NVML."""

import sys
import types

import pytest

from stepgauge.measure.topology import interfaces, numa_nodes, topology
from stepgauge.report.topology import gpu_table, interface_table, topology_page


@pytest.fixture
def sys_folder(tmp_path):
    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    for node, cores in ((0, "0-31"), (1, "32-63")):
        write(f"devices/system/node/node{node}/cpulist", cores)
        write(f"devices/system/node/node{node}/meminfo", f"Node {node} MemTotal:       {2**20} kB")
    write("class/net/lo/operstate", "unknown")
    write("class/net/eth0/operstate", "up")
    write("class/net/eth0/speed", "100000")
    write("class/net/eth0/device/numa_node", "1")
    write("class/net/veth1/operstate", "down")
    write("class/net/veth1/speed", "-1")
    for index in range(2):
        write(f"bus/pci/devices/0000:0{index}:00.0/numa_node", str(index))
    return tmp_path


def test_nodes_and_interfaces_are_read_from_the_kernels_files(sys_folder):
    assert [(n.index, n.cores, n.memory_bytes) for n in numa_nodes(sys_folder)] == [
        (0, "0-31", 2**30),
        (1, "32-63", 2**30),
    ]
    assert [(i.name, i.is_up, i.bytes_per_s, i.numa_node) for i in interfaces(sys_folder)] == [
        ("eth0", True, 12.5e9, 1),
        ("veth1", False, None, None),
    ]


class NVMLError(Exception):
    pass


def driver(linked):
    """Returns an NVML with two GPUs, linked by 18 fourth-generation NVLinks or by the host bridge."""

    def unsupported(*_):
        raise NVMLError("Not Supported")

    def device(name, value):
        return {f"nvmlDeviceGet{name}": (lambda *_: value) if not callable(value) else value}

    functions = {
        **device("Count", 2),
        **device("HandleByIndex", lambda i: i),
        **device("PciInfo", lambda i: types.SimpleNamespace(busId=f"00000000:0{i}:00.0")),
        **device("Name", b"NVIDIA H200"),
        **device("MemoryInfo", types.SimpleNamespace(total=141 * 2**30)),
        **device("CurrPcieLinkGeneration", 5),
        **device("CurrPcieLinkWidth", 16),
        **device("MaxPcieLinkGeneration", 5),
        **device("MaxPcieLinkWidth", 16),
        **device("CpuAffinity", [0b1011]),
        **device("NvLinkState", 1 if linked else unsupported),
        **device("NvLinkVersion", 7),
        **device("P2PStatus", 0 if linked else unsupported),
        **device("TopologyCommonAncestor", 30),
    }
    constants = {
        "NVML_NVLINK_MAX_LINKS": 18,
        "NVML_P2P_CAPS_INDEX_NVLINK": 2,
        "NVML_P2P_STATUS_OK": 0,
    }
    library = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "NVMLError": NVMLError}
    return types.SimpleNamespace(**functions, **constants, **library)


@pytest.mark.parametrize(("linked", "name", "links"), [(True, "NV18", 18), (False, "PHB", 0)])
def test_gpus_and_links_are_read_from_the_driver(monkeypatch, sys_folder, linked, name, links):
    monkeypatch.setitem(sys.modules, "pynvml", driver(linked))
    machine = topology(sys_folder)
    assert machine.links == {(0, 1): name}
    first = machine.gpus[0]
    assert (first.name, first.numa_node, first.affinity, first.nvlinks) == (
        "NVIDIA H200",
        0,
        "0-1,3",
        links,
    )
    assert first.pcie == "gen 5 × 16 (can gen 5 × 16)"
    assert first.nvlink_bytes_per_s == (450e9 if linked else None)
    assert name in gpu_table(machine).rows[0]
    page = topology_page(machine)
    assert "GPU 1" in page
    assert page.count(name) >= 2


def test_a_machine_without_a_driver_has_no_gpus_and_a_reason(monkeypatch, sys_folder):
    def fail():
        raise NVMLError("Shared Library Not Found")

    broken = types.SimpleNamespace(nvmlInit=fail, NVMLError=NVMLError)
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    machine = topology(sys_folder)
    assert machine.gpus == []
    assert machine.without_gpus == "no NVIDIA driver answers (Shared Library Not Found)"
    assert "No GPUs: no NVIDIA driver answers" in topology_page(machine)
    assert [row[2] for row in interface_table(machine).rows] == [100, "not stated"]
