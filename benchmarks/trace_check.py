"""Holds `stepgauge profile trace` beside sums over the raw JSON, for any traces.

    python benchmarks/trace_check.py FILE ... [--hta FILE.json] [--markdown FILE]

The sums are taken here from the JSON alone: launches paired by correlation, marked steps by when
the host launched, the union of kernels for busy time, the rest of first begin to last end for idle
time. `--hta` names what `--with-hta` wrote in an environment that has Holistic Trace Analysis.
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
    """What the trace holds, in µs; None for a trace without kernels of marked steps."""
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
    mine, inside = [], []
    for event in sorted(
        (event for event in events if event["cat"] in DEVICE), key=lambda event: float(event["ts"])
    ):
        begin = float(event["ts"])
        asked = launches.get(event.get("args", {}).get("correlation"), None if launches else begin)
        if asked is not None:  # else it counts with the one that began before it
            inside = [n for n, (a, b) in enumerate(steps) if a <= asked <= b]
        if inside or (not steps and (mine or asked is not None)):
            end = begin + float(event.get("dur", 0))
            mine.append((begin, end, event["name"], event["cat"], inside[-1] if inside else 0))
    return _sums(mine) if mine else None


def _sums(mine):
    communication = [k for k in mine if COMMUNICATION.search(k[2])]
    compute = [k for k in mine if k[3] not in COPIES and not COMMUNICATION.search(k[2])]
    busy, together = _union(mine), _union([*communication, *compute])
    comm, comp = _union(communication), _union(compute)
    span = max(k[1] for k in mine) - min(k[0] for k in mine)
    return {
        "steps": len({k[4] for k in mine}), "work": len(mine), "sum": sum(k[1] - k[0] for k in mine), "busy": busy,
        "idle": span - busy, "step": span / len({k[4] for k in mine}), "communication": comm,
        "hidden": comm + comp - together,
    }  # fmt: skip


def _union(pieces):
    total, end = 0.0, float("-inf")
    for begin, stop, *_ in sorted(pieces):
        total += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return total


def our_sums(path):
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
    """What Holistic Trace Analysis says of each file, or why it does not."""
    from hta.trace_analysis import TraceAnalysis

    result = {}
    for path in files:
        try:
            analysis = TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent),
                                     include_last_profiler_step=True)  # fmt: skip
            row = analysis.get_temporal_breakdown(visualize=False).iloc[0]
            said = {"busy": float(row["busy_time(us)"] if "busy_time(us)" in row else
                    row["kernel_time(us)"] - row["idle_time(us)"]), "idle": float(row["idle_time(us)"])}  # fmt: skip
            try:
                both = analysis.get_comm_comp_overlap(visualize=False)
                said["overlap"] = float(both["comp_comm_overlap_pctg"].iloc[0])
            except Exception as error:
                said["overlap"] = None
                print(path, error, file=sys.stderr)
        except Exception as error:
            said = {"error": type(error).__name__}
        result[str(path)] = said
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--hta", type=Path)
    parser.add_argument("--with-hta", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.with_hta:
        asked.with_hta.write_text(json.dumps(hta_sums(asked.files)))
        return 0
    theirs = json.loads(asked.hta.read_text()) if asked.hta else {}
    wrong, lines = 0, []
    for path in asked.files:
        mine, found = our_sums(path)
        if mine is None:
            print(f"{path}: no kernels of steps: {getattr(found, 'notes', found)}")
            continue
        raw = raw_sums(path)
        if raw is None:
            print(f"{path}: OFF, no kernels of steps in the JSON")
            continue
        off = [name for name in raw if abs(raw[name] - mine[name]) > max(0.51, 1e-6 * raw[name])]
        wrong += bool(off)
        other = [c for c in found.cells if c.kind == "other"]
        share = 100 * sum(c.us for c in other) / mine["sum"]
        lines.append(_line(path, raw, mine, theirs.get(str(path), {}), share))
        names = sorted(
            {c.name for c in other}, key=lambda n: -sum(c.us for c in other if c.name == n)
        )
        print(lines[-1], f"OFF {off}" if off else "ok", names[:3] if share > 2 else "")  # fmt: skip
    if asked.markdown:
        asked.markdown.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} traces, {wrong} off")
    return int(wrong > 0)


def _line(path, raw, mine, theirs, other):
    def ms(us):
        return f"{us / 1e3:,.3f}"

    ratio = f"{100 * mine['hidden'] / mine['communication']:.2f}" if mine["communication"] else ""
    hta_ratio = theirs.get("overlap")
    cells = [
        path.name.removesuffix(".gz").removesuffix(".json"), str(mine["steps"]), f"{mine['work']:,}",
        ms(mine["sum"]), ms(raw["busy"]), ms(raw["idle"]), ms(mine["idle"]),
        ms(theirs["idle"]) if "idle" in theirs else theirs.get("error", ""), ms(mine["step"]), ratio,
        f"{hta_ratio:.2f}" if hta_ratio is not None and ratio else "", f"{other:.1f}",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
