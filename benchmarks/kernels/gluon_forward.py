"""The attention forward in Gluon: which of its shapes are right, and how fast each is beside its peers.

    PYTHONPATH=src python benchmarks/kernels/gluon_forward.py OUT [--budget 150]

Each shape is compiled and checked against float64 in a process of its own with a time limit, all at once. What passed
is timed beside the portable Triton forward, cuDNN and FlashAttention-2, all in one process; what hangs there is left
out of another one. One JSON line a row in OUT/gluon.jsonl at once, what failed in OUT/gluon-errors.txt.
`--dry-run` goes through all of it on a CPU with the reference in place of the kernels.
"""

import argparse
import functools
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

CHECK_SECONDS, SILENT_SECONDS = 60, 25

# From the simplest to the boldest: consumers, keys of a tile, ring, q ring, overlap, turns, persistent.
VARIANTS = {
    "in-order": {64: (2, 128, 2, 1, False, False, False), 128: (2, 128, 2, 1, False, False, False)},
    "overlap": {64: (2, 128, 2, 1, True, False, False), 128: (2, 128, 2, 1, True, False, False)},
    "turns": {64: (2, 128, 2, 1, True, True, False), 128: (2, 128, 2, 1, True, True, False)},
    "persistent": {64: (2, 128, 3, 1, True, True, True), 128: (2, 128, 2, 1, True, True, True)},
    "ahead": {64: (2, 128, 3, 2, True, True, True), 128: (2, 128, 2, 2, True, True, True)},
    "ahead-no-turns": {64: (2, 128, 3, 2, True, False, True), 128: (2, 128, 2, 2, True, False, True)},
    "narrow": {64: (2, 64, 4, 2, True, True, True), 128: (2, 64, 4, 2, True, True, True)},
    "three": {64: (3, 64, 4, 2, True, True, True), 128: (3, 64, 2, 1, False, False, True)},
    "three-wide": {64: (3, 128, 2, 2, False, False, True)},
}
PEERS = ("triton", "cudnn", "fa2")
SHAPES = [(d, causal, t) for d, causal, t in itertools.product((128, 64), (True, False), (16384, 2048, 8192, 512))]
TOKENS, MODEL_WIDTH = 16384, 2048
# batch, heads, key heads, queries, keys, layout in memory
CASES = [
    (1, 2, 2, 128, 128, "BHTD"),
    (1, 1, 1, 1, 1, "BHTD"),
    (2, 4, 2, 300, 300, "BHTD"),
    (1, 2, 1, 65, 1000, "BHTD"),
    (1, 2, 2, 1000, 65, "BHTD"),
    (2, 3, 3, 513, 511, "BTHD"),
    (1, 4, 4, 640, 640, "fused"),
    (2, 16, 16, 1024, 1024, "BTHD"),
    (1, 16, 4, 2000, 2000, "BHTD"),
]
DRY_CASES, DRY_SHAPES = CASES[:3], [(64, True, 64), (64, False, 64)]


