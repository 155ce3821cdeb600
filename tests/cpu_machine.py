"""Hardware files of an imaginary CPU."""

import dataclasses

from stepgauge.spec.calibration import OperationTable
from stepgauge.spec.hardware import HardwareFile


def made_up() -> HardwareFile:
    """Returns a machine on which every operation of a nano step was timed at one size."""
    sizes = {
        "matmul": "mnk",
        "rmsnorm": "mn",
        "layernorm": "mn",
        "attention": "htd",
        "cross-entropy": "mv",
    }
    names = [f"matmul {layout} fp32" for layout in ("nt", "nn", "tn")]
    for direction in ("forward", "backward"):
        names += [f"{norm} {direction} fp32" for norm in ("rmsnorm", "layernorm")]
        names += [f"attention sdpa {direction} fp32"]
        names.append(f"cross-entropy {direction}")
    tables = {
        name: OperationTable(axes, ((64,) * len(axes) + (10.0,),))
        for name in names
        for axes in [tuple(sizes[name.split()[0]])]
    }
    tables["optimizer adamw fp32"] = OperationTable(("numel",), ((1e6, 100.0),))
    tables["traffic"] = OperationTable(("bytes",), ((1e6, 10.0), (1e8, 900.0)))
    return HardwareFile(name="cpu", operations=tables)


def wired(cores: int) -> HardwareFile:
    """Returns the same machine with so many threads and a fabric between its cores."""
    wire = {"bytes_per_s": 1e9, "latency_us": 100, "efficiency": 1.0, "source": "assumed"}
    fabric = {"gpus_per_node": cores, "within": wire, "between": wire}
    return dataclasses.replace(made_up(), threads=cores, other={"fabric": fabric})
