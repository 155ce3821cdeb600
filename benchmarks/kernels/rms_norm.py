"""RMSNorm beside its peers on one GPU: accuracy against float64 first, then time.

    PYTHONPATH=src python benchmarks/kernels/rms_norm.py OUT_DIR [--quick] [--tune [all|focus]] [--budget SECONDS]

Writes OUT_DIR/rms_norm.jsonl, one line a row, and prints the tables last. Forward counts two tensors of bytes,
backward three, both five; the ceiling is a copy measured in the same run. A result whose error against float64 is above
the limit gets no time. --tune sweeps launch shapes instead and prints the best of each; focus takes the few shapes
and candidates that the first sweep left open. Peers that cannot be imported
are left out.
"""

import argparse
import importlib
import itertools
import json
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import triton
from torch.nn import functional as F
from triton.testing import do_bench

from stepgauge.kernels import rms_norm as package
from stepgauge.kernels.rms_norm import backward_input, backward_weight, extension, ops, reference
from stepgauge.kernels.rms_norm.triton import BackwardConfig, ForwardConfig

EPS = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16
SMALL = (2048, 2560, BF16)
# By importance: where the targets are and the peers are weakest first.
GRID = [
    (16384, 16384, BF16), (16384, 16384, FP32), (50000, 4096, BF16), (50000, 4096, FP32),
    (50000, 1024, BF16), (50000, 1024, FP32), (50000, 8192, FP32), (50000, 2048, FP32),
    (8192, 32768, BF16), (4096, 65536, BF16), (4096, 65536, FP32),
]  # fmt: skip
QUICK = GRID[:6]
FOCUS = [(16384, 16384, FP32), SMALL, (16384, 16384, BF16), (50000, 8192, FP32), (50000, 2048, FP32)]
LIMIT = {FP32: 1e-5, BF16: 1e-2}
PASSES = {"forward": 2, "backward": 3, "both": 5}
NAMES = {FP32: "fp32", BF16: "bf16"}


def peers(width):
    """name -> function of (x, weight); compile is made anew for each shape."""
    found = {
        "ours": lambda x, w: package.rms_norm(x, w, EPS),
        "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, EPS),
    }
    try:
        from liger_kernel.transformers.functional import liger_rms_norm

        # in_place would overwrite the gradient that is timed again and again.
        found["liger"] = lambda x, w: liger_rms_norm(x, w, EPS, in_place=False)
    except Exception as problem:
        print("liger:", type(problem).__name__, problem)
    try:
        quack = importlib.import_module("quack.rmsnorm")
        found["quack"] = lambda x, w: quack.rmsnorm(x, w, eps=EPS)
    except Exception as problem:
        print("quack:", type(problem).__name__, problem)
    found["compile"] = torch.compile(lambda x, w: reference.forward(x, w, EPS), dynamic=False)
    found["eager"] = lambda x, w: reference.forward(x, w, EPS)
    return found


def make(rows, width, dtype):
    torch.manual_seed(0)
    x = torch.randn(rows, width, device="cuda", dtype=dtype).requires_grad_()
    weight = torch.randn(width, device="cuda", dtype=dtype).requires_grad_()
    return x, weight, torch.randn(rows, width, device="cuda", dtype=dtype)


