"""The record of a person's own function: its figures, what it launched, where it lies under the
roof.
"""

from stepgauge.report.figure import roofline
from stepgauge.report.numbers import cut_to, heading, whole
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Range, Table
from stepgauge.spec.record import Record

LONGEST_NAME = 64
_NAMES = {
    "ms": "ms",
    "gb_per_s": "GB/s",
    "copy_gb_per_s": "GB/s of a copy here",
    "matmul_tflop_per_s": "TFLOP/s of a matmul here",
    "tflop_per_s": "TFLOP/s",
    "bytes": "MiB moved at least",
    "attainable_tflop_per_s": "TFLOP/s attainable",
    "fraction_of_roofline": "of the roofline",
    "error": "relative error",
    "intensity": "FLOP/byte",
    "flops": "GFLOP",
}
_SCALES = {"bytes": 2.0**-20, "flops": 1e-9}


def title(record: Record) -> str:
    return f"{record.spec['file']}:{record.spec['function']}"


def figures_table(record: Record) -> Table:
    """One row a figure: median, and the range from p10 to p90 where it has one."""
    rows = []
    for name, sample in record.metrics.items():
        scale = _SCALES.get(name, 1.0)
        median = sample.median * scale
        spread = Range(sample.p10 * scale, sample.p90 * scale) if sample.n > 1 else None
        name = _NAMES.get(name) or heading(name, sample.unit)
        rows.append({"figure": name, "median": median, "p10–p90": spread})
    note = f"; {record.note}" if record.note else ""
    caption = f"{title(record)} on {record.environment.get('device', '')}{note}"
    return Table.from_rows(rows, caption=caption)


def launched_table(record: Record) -> Table:
    """One row a kernel, most time first: calls and µs in one call of the function, and its share."""
    total = sum(us for _, us in record.series.values()) or 1.0
    rows = [
        [cut_to(name, LONGEST_NAME), whole(calls), us, 100 * us / total]
        for name, (calls, us) in record.series.items()
    ]
    on_cpu = record.environment.get("device") == record.environment.get("cpu")
    what = "operator" if on_cpu else "device kernel"
    caption = f"What one call launches: each {what} with its own time."
    return Table([what, "calls", "µs", "%"], rows, caption=caption, formats={"%": ".1f"})


def op_blocks(record: Record) -> list[Block]:
    """The roofline where FLOPs are known, the figures, the launches."""
    blocks: list[Block] = [figures_table(record)]
    figures = {name: sample.median for name, sample in record.metrics.items()}
    if "intensity" in figures:
        points = {str(record.spec["function"]): (figures["intensity"], figures["tflop_per_s"])}
        ceilings = {
            "bandwidth_gb_per_s": figures["copy_gb_per_s"],
            "peak_tflop_per_s": figures["matmul_tflop_per_s"],
        }
        caption = "Under the roof that a copy and a matrix product reach on this device in the same process."
        blocks.insert(0, Plot(roofline(points, **ceilings), caption))
    return [*blocks, launched_table(record)] if record.series else blocks
