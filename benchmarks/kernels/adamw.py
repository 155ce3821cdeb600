"""AdamW beside its peers on one GPU: accuracy against float64 first, then the time of a step.

    PYTHONPATH=src python benchmarks/kernels/adamw.py OUT_DIR [--quick] [--tune] [--budget SECONDS]

Writes OUT_DIR/adamw.jsonl, one line a row, and prints the table last. The parameters are those of a 24-layer gated
Transformer of width 1280 without embeddings: 629 M in 216 tensors. Bytes are what each optimizer's own state needs:
28 a parameter in float32, 22 with bfloat16 parameters and float32 moments, 14 with bfloat16 throughout. --tune sweeps
the kernel's launch shapes instead.
"""

import argparse
import functools
import itertools
import json
import time
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

from stepgauge.kernels.adamw import FusedAdamW, tables

FP32, BF16 = torch.float32, torch.bfloat16
LAYER = [(1280, 1280)] * 4 + [(5120, 1280)] * 2 + [(1280, 5120)] + [(1280,)] * 2
SHAPES = LAYER * 24
SMALL = [(768, 768)] * 40 + [(768,)] * 60
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def make(shapes, dtype, *, with_grad=True):
    generator = torch.Generator("cuda").manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, device="cuda", generator=generator).to(dtype)) for s in shapes]
    if with_grad:
        for p in params:
            p.grad = torch.randn(p.shape, device="cuda", generator=generator).to(dtype)
    return params


def optimizers(dtype):
    """name -> (constructor, bytes a parameter)"""
    own = 28 if dtype == FP32 else 22
    theirs = 28 if dtype == FP32 else 14
    return {
        "ours": (lambda p: FusedAdamW(p, **HYPER), own),
        "torch fused": (lambda p: torch.optim.AdamW(p, **HYPER, fused=True), theirs),
        "torch foreach": (lambda p: torch.optim.AdamW(p, **HYPER, foreach=True), theirs),
    }


def check(name, dtype):
    """Largest relative error of a tensor after 20 steps, against float64."""
    shapes = [(1000, 513), (7,), (40000,), (1280, 16)]
    params = make(shapes, dtype)
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    optimizer, judge = optimizers(dtype)[name][0](params), torch.optim.AdamW(exact, **HYPER)
    for _ in range(20):
        for p, q in zip(params, exact, strict=True):
            p.grad = torch.randn(p.shape, device="cuda").to(dtype)
            q.grad = p.grad.double()
        optimizer.step()
        judge.step()
    return max(((p.double() - q).norm() / q.norm()).item() for p, q in zip(params, exact, strict=True))


def timed(fn, rep):
    return do_bench(fn, warmup=25, rep=rep, quantiles=[0.2, 0.5, 0.8])


