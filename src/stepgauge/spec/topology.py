"""What a machine is made of, as far as moving bytes goes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Interface:
    """A network interface. `bytes_per_s` as its driver states it, None where it does not."""

    name: str
    is_up: bool
    bytes_per_s: float | None
    numa_node: int | None


@dataclasses.dataclass(frozen=True)
class NumaNode:
    index: int
    cores: str  # as the kernel writes them: 0-15,32-47
    memory_bytes: int


@dataclasses.dataclass(frozen=True)
class Gpu:
    """`affinity` are the cores next to it; PCIe as it is linked now, and at most."""

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
    """links (i, j), i < j: how two GPUs reach each other, as nvidia-smi topo names it."""

    host: str
    cpu: str
    cores: int
    numa_nodes: list[NumaNode]
    interfaces: list[Interface]
    gpus: list[Gpu]
    links: dict[tuple[int, int], str]
    without_gpus: str  # why none are listed, one sentence