def exact_results(x, weight, dy):
    """float64 on the GPU: y and dx on every 97th row, dw over all rows in parts."""
    x, weight = x.detach(), weight.detach().double()
    picked = slice(None, None, 97)
    part = max(1, 2**27 // x.shape[1])
    dw = sum(
        backward_weight(d.double(), p.double(), weight, EPS) for d, p in zip(dy.split(part), x.split(part), strict=True)
    )
    picked_x, picked_dy = x[picked].double(), dy[picked].double()
    return picked, reference.forward(picked_x, weight, EPS), backward_input(picked_dy, picked_x, weight, EPS), dw


def worst_error(y, dx, dw, exact):
    picked, exact_y, exact_dx, exact_dw = exact
    pairs = [(y[picked], exact_y), (dx[picked], exact_dx), (dw, exact_dw)]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return float("nan") if any(e != e for e in errors) else max(errors)


def timed(fn, rep):
    return do_bench(fn, warmup=max(5, rep // 4), rep=rep, quantiles=[0.2, 0.5, 0.8])


def host_us(fn, calls=400):
    """Host time of a call, the GPU far from busy: wall time over many calls without waiting."""
    for _ in range(50):
        fn()
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            fn()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6


class Log:
    def __init__(self, out_dir, budget_s):
        out_dir.mkdir(parents=True, exist_ok=True)
        self.file = (out_dir / "rms_norm.jsonl").open("a")
        self.start, self.budget_s = time.monotonic(), budget_s
        self.common = {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        }  # fmt: skip
        self.rows = []

    def left(self):
        return self.budget_s - (time.monotonic() - self.start)

    def write(self, **row):
        self.rows.append(row)
        print(json.dumps(self.common | row), file=self.file, flush=True)


def copy_ceiling(log):
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    p20, ms, p80 = timed(lambda: target.copy_(source), 100)
    rate = 2 * source.nbytes / ms / 1e6
    log.write(op="copy", name="copy", ms=ms, ms_p20=p20, ms_p80=p80, gb_per_s=rate)
    return rate


def bench_shape(log, rows, width, dtype, directions, rep, with_compile=True):
    x, weight, dy = make(rows, width, dtype)
    exact = exact_results(x, weight, dy)
    for name, fn in peers(width).items():
        if name == "compile" and not with_compile:
            continue
        if log.left() < 3:
            print("out of time before", rows, width, name)
            return
        row = {"op": "rms_norm", "rows": rows, "width": width, "dtype": NAMES[dtype], "name": name}
        try:
            y = fn(x, weight)
            dx, dw = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
            error = worst_error(y, dx, dw, exact)
            del dx, dw
            if not error < LIMIT[dtype]:
                log.write(**row, error=error, wrong=True)
                continue

            def backward(y=y):
                return torch.autograd.grad(y, (x, weight), dy, retain_graph=True)

            def both(fn=fn):
                return torch.autograd.grad(fn(x, weight), (x, weight), dy)

            calls = {"forward": lambda fn=fn: fn(x, weight), "backward": backward, "both": both}
            for direction in directions:
                p20, ms, p80 = timed(calls[direction], rep)
                rate = PASSES[direction] * x.nbytes / ms / 1e6
                log.write(**row, direction=direction, ms=ms, ms_p20=p20, ms_p80=p80, gb_per_s=rate, error=error)
            del y
        except Exception as problem:
            log.write(**row, failed=f"{type(problem).__name__}: {str(problem)[:200]}")
    torch._dynamo.reset()


def replayed_ms(fn, rep):
    """Time without the host: a replayed CUDA graph; NaN where the function cannot be captured."""
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        return timed(graph.replay, rep)[1]
    except Exception as problem:
        print("no graph:", type(problem).__name__, str(problem)[:200])
        return float("nan")


def load_extension(log):
    start = time.monotonic()
    loaded = extension.load()
    log.write(op="extension", name="build", loaded=loaded, seconds=time.monotonic() - start, problem=extension.problem)
    print(f"C++ extension: {loaded}, {time.monotonic() - start:.1f} s, {extension.problem}")


def bench_small(log, rep):
    """The launch-bound row: our ways to launch beside each other, in GPU-event and in host time."""
    rows, width, dtype = SMALL
    x, weight, dy = make(rows, width, dtype)
    tiny, _, tiny_dy = make(16, width, dtype)

    def through_jit(x, w):
        return package.rms_norm(x, w, EPS)

    def in_python(x, w):
        return package.rms_norm(x, w, EPS)

    ways = {
        "ours": lambda x, w: package.rms_norm(x, w, EPS),
        "ours, Python": in_python,
        "ours, operator": lambda x, w: torch.ops.stepgauge.rms_norm(x, w, EPS, x.dtype)[0],
        "ours, JIT launch": through_jit,
        "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, EPS),
    }
    hooked, in_cpp = ops.hooks_present, extension.call
    for name, fn in ways.items():
        ops.hooks_present = (lambda: True) if fn is through_jit else hooked
        extension.call = None if fn in (through_jit, in_python) else in_cpp
        try:

            def both(x=x, dy=dy, fn=fn):
                return torch.autograd.grad(fn(x, weight), (x, weight), dy)

            for _ in range(3):
                both()
            p20, ms, p80 = timed(both, rep)
            graph_ms = replayed_ms(both, rep)
            log.write(
                op="rms_norm small", name=name, rows=rows, width=width, dtype=NAMES[dtype], direction="both",
                ms=ms, ms_p20=p20, ms_p80=p80, graph_ms=graph_ms,
                host_forward_us=host_us(lambda fn=fn: fn(tiny, weight)),
                host_both_us=host_us(lambda: both(tiny, tiny_dy)),
            )  # fmt: skip
        except Exception as problem:
            log.write(op="rms_norm small", name=name, failed=f"{type(problem).__name__}: {str(problem)[:200]}")
    ops.hooks_present, extension.call = hooked, in_cpp


# Tuning


def focus_backward(width, dtype):
    """What the first sweep did not try: streaming hints, 16 KiB rows with more warps, split rows."""
    if width < 16384:
        return [c for c in backward_candidates(width, dtype) if c.stages >= 3 and c.num_warps <= 16]
    tries = [
        {"stream": True}, {"num_warps": 32}, {"num_warps": 32, "stream": True}, {"stages": 1},
        {"stages": 1, "num_warps": 32}, {"stages": 1, "num_warps": 32, "stream": True},
        {"keep_weight": True, "num_warps": 32}, {"keep_weight": True}, {"num_warps": 8},
    ]  # fmt: skip
    first = ops.Plan(width, dtype, 132).bwd
    split = [(4096, 8, 2, 2), (4096, 16, 2, 1), (2048, 8, 4, 2), (4096, 16, 4, 1), (4096, 16, 1, 1), (2048, 16, 4, 2)]
    return [replace(first, **options) for options in tries] + [
        BackwardConfig(inner, 1, warps, 1, per_sm, blocks=blocks) for inner, warps, blocks, per_sm in split
    ]


def backward_candidates(width, dtype):
    block = triton.next_power_of_2(width)
    itemsize = dtype.itemsize
    for rows, warps, stages, per_sm in itertools.product((1, 2, 4, 8), (4, 8, 16, 32), (1, 2, 3, 4), (1, 2, 3, 4)):
        elements = rows * block // (warps * 32)  # of one tensor a thread
        if not 4 <= elements <= 32 or warps * per_sm > 32 or (rows > 1 and block > 2048):
            continue
        keep = elements < 32
        shared = (3 - keep) * rows * block * itemsize * (stages - 1)
        if shared * per_sm > 220 * 1024:
            continue
        if stages == 1 and warps * per_sm < 16:
            continue  # Neither copies in flight nor warps to wait for them.
        yield BackwardConfig(block, rows, warps, stages, per_sm, keep_weight=keep)
    if width >= 16384:
        for inner, warps, blocks, per_sm in [
            (4096, 16, 4, 1), (4096, 8, 2, 1), (2048, 8, 4, 1), (2048, 8, 4, 2), (2048, 4, 2, 4), (8192, 16, 1, 1),
        ]:  # fmt: skip
            if width % inner == 0:
                yield BackwardConfig(inner, 1, warps, 1, per_sm, blocks=blocks)


def forward_candidates(width, dtype):
    block = triton.next_power_of_2(width)
    for rows, warps in itertools.product((1, 2, 4, 8), (2, 4, 8, 16, 32)):
        if 4 <= rows * block // (warps * 32) <= 64:
            yield ForwardConfig(block, rows, warps)
    if width >= 16384:
        for inner, warps in [(4096, 8), (8192, 16), (16384, 16), (16384, 32)]:
            yield ForwardConfig(inner, 1, warps, wide=True)


def tune(log, shapes, rep, seconds_a_shape, backward_listed):
    best = {}
    for rows, width, dtype in shapes:
        x, weight, dy = make(rows, width, dtype)
        x, weight = x.detach(), weight.detach()
        exact = exact_results(x, weight, dy)
        rstd = torch.rsqrt(x.float().square().mean(-1) + EPS)
        default = ops.Plan(width, dtype, *ops.limits(x.device))
        for direction, listed, first, share in (
            ("backward", backward_listed, default.bwd, 0.75),
            ("forward", forward_candidates, default.fwd, 0.25),
        ):
            end = time.monotonic() + min(log.left() - 2, seconds_a_shape * share)
            # Shuffled, so that what time allows is spread over the whole list.
            candidates = sorted(set(listed(width, dtype)) - {first}, key=lambda c: zlib.crc32(str(c).encode()))
            inputs = (x, weight, dy, rstd)
            results = []
            for config, plan in prepared([first, *candidates], direction, inputs, end):
                row = {"direction": direction, "rows": rows, "width": width, "dtype": NAMES[dtype]}
                try:
                    ms = measure(plan, direction, *inputs, exact, rep)
                except Exception as problem:
                    log.write(
                        op="tune", **row, config=str(config), failed=f"{type(problem).__name__}: {problem!s:.200}"
                    )
                    continue
                results.append((ms, config))
                rate = PASSES[direction] * x.nbytes / ms / 1e6
                log.write(op="tune", **row, ms=ms, gb_per_s=rate, config=str(config), default=config == first)
            results.sort(key=lambda r: r[0])
            best[rows, width, NAMES[dtype], direction] = (results, first, x.nbytes)
        del x, dy, inputs
    print("\nTuning: the three best and the default (D)")
    for (rows, width, dtype, direction), (results, default, nbytes) in best.items():
        print(f"{direction} {rows} x {width} {dtype}: {len(results)} tried")
        for ms, config in results[:3] + [r for r in results[3:] if r[1] == default]:
            mark = "D" if config == default else " "
            text = str(config).replace("Config", "")
            print(f"  {mark} {ms:.4f} ms {PASSES[direction] * nbytes / ms / 1e6:5.0f} GB/s {text}")


def prepared(candidates, direction, inputs, end):
    """Compile until half the time is gone, several at a time, then yield what is ready one by one."""
    half = time.monotonic() + (end - time.monotonic()) / 2

    def prepare(config):
        return prepare_one(config, direction, *inputs) if time.monotonic() < half else None

    with ThreadPoolExecutor(8) as pool:
        futures = [(config, pool.submit(prepare, config)) for config in candidates]
    for config, future in futures:
        if time.monotonic() > end:
            return
        if future.exception() is not None:
            print("does not compile:", config, str(future.exception())[:100])
        elif future.result() is not None:
            yield config, future.result()


def prepare_one(config, direction, x, weight, dy, rstd):
    """Compile without launching."""
    torch.cuda.set_device(x.device)
    plan = ops.Plan(x.shape[1], x.dtype, *ops.limits(x.device), **{direction: config})
    num_rows = x.shape[0]
    if direction == "forward":
        plan.forward.compile(x, None, weight, x, None, rstd, num_rows, EPS)
    else:
        partial = torch.empty(1, x.shape[1], device=x.device)
        plan.backward.compile(dy, x, weight, rstd, None, x, partial, num_rows)
    return plan


def measure(plan, direction, x, weight, dy, rstd, exact, rep):
    original = ops.plan_for
    ops.plan_for = lambda *args: plan
    try:
        picked, exact_y, exact_dx, exact_dw = exact
        if direction == "forward":
            outputs = [(ops.run_forward(x, None, weight, EPS, x.dtype)[0][picked], exact_y)]
        else:
            dx, dw = ops.run_backward(dy, x, weight, rstd, None)
            outputs = [(dx[picked], exact_dx), (dw, exact_dw)]
        for value, reference_value in outputs:
            error = ((value.double() - reference_value).norm() / reference_value.norm()).item()
            if not error < LIMIT[x.dtype]:
                raise ValueError(f"wrong by {error}")
        if direction == "forward":
            return timed(lambda: ops.run_forward(x, None, weight, EPS, x.dtype), rep)[1]
        return timed(lambda: ops.run_backward(dy, x, weight, rstd, None), rep)[1]
    finally:
        ops.plan_for = original


def print_tables(log, ceiling):
    print(f"\n{log.common['device']}, torch {log.common['torch']}, triton {log.common['triton']}")
    print(f"copy {ceiling:.0f} GB/s; RMSNorm in GB/s (fraction of the copy), last: ours over the best peer")
    groups = {}
    for row in log.rows:
        if row["op"] == "rms_norm":
            key = (row["rows"], row["width"], row["dtype"])
            for direction in [row["direction"]] if "direction" in row else ["forward", "backward"]:
                groups.setdefault((*key, direction), {})[row["name"]] = row
    for key, found in groups.items():
        rates = {n: r["gb_per_s"] for n, r in found.items() if "gb_per_s" in r}
        cells = [f"{n} {r:.0f} ({r / ceiling:.2f})" for n, r in rates.items()]
        cells += [f"{n} {'WRONG' if 'wrong' in r else 'failed'}" for n, r in found.items() if n not in rates]
        others = [r for n, r in rates.items() if n != "ours"]
        ratio = f"{rates['ours'] / max(others):.3f}" if others and "ours" in rates else "-"
        print(f"{key[0]}x{key[1]} {key[2]} {key[3]:8s} | {' | '.join(cells)} | {ratio}")
    for row in log.rows:
        if "failed" in row and row["op"] != "tune":
            print("failed:", row["name"], row["failed"])
    print("\nSmall row, forward+backward: ms p20/p50/p80 | replayed graph | host us forward, both")
    for row in log.rows:
        if row["op"] == "rms_norm small" and "ms" in row:
            print(
                f"{row['name']:18s} {row['ms_p20']:.4f}/{row['ms']:.4f}/{row['ms_p80']:.4f} | {row['graph_ms']:.4f} | "
                f"{row['host_forward_us']:.1f}, {row['host_both_us']:.1f}"
            )
    for row in log.rows:
        if row.get("direction") == "both" and row["op"] == "rms_norm":
            print(f"{row['name']:18s} {row['ms_p20']:.4f}/{row['ms']:.4f}/{row['ms_p80']:.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--quick", action="store_true", help="fewer shapes, shorter samples, no torch.compile")
    parser.add_argument("--tune", nargs="?", const="all", choices=("all", "focus"), help="sweep launch shapes instead")
    parser.add_argument("--budget", type=float, default=140.0, help="seconds in all")
    args = parser.parse_args()
    log = Log(args.out_dir, args.budget)
    rep = 30 if args.quick else 80
    if args.tune == "focus":
        tune(log, FOCUS, 30, args.budget / len(FOCUS), focus_backward)
        return
    if args.tune:
        shapes = [SMALL, *(QUICK if args.quick else GRID[:9])]
        tune(log, shapes, 20, args.budget / len(shapes), backward_candidates)
        return
    ceiling = copy_ceiling(log)
    load_extension(log)
    bench_small(log, rep)
    bench_shape(log, *SMALL, ("both",), rep, with_compile=not args.quick)
    for rows, width, dtype in QUICK if args.quick else GRID:
        if log.left() < 5:
            break
        bench_shape(log, rows, width, dtype, ("forward", "backward"), rep, with_compile=not args.quick)
    print_tables(log, ceiling)


if __name__ == "__main__":
    main()