def host_us(params, optimizer, *, fresh_gradients):
    """Host time of a step, the GPU idle before each."""
    taken = []
    for _ in range(30):
        if fresh_gradients:
            for p in params:
                p.grad = torch.empty_like(p).fill_(0.1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return sorted(taken)[len(taken) // 2] * 1e6


class Log:
    def __init__(self, out_dir, budget_s):
        out_dir.mkdir(parents=True, exist_ok=True)
        self.file = (out_dir / "adamw.jsonl").open("a")
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
    p20, ms, p80 = timed(lambda: target.copy_(source), 150)
    rate = 2 * source.nbytes / ms / 1e6
    log.write(op="copy", name="copy", ms=ms, ms_p20=p20, ms_p80=p80, gb_per_s=rate)
    return rate


def compare(log, dtype, shapes, label, rep):
    for name, (construct, bytes_a_param) in optimizers(dtype).items():
        if log.left() < 5:
            print("out of time before", label, name)
            return
        row = {"op": "adamw", "set": label, "dtype": str(dtype)[6:], "name": name, "tensors": len(shapes)}
        try:
            error = check(name, dtype)
            # bfloat16 parameters keep 8 bits; what is checked there is that nothing is off by more.
            if not error < (1e-5 if dtype == FP32 else 2e-2):
                log.write(**row, error=error, wrong=True)
                continue
            params = make(shapes, dtype)
            optimizer = construct(params)
            optimizer.step()
            p20, ms, p80 = timed(optimizer.step, rep)
            count = sum(p.numel() for p in params)
            log.write(
                **row, parameters=count, ms=ms, ms_p20=p20, ms_p80=p80, error=error,
                gb_per_s=bytes_a_param * count / ms / 1e6,
                host_us=host_us(params, optimizer, fresh_gradients=False),
                host_fresh_us=host_us(params, optimizer, fresh_gradients=True) if label == "small" else None,
            )  # fmt: skip
            del params, optimizer
        except Exception as problem:
            log.write(**row, failed=f"{type(problem).__name__}: {str(problem)[:200]}")
        torch.cuda.empty_cache()


def tune(log, rep):
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    results = {}
    for dtype in (FP32, BF16):
        # Three fifths of the time for float32, which had none in the first sweep.
        reserve = 0.4 * log.left() if dtype == FP32 else 2
        params = make(SHAPES, dtype)
        moments = [[torch.zeros_like(p, dtype=FP32) for p in params] for _ in range(2)]
        steps = [torch.zeros((), device="cuda") for _ in params]
        addresses = tables.addresses_of(params, [p.grad for p in params], *moments, steps)
        count = sum(p.numel() for p in params)
        found = results[dtype] = []
        # The first sweep's winner lay at its smallest chunk, and evict_first lost 1 to 1.5 % everywhere.
        sweep = itertools.product(
            ("", "evict_first"), (4096, 8192, 16384, 2048, 32768), ((2048, 8), (2048, 4), (4096, 8), (1024, 4))
        )
        for eviction, chunk, (block, warps) in sweep:
            if block > chunk:
                continue
            if log.left() < reserve:
                break
            config = {"chunk": chunk, "block": block, "num_warps": warps, "eviction": eviction}
            try:
                table = tables.Tables([p.numel() for p in params], torch.device("cuda"), chunk=chunk)

                launch = functools.partial(
                    tables.launch,
                    table,
                    addresses,
                    dtype,
                    dtype,
                    **hyper,
                    block=block,
                    num_warps=warps,
                    eviction=eviction,
                )
                ms = timed(launch, rep)[1]
                rate = (28 if dtype == FP32 else 22) * count / ms / 1e6
                found.append((ms, rate, config))
                log.write(op="tune", dtype=str(dtype)[6:], ms=ms, gb_per_s=rate, **config)
            except Exception as problem:
                print("failed:", config, type(problem).__name__, str(problem)[:100])
                log.write(op="tune", failed=f"{type(problem).__name__}: {str(problem)[:200]}", **config)
        del params, moments, steps
        torch.cuda.empty_cache()
    for dtype, found in results.items():
        print(f"\n{dtype}: {len(found)} tried, best first")
        for ms, rate, config in sorted(found, key=lambda r: r[0])[:12]:
            print(f"  {ms:.3f} ms {rate:5.0f} GB/s {config}")


def print_table(log, ceiling):
    print(
        f"\n{log.common['device']}, torch {log.common['torch']}, triton {log.common['triton']}; copy {ceiling:.0f} GB/s"
    )
    print("set, type, name: ms p20/p50/p80, GB/s (of the copy), error, host us (same, fresh gradients), over best peer")
    for row in log.rows:
        if row["op"] != "adamw":
            continue
        label = f"{row['set']:6s} {row['dtype']:9s} {row['name']:14s}"
        if "ms" not in row:
            print(label, f"WRONG, error {row['error']:.1e}" if row.get("wrong") else f"failed: {row['failed']}")
            continue
        others = [
            r["ms"] for r in log.rows
            if r.get("set") == row["set"] and r.get("dtype") == row["dtype"] and r["name"] != row["name"] and "ms" in r
        ]  # fmt: skip
        fresh = f"{row['host_fresh_us']:.0f}" if row["host_fresh_us"] else "-"
        print(
            f"{label} {row['ms_p20']:.3f}/{row['ms']:.3f}/{row['ms_p80']:.3f} {row['gb_per_s']:5.0f} "
            f"({row['gb_per_s'] / ceiling:.3f}) {row['error']:.1e} {row['host_us']:.0f}, {fresh}, "
            + (f"{min(others) / row['ms']:.3f}" if others else "-")
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--quick", action="store_true", help="shorter samples, float32 only")
    parser.add_argument("--tune", action="store_true", help="sweep launch shapes instead of comparing")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds in all")
    args = parser.parse_args()
    log = Log(args.out_dir, args.budget)
    if args.tune:
        print(f"copy {copy_ceiling(log):.0f} GB/s")
        tune(log, 60)
        return
    ceiling = copy_ceiling(log)
    rep = 100 if args.quick else 300
    for dtype in (FP32,) if args.quick else (FP32, BF16):
        compare(log, dtype, SHAPES, "629M", rep)
    compare(log, FP32, SMALL, "small", 50)
    print_table(log, ceiling)


if __name__ == "__main__":
    main()