def record(out, **row):
    with (out / "gluon.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def report_failure(out, what):
    with (out / "gluon-errors.txt").open("a") as file:
        file.write(f"---- {what}\n{traceback.format_exc()}\n")


def say(**message):
    print(json.dumps(message), flush=True)


# ---- what runs -----------------------------------------------------------------------------------------------------


def implementation(name, width, dry_run):
    """A function of (q, k, v, is_causal) that gives (o, lse or None)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from stepgauge.kernels.attention import reference

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
    if name in backends and not dry_run:

        def built_in(q, k, v, is_causal):
            with sdpa_kernel(backends[name]):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal), None

        return built_in
    if dry_run:

        def plain(q, k, v, is_causal):
            wide = (x.float() for x in (q, *grouped(q, k, v)))
            o, lse = reference.attention(*wide, is_causal=is_causal)
            return o.to(q.dtype), lse

        return plain
    from stepgauge.kernels.attention import hopper
    from stepgauge.kernels.attention import triton as portable

    if name == "triton":
        return lambda q, k, v, is_causal: portable.forward(q, k, v, is_causal, q.shape[-1] ** -0.5)
    shape = hopper.Shape(*VARIANTS[name][width])
    return lambda q, k, v, is_causal: hopper.forward(q, k, v, is_causal, q.shape[-1] ** -0.5, shape=shape)


def grouped(q, k, v):
    return (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))


def inputs(case, width, dtype, device):
    import torch

    batch, heads, kv_heads, queries, keys, layout = case
    g = torch.Generator(device).manual_seed(queries + 7 * keys + width)
    shapes = [(heads, queries), (kv_heads, keys), (kv_heads, keys)]
    if layout == "fused":  # q, k and v as one projection leaves them
        x = torch.randn(batch, queries, 3, heads, width, generator=g, device=device).to(dtype)
        return [part.transpose(1, 2) for part in x.unbind(2)]
    if layout == "BTHD":
        made = [torch.randn(batch, t, h, width, generator=g, device=device) for h, t in shapes]
        return [x.to(dtype).transpose(1, 2) for x in made]
    return [torch.randn(batch, h, t, width, generator=g, device=device).to(dtype) for h, t in shapes]


def poison(*tensors):
    """Freed memory of these sizes holds NaN, which is what a fresh tensor of the same size is likely to get."""
    import torch

    for x in tensors:
        torch.full(x.shape, float("nan"), dtype=x.dtype, device=x.device)


# ---- checking ------------------------------------------------------------------------------------------------------


def check(out, name, device, dry_run):
    """Each width, type and mask: against float64, with poisoned memory, and the same bits again and again."""
    import torch

    for width in VARIANTS[name]:
        run = implementation(name, width, dry_run)
        for dtype, is_causal in itertools.product((torch.bfloat16, torch.float16), (True, False)):
            what = {"variant": name, "width": width, "dtype": str(dtype).removeprefix("torch."), "causal": is_causal}
            try:
                start = time.monotonic()
                worst = [0.0, 0.0, 0.0]
                for case in DRY_CASES if dry_run else CASES:
                    errors = check_case(run, inputs(case, width, dtype, device), is_causal)
                    limits = (5e-3, 2e-2, 1e-5) if dtype == torch.bfloat16 else (1e-3, 5e-3, 1e-5)
                    if not all(e <= limit for e, limit in zip(errors, limits, strict=True)):
                        raise ValueError(f"{case}: errors of o, of its worst row, of lse {errors}, allowed {limits}")
                    worst = [max(pair) for pair in zip(worst, errors, strict=True)]
                seconds = round(time.monotonic() - start, 2)
                record(out, kind="check", **what, errors=worst, cases=len(CASES), seconds=seconds)
                say(passed=[name, width, what["dtype"], is_causal], errors=worst)
            except Exception as problem:
                report_failure(out, what)
                record(out, kind="check", **what, failed=f"{type(problem).__name__}: {problem!s:.300}")
                say(failed=[name, width, what["dtype"], is_causal])


def check_case(run, tensors, is_causal, times=5):
    """Relative errors of o, of its worst row and of lse; ValueError if runs differ in a bit."""
    import torch

    from stepgauge.kernels.attention import reference

    q, k, v = tensors
    wide = (x.double() for x in (q, *grouped(q, k, v)))
    want, want_lse = reference.attention(*wide, is_causal=is_causal)
    poison(q, want_lse.float())
    o, lse = run(q, k, v, is_causal)
    for _ in range(times):
        again, again_lse = run(q, k, v, is_causal)
        if not (torch.equal(o, again) and torch.equal(lse, again_lse)):
            raise ValueError(f"{tuple(q.shape)}, {tuple(k.shape)}: two runs differ, {int((o != again).sum())} numbers")
    error, norm = o.double() - want, want.norm(dim=-1)
    rows = error.norm(dim=-1) / norm
    lse_error = (lse.double() - want_lse).norm() / want_lse.norm().clamp_min(1.0)
    return [x.item() for x in (error.norm() / norm.norm(), rows.max(), lse_error)]


def check_all(out, names, args):
    """The (variant, width) pairs of which no check failed and bfloat16's were done; a process for each variant."""
    started = {name: start(args, "--check", name, stdout=(out / f"check-{name}.txt").open("w")) for name in names}
    until = time.monotonic() + args.check_seconds
    for name, process in started.items():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stop(process)
            record(out, kind="check", variant=name, failed=f"not done within {args.check_seconds} s")
    rows = [json.loads(line) for line in (out / "gluon.jsonl").read_text().splitlines()]
    good = {}
    for row in rows:
        if row["kind"] == "check" and "width" in row:
            good.setdefault((row["variant"], row["width"]), []).append("failed" not in row)
    return [pair for pair, passed in good.items() if len(passed) >= 2 and all(passed)]  # bfloat16 first


# ---- timing --------------------------------------------------------------------------------------------------------


def time_all(out, pairs, skip, budget, device, dry_run):
    """Milliseconds of each implementation at each shape, round after round while time lasts."""
    import torch

    until = time.monotonic() + budget
    shapes = DRY_SHAPES if dry_run else SHAPES
    made = {}
    for number in range(skip, 3 * len(shapes)):
        if time.monotonic() > until:
            return
        width, is_causal, length = shapes[number % len(shapes)]
        batch, heads = max(1, TOKENS // length), MODEL_WIDTH // width
        case = (1, 1, 1, length, length, "BHTD") if dry_run else (batch, heads, heads, length, length, "BHTD")
        q, k, v = inputs(case, width, torch.bfloat16, device)
        flops = 4 * q.numel() * length / (2 if is_causal else 1)
        wanted = None
        for name in [*PEERS, *(n for n, w in pairs if w == width)]:
            what = {"name": name, "width": width, "causal": is_causal, "length": length, "round": number // len(shapes)}
            say(start=name, number=number)
            try:
                run = made.setdefault((name, width), implementation(name, width, dry_run))
                with torch.no_grad():
                    o = run(q, k, v, is_causal)[0]
                    wanted = o if wanted is None else wanted
                    error = ((o.float() - wanted.float()).norm() / wanted.float().norm()).item()
                    if not error < 1e-2:
                        raise ValueError(f"differs from the portable forward by {error:.2e}")
                    ms = milliseconds(functools.partial(run, q, k, v, is_causal), dry_run)
                record(out, kind="time", **what, ms=ms, tflops=flops / ms / 1e9, error=error)
            except Exception as problem:
                report_failure(out, what)
                record(out, kind="time", **what, failed=f"{type(problem).__name__}: {problem!s:.300}")


def milliseconds(function, dry_run):
    if dry_run:
        start = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - start)
    from triton.testing import do_bench

    return do_bench(function, warmup=10, rep=40, return_mode="median")


def watch(out, pairs, until, args):
    """Runs the timing in a process; one that falls silent is ended and begun again without what it was at."""
    number = 0
    while time.monotonic() < until:
        budget = until - time.monotonic()
        process = start(args, "--time", json.dumps([pairs, number, budget]), stdout=subprocess.PIPE)
        lines = queue.Queue()
        threading.Thread(target=lambda p=process, q=lines: [q.put(x) for x in (*p.stdout, None)], daemon=True).start()
        current = None
        while True:
            try:
                line = lines.get(timeout=SILENT_SECONDS if current else 2 * SILENT_SECONDS)
            except queue.Empty:
                break
            if line is None:
                if process.wait() != 0 and current:  # it crashed: an illegal address leaves the whole process useless
                    break
                return
            message = json.loads(line)
            current, number = message["start"], message["number"]
            if time.monotonic() > until + SILENT_SECONDS:
                break
        stop(process)
        record(out, kind="time", name=current, number=number, failed="hung or crashed; left out from here on")
        if current in PEERS or current is None:
            number += 1
        pairs = [pair for pair in pairs if pair[0] != current]


# ---- processes -----------------------------------------------------------------------------------------------------


def start(args, *more, stdout):
    command = [sys.executable, __file__, str(args.out), *more, *(["--dry-run"] if args.dry_run else [])]
    errors = (args.out / "gluon-errors.txt").open("a")
    return subprocess.Popen(command, stdout=stdout, stderr=errors, text=True, start_new_session=True)


def stop(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def summary(out):
    rows = [json.loads(line) for line in (out / "gluon.jsonl").read_text().splitlines()]
    times = {}
    for row in rows:
        if row["kind"] == "check" and "failed" in row:
            print("FAILED", row)
        if row["kind"] == "time" and "ms" in row:
            times.setdefault((row["width"], row["causal"], row["length"]), {}).setdefault(row["name"], []).append(row)
    for (width, causal, length), found in times.items():
        best = {name: max(row["tflops"] for row in each) for name, each in found.items()}
        cudnn = best.get("cudnn", float("nan"))
        listed = sorted(best.items(), key=lambda each: -each[1])
        print(f"D {width} {'causal' if causal else 'full'} T {length}: TFLOP/s (of cuDNN's)")
        print("   " + ", ".join(f"{name} {rate:.0f} ({rate / cudnn:.2f})" for name, rate in listed))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=150.0, help="seconds in all (150)")
    parser.add_argument("--check-seconds", type=float, default=CHECK_SECONDS, help="of a shape's checks (60)")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), help="only these")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with the reference")
    parser.add_argument("--check", help=argparse.SUPPRESS)
    parser.add_argument("--time", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    device = "cpu" if args.dry_run else "cuda"
    if args.check:
        check(args.out, args.check, device, args.dry_run)
    elif args.time:
        time_all(args.out, *args.time, device, args.dry_run)
    else:
        check_and_time(args, device)


def check_and_time(args, device):
    import torch

    from stepgauge.measure.environment import environment

    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + args.budget - 5
    (args.out / "gluon.jsonl").touch()
    pairs = check_all(args.out, args.variants, args)
    print("passed:", pairs, flush=True)
    record(args.out, kind="environment", **environment(torch.device(device)))
    watch(args.out, pairs, until, args)
    summary(args.out)


if __name__ == "__main__":
    main()
