"""Compares the sums of `stepgauge profile trace` with sums computed here from the raw JSON.

    python benchmarks/trace_check.py FILE ... [--hta FILE.json] [--markdown FILE]
    python benchmarks/trace_check.py FILE ... --with-hta FILE.json   # needs Holistic Trace Analysis

The raw sums use nothing of stepgauge. A kernel belongs to the step in which the host launched it;
launches are found by correlation. Busy time is the union of kernel intervals. Idle time is the rest
of the span between the first begin and the last end.

Prints a line per trace and exits with status 1 if one is different. --markdown writes the lines as
rows of a table. --with-hta writes the figures of Holistic Trace Analysis to a file, in an
environment that has it; --hta adds them to the lines.
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path

DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
COPIES = DEVICE - {"kernel"}
HOST = {"cuda_runtime", "cuda_driver", "runtime", "xpu_runtime"}
COMMUNICATION = re.compile(
    r"nccl|::ep::int|cross_device_reduce|multimem_|one_shot_all|two_shot_all|PtoP|Peer", re.I
)


def raw_sums(path):
    """Returns the sums of a trace, in µs. None for a trace without kernels in marked steps."""
    data = path.read_bytes()
    data = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    events = [e for e in (data["traceEvents"] if isinstance(data, dict) else data)
              if e.get("ph") == "X"]  # fmt: skip
    for event in events:
        event["cat"] = str(event.get("cat", "")).lower()
    steps = sorted({
        (float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))) for e in events
        if e["name"].startswith("ProfilerStep#") and e["cat"] in ("user_annotation", "cpu_op", "operator")
    })  # fmt: skip
    launches = {
        e["args"]["correlation"]: float(e["ts"])
        for e in events
        if e["cat"] in HOST and "correlation" in e.get("args", {})
    }
    kernels, inside = [], []
    for event in sorted(
        (event for event in events if event["cat"] in DEVICE), key=lambda event: float(event["ts"])
    ):
        begin = float(event["ts"])
        launch = launches.get(event.get("args", {}).get("correlation"), None if launches else begin)
        if launch is not None:  # else the kernel belongs to the step of the previous kernel
            inside = [n for n, (a, b) in enumerate(steps) if a <= launch <= b]
        if inside or (not steps and (kernels or launch is not None)):
            end = begin + float(event.get("dur", 0))
            kernels.append((begin, end, event["name"], event["cat"], inside[-1] if inside else 0))
    return _summed(kernels) if kernels else None


def _summed(kernels):
    communication = [k for k in kernels if COMMUNICATION.search(k[2])]
    compute = [k for k in kernels if k[3] not in COPIES and not COMMUNICATION.search(k[2])]
    busy, either = _union(kernels), _union([*communication, *compute])
    comm, comp = _union(communication), _union(compute)
    span = max(k[1] for k in kernels) - min(k[0] for k in kernels)
    return {
        "steps": len({k[4] for k in kernels}), "work": len(kernels),
        "sum": sum(k[1] - k[0] for k in kernels), "busy": busy,
        "idle": span - busy, "step": span / len({k[4] for k in kernels}), "communication": comm,
        "hidden": comm + comp - either,
    }  # fmt: skip


def _union(pieces):
    total, end = 0.0, float("-inf")
    for begin, stop, *_ in sorted(pieces):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def stepgauge_sums(path):
    """Returns the same sums by stepgauge, and its analysis. (None, reason) if it has no kernels."""
    from stepgauge.trace.analysis import analyse
    from stepgauge.trace.read import TraceError

    try:
        found = analyse(path)
    except TraceError as error:
        return None, str(error)
    if not found.on_device:
        return None, found
    overlap, cells = found.overlap, found.cells
    return {
        "steps": found.steps, "work": sum(c.calls for c in cells), "sum": sum(c.us for c in cells),
        "busy": sum(c.busy_us for c in cells), "idle": sum(c.idle_us for c in cells), "step": found.step_us,
        "communication": overlap.communication_us if overlap else 0.0,
        "hidden": overlap.hidden_us if overlap else 0.0,
    }, found  # fmt: skip


def hta_sums(files):
    """Returns the figures of Holistic Trace Analysis for each file, or its error."""
    from hta.trace_analysis import TraceAnalysis

    result = {}
    for path in files:
        try:
            analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent),
                                     include_last_profiler_step=True)  # fmt: skip
            row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
            figures = {"busy": float(row["busy_time(us)"] if "busy_time(us)" in row else
                    row["kernel_time(us)"] - row["idle_time(us)"]), "idle": float(row["idle_time(us)"])}  # fmt: skip
            try:
                overlap = analysis.get_comm_comp_overlap(visualize=False)
                figures["overlap"] = float(overlap["comp_comm_overlap_pctg"].iloc[0])
            except Exception as error:
                figures["overlap"] = None
                print(path, error, file=sys.stderr)
        except Exception as error:
            figures = {"error": type(error).__name__}
        result[str(path)] = figures
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--hta", type=Path, help="figures that --with-hta wrote")
    parser.add_argument(
        "--with-hta",
        type=Path,
        help="only write the figures of Holistic Trace Analysis to this file",
    )
    parser.add_argument("--markdown", type=Path, help="write the lines to this file")
    arguments = parser.parse_args()
    if arguments.with_hta:
        arguments.with_hta.write_text(json.dumps(hta_sums(arguments.files)))
        return 0
    hta = json.loads(arguments.hta.read_text()) if arguments.hta else {}
    wrong, lines = 0, []
    for path in arguments.files:
        sums, found = stepgauge_sums(path)
        if sums is None:
            print(f"{path}: no kernels in steps: {getattr(found, 'notes', found)}")
            continue
        raw = raw_sums(path)
        if raw is None:
            print(f"{path}: DIFFERENT, no kernels in steps in the JSON")
            continue
        different = [
            name for name in raw if abs(raw[name] - sums[name]) > max(0.51, 1e-6 * raw[name])
        ]
        wrong += bool(different)
        other = [c for c in found.cells if c.kind == "other"]
        share = 100 * sum(c.us for c in other) / sums["sum"]
        lines.append(_line(path, raw, sums, hta.get(str(path), {}), share))
        names = sorted(
            {c.name for c in other}, key=lambda n: -sum(c.us for c in other if c.name == n)
        )
        print(lines[-1], f"DIFFERENT {different}" if different else "ok", names[:3] if share > 2 else "")  # fmt: skip
    if arguments.markdown:
        arguments.markdown.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} traces, {wrong} different")
    return int(wrong > 0)


def _line(path, raw, sums, hta, other):
    def ms(us):
        return f"{us / 1e3:,.3f}"

    ratio = f"{100 * sums['hidden'] / sums['communication']:.2f}" if sums["communication"] else ""
    hta_ratio = hta.get("overlap")
    cells = [
        path.name.removesuffix(".gz").removesuffix(".json"), str(sums["steps"]), f"{sums['work']:,}",
        ms(sums["sum"]), ms(raw["busy"]), ms(raw["idle"]), ms(sums["idle"]),
        ms(hta["idle"]) if "idle" in hta else hta.get("error", ""), ms(sums["step"]), ratio,
        f"{hta_ratio:.2f}" if hta_ratio is not None and ratio else "", f"{other:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
