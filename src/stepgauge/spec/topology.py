"""The parts of a machine that matter for moving data: NUMA nodes, network interfaces and GPUs."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface. `bytes_per_s` is what its driver reports, or None."""

    name: str
    is_up: bool
    bytes_per_s: float | None
    numa_node: int | None


@dataclasses.dataclass(frozen=True)
class NumaNode:
    """A NUMA node. `cores` is in the kernel's notation: 0-15,32-47."""

    index: int
    cores: str
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU. `affinity` are the cores close to it; `pcie` is its current link and its maximum."""

    index: int
    name: str
    memory_bytes: int
    pci_address: str
    pcie: str
    numa_node: int | None
    affinity: str
    nvlinks: int
    nvlink_bytes_per_s: float | None


@dataclasses.dataclass(frozen=True)
class Topology:
    """The topology of a machine.

    links         (i, j) with i < j -> connection of two GPUs, as nvidia-smi topo names it
    without_gpus  if no GPUs are listed, one sentence on the reason
    """

    host: str
    cpu: str
    cores: int
    numa_nodes: list[NumaNode]
    interfaces: list[Interface]
    gpus: list[Gpu]
    links: dict[tuple[int, int], str]
    without_gpus: str
