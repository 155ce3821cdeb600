"""Reports on the user's own function: its figures, its kernels and its place under the roofline."""

from stepgauge.report.figure import roofline
from stepgauge.report.numbers import heading, truncated, whole
from stepgauge.report.page import Block, Plot
from stepgauge.report.table import Range, Table
from stepgauge.spec.record import Record

LONGEST_NAME = 64
_NAMES = {
    "ms": "ms",
    "gb_per_s": "GB/s",
    "copy_gb_per_s": "GB/s of a copy on this device",
    "matmul_tflop_per_s": "TFLOP/s of a matmul on this device",
    "tflop_per_s": "TFLOP/s",
    "bytes": "least MiB moved",
    "attainable_tflop_per_s": "TFLOP/s attainable",
    "fraction_of_roofline": "fraction of the roofline",
    "error": "relative error",
    "intensity": "FLOP/byte",
    "flops": "GFLOP",
}
_SCALES = {"bytes": 2.0**-20, "flops": 1e-9}


def title(record: Record) -> str:
    return f"{record.spec['file']}:{record.spec['function']}"


def figures_table(record: Record) -> Table:
    """One row per figure: its median, and its range from p10 to p90 if it was repeated."""
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
    """One row per kernel, the longest first: calls and µs in one call of the function, and share."""
    total = sum(us for _, us in record.series.values()) or 1.0
    rows = [
        [truncated(name, LONGEST_NAME), whole(calls), us, 100 * us / total]
        for name, (calls, us) in record.series.items()
    ]
    on_cpu = record.environment.get("device") == record.environment.get("cpu")
    kind = "operator" if on_cpu else "device kernel"
    caption = f"Time of each {kind} in one call of the function."
    return Table([kind, "calls", "µs", "%"], rows, caption=caption, formats={"%": ".1f"})


def op_blocks(record: Record) -> list[Block]:
    """The roofline if the FLOPs are known, the figures and the kernels."""
    blocks: list[Block] = [figures_table(record)]
    figures = {name: sample.median for name, sample in record.metrics.items()}
    if "intensity" in figures:
        points = {str(record.spec["function"]): (figures["intensity"], figures["tflop_per_s"])}
        ceilings = {
            "bandwidth_gb_per_s": figures["copy_gb_per_s"],
            "peak_tflop_per_s": figures["matmul_tflop_per_s"],
        }
        caption = (
            "Roofline. Its limits are a copy and a matrix product, measured in the same process."
        )
        blocks.insert(0, Plot(roofline(points, **ceilings), caption))
    return [*blocks, launched_table(record)] if record.series else blocks
