"""Attention beside its peers on one GPU: correctness, then times.

    PYTHONPATH=src python benchmarks/kernels/attention.py OUT_DIR            # checks, then the grids (about 200 s)
    PYTHONPATH=src python benchmarks/kernels/attention.py OUT_DIR --quick    # checks and the main grid (about 60 s)
    PYTHONPATH=src python benchmarks/kernels/attention.py OUT_DIR --tune     # what is still open (about 90 s)

One JSON line a row in OUT_DIR/attention.jsonl (attention_tune.jsonl). FLOPs: forward 4 B H T_q T_k D, halved if causal;
backward 2.5 times that, whatever an implementation recomputes. A result that is wrong prints no time.

Compiling is spread over processes that fill Triton's disk cache before anything is timed; each runs what it compiles on
a small shape, so that a kernel that hangs or fails is dropped there and not in the process that measures.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from stepgauge.kernels.attention import attention, flash_attention, plan
from stepgauge.kernels.attention import triton as kernels
from stepgauge.kernels.attention.plan import Tiles

START = time.time()
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}


# ---- rows ----------------------------------------------------------------------------------------------------------


class Log:
    """Rows as they come: a JSON line each, flushed, so that a killed run keeps what it measured."""

    def __init__(self, path):
        self.file = open(path, "w")  # noqa: SIM115 - open for the whole run
        self.common = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }

    def row(self, **fields):
        self.file.write(json.dumps(self.common | fields) + "\n")
        self.file.flush()
        return fields


def seconds():
    return time.time() - START


def say(*parts):
    print(*parts, flush=True)


def relative(value, reference, scale=0.0):
    """The norm of the error over that of the reference, or over `scale` if that is larger."""
    reference = reference.double()
    error = (value.double() - reference).norm()
    return 0.0 if error == 0 else (error / max(reference.norm(), scale)).item()


def make(batch, heads, kv_heads, t_q, t_k, d, dtype, *, grad=True, seed=0):
    g = torch.Generator(device="cuda").manual_seed(seed)
    shapes = (batch, heads, t_q, d), (batch, kv_heads, t_k, d), (batch, kv_heads, t_k, d), (batch, heads, t_q, d)
    q, k, v, do = (torch.randn(s, generator=g, device="cuda", dtype=torch.float32).to(dtype) for s in shapes)
    return [x.requires_grad_(grad) for x in (q, k, v)] + [do]


# ---- correctness against float64 -----------------------------------------------------------------------------------

#        B, H, K, T_q, T_k, D, causal, splits
CHECKS = [
    (2, 4, 4, 512, 512, 64, True, None),
    (2, 4, 4, 512, 512, 128, True, None),
    (1, 4, 4, 1111, 1333, 128, False, None),
    (1, 4, 4, 1333, 1111, 128, True, None),
    (1, 8, 2, 777, 777, 64, True, None),
    (1, 1, 1, 4096, 4096, 64, True, None),
    (1, 1, 1, 4096, 4096, 128, True, 5),
    (1, 1, 1, 4000, 2100, 64, True, 7),
    (1, 1, 1, 2100, 4000, 32, True, 7),
    (1, 1, 1, 2100, 4000, 128, False, 3),
    (1, 2, 1, 300, 300, 16, True, None),
    (1, 2, 2, 200, 260, 80, True, None),
    (1, 2, 2, 200, 260, 96, False, None),
    (1, 2, 1, 200, 260, 256, True, None),
    (1, 2, 2, 1, 333, 64, False, None),
    (1, 2, 2, 65, 1, 64, True, None),
    (1, 16, 16, 2048, 2048, 128, True, None),
    (1, 1, 1, 16384, 16384, 64, True, None),
]


def float64_reference(q, k, v, do, causal):
    """(o, lse, dq, dk, dv) in float64 and the scales of their errors, one query head at a time to bound the memory.

    The scales are 0, but for dq and dk. dS = P (dP - delta) is a difference of two sums over D, each rounded: for a row
    that sees one key they are equal, dq and dk are zero, and what is left of them is the rounding of dP. There is no
    relative error of a zero, so errors are held against the norm of what cancels where that is larger than the
    result's: |s (P dP) K| and |s (P dP)^T Q|.
    """
    group = q.shape[1] // k.shape[1]
    outs = [torch.zeros(x.shape, dtype=torch.float64, device="cuda") for x in (q, q[..., 0], q, k, v)]
    terms_q, terms_k = torch.zeros_like(outs[2]), torch.zeros_like(outs[3])
    for b, h in itertools.product(range(q.shape[0]), range(q.shape[1])):
        leaves = [x[b, i].detach().double().requires_grad_() for x, i in ((q, h), (k, h // group), (v, h // group))]
        o, lse = attention(*leaves, is_causal=causal)
        grads = torch.autograd.grad(o, leaves, do[b, h].double())
        outs[0][b, h], outs[1][b, h], outs[2][b, h] = o.detach(), lse.detach(), grads[0]
        outs[3][b, h // group] += grads[1]
        outs[4][b, h // group] += grads[2]
        q64, k64, v64 = (x.detach() for x in leaves)
        p = torch.exp(q64 @ k64.T * q.shape[-1] ** -0.5 - outs[1][b, h, :, None])
        terms = (p.tril() if causal else p) * (do[b, h].double() @ v64.T) * q.shape[-1] ** -0.5
        terms_q[b, h] = terms @ k64
        terms_k[b, h // group] += terms.T @ q64
    return outs, (0.0, 0.0, terms_q.norm(), terms_k.norm(), 0.0)


def poison():
    """Leaves NaN in the memory that the allocator hands out next."""
    junk = [torch.full((n,), math.nan, device="cuda") for n in (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)]
    del junk


def check_one(case, dtype, deterministic, layout="contiguous"):
    batch, heads, kv_heads, t_q, t_k, d, causal, splits = case
    q, k, v, do = make(batch, heads, kv_heads, t_q, t_k, d, dtype, grad=False)
    if layout == "projection":  # as a model makes them: (B, T, H, D) in memory
        q, k, v, do = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do))
    reference, scales = float64_reference(q, k, v, do, causal)
    poison()
    o, lse = kernels.forward(q, k, v, causal, d**-0.5, num_splits=splits)
    poison()
    grads = kernels.backward(do, q, k, v, o, lse, causal, d**-0.5, deterministic, num_splits=splits)
    return [relative(*both) for both in zip((o, lse, *grads), reference, scales, strict=True)]


def check_part(part, parts):
    """This part's checks, one JSON line each: they compile as much as the grids, so they are spread as well."""
    for index, case in enumerate(CHECKS):
        if index % parts != part:
            continue
        for dtype in (torch.bfloat16, torch.float32, torch.float16)[: 3 if index % 5 == 0 else 2]:
            for deterministic in (True, False):
                row = {"case": case, "dtype": NAMES[dtype], "deterministic": deterministic}
                try:
                    errors = check_one(case, dtype, deterministic, "projection" if index % 2 else "contiguous")
                    row |= {"errors": errors, "ok": all(e < LIMITS[dtype] for e in errors)}
                except Exception as error:  # a row that fails must not end the run
                    row |= {"error": repr(error)[:300], "ok": False}
                say("CHECK", json.dumps(row))


def check(log, texts):
    """Gathers what the parts printed; returns how many checks failed or never came back."""
    rows = [json.loads(line[6:]) for text in texts for line in text.splitlines() if line.startswith("CHECK ")]
    worst = {}
    for row in rows:
        log.row(kind="check", **row)
        if not row["ok"]:
            say("CHECK FAILED", row)
        elif "errors" in row:
            before = worst.get(row["dtype"], [0] * 5)
            worst[row["dtype"]] = [max(x, y) for x, y in zip(before, row["errors"], strict=True)]
    missing = sum(4 + 2 * (index % 5 == 0) for index in range(len(CHECKS))) - len(rows)
    q, k, v, do = make(2, 8, 8, 1500, 1500, 64, torch.bfloat16, grad=False)
    o, lse = kernels.forward(q, k, v, True, 0.125)
    runs = [kernels.backward(do, q, k, v, o, lse, True, 0.125) for _ in range(3)]
    same = all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))
    failures = sum(not row["ok"] for row in rows) + missing + (not same)
    say(f"checks: {len(rows)} run, {missing} missing, {failures} failed; deterministic backward same bits: {same}")
    for name, errors in worst.items():
        say(f"   {name} worst relative error o lse dq dk dv:", " ".join(f"{e:.1e}" for e in errors))
    return failures


def check_beyond_int32(log):
    """One tensor of more than 2^31 elements: the last head must be right."""
    t, d, heads = 2048, 128, 8200
    assert heads * t * d > 2**31
    q, k, v = (torch.randn(1, heads, t, d, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    do = torch.randn_like(q)
    o, lse = kernels.forward(q, k, v, True, d**-0.5)
    grads = kernels.backward(do, q, k, v, o, lse, True, d**-0.5)
    last = [x[:, -1:].contiguous() for x in (q, k, v, do)]
    reference, _ = float64_reference(*last, True)
    errors = [relative(a[:, -1:], b) for a, b in zip((o, lse, *grads), reference, strict=True)]
    log.row(kind="check", case=[1, heads, heads, t, t, d, True], dtype="bf16", errors=errors)
    say("beyond 2^31 elements:", " ".join(f"{e:.1e}" for e in errors), "ok" if max(errors) < 2e-2 else "WRONG")


# ---- who is compared -----------------------------------------------------------------------------------------------


def sdpa(q, k, v, causal):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def plain(q, k, v, causal):
    """What people write: scores, mask, softmax, product."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v


def ours(q, k, v, causal):
    return flash_attention(q, k, v, is_causal=causal)


def ours_atomic(q, k, v, causal):
    return flash_attention(q, k, v, is_causal=causal, deterministic=False)


OURS = "ours"
PEERS = {OURS: ours, "ours-atomic": ours_atomic, "plain": plain}
BACKENDS = {
    "FA2": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS |= dict.fromkeys(BACKENDS, sdpa)
with contextlib.suppress(Exception):
    from flash_attn.cute.interface import flash_attn_func

    def fa4(q, k, v, causal):
        return flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)[0].transpose(1, 2)

    PEERS["FA4"] = fa4


def chosen(name):
    """The context a peer is measured in: its backend is fixed outside of the timed region, where it costs nothing."""
    return sdpa_kernel(BACKENDS[name]) if name in BACKENDS else contextlib.nullcontext()


def measure(function, q, k, v, do, causal, rep):
    """{direction: (p20, p50, p80) ms}: forward alone, backward alone on a kept graph, and both."""
    leaves = [q, k, v]

    def forward():
        with torch.no_grad():
            return function(q, k, v, causal)

    out = function(q, k, v, causal)

    def backward():
        return torch.autograd.grad(out, leaves, do, retain_graph=True)

    def both():
        return torch.autograd.grad(function(q, k, v, causal), leaves, do)

    quantiles = [0.2, 0.5, 0.8]
    times = {}
    for name, run in (("forward", forward), ("backward", backward), ("both", both)):
        times[name] = do_bench(run, warmup=max(5, rep // 4), rep=rep, quantiles=quantiles)
    return times


def extra_memory(function, q, k, v, do, causal):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(function(q, k, v, causal), [q, k, v], do)
    return torch.cuda.max_memory_allocated() - before


def flops(batch, heads, t_q, t_k, d, causal, direction):
    forward = 4 * batch * heads * t_q * t_k * d * (0.5 if causal else 1)
    return forward * {"forward": 1, "backward": 2.5, "both": 3.5}[direction]


def is_right(out, reference, dtype):
    return relative(out, reference) < (3e-2 if dtype != torch.float32 else 1e-4)


def compare(log, grid, batch, heads, t, d, causal, dtype, names, ceiling, *, rep):
    """One shape, all peers; returns {(name, direction): ms}."""
    q, k, v, do = make(batch, heads, heads, t, t, d, dtype)
    results, errors, memory = {}, {}, {}
    reference = None
    for name in names:
        try:
            with chosen(name):
                out = PEERS[name](q, k, v, causal).detach()
                if reference is None:  # the first peer; ours comes after it and is checked against it
                    reference = out
                elif not is_right(out, reference, dtype):
                    errors[name] = f"WRONG {relative(out, reference):.1e}"
                    continue
                del out
                memory[name] = extra_memory(PEERS[name], q, k, v, do, causal)
                for direction, times in measure(PEERS[name], q, k, v, do, causal, rep).items():
                    results[name, direction] = times
        except torch.OutOfMemoryError:
            errors[name] = "OOM"
        except Exception as error:
            errors[name] = repr(error)[:160]
        if errors.get(name) == "OOM":
            torch.cuda.empty_cache()
    shape = {"grid": grid, "batch": batch, "heads": heads, "T": t, "D": d, "causal": causal, "dtype": NAMES[dtype]}
    for direction in ("forward", "backward", "both"):
        best = min((r[1] for (n, dn), r in results.items() if dn == direction and not n.startswith(OURS)), default=None)
        for name in names:
            if (name, direction) in results:
                p20, p50, p80 = results[name, direction]
                rate = flops(batch, heads, t, t, d, causal, direction) / p50 / 1e9
                log.row(
                    kind="time", **shape, direction=direction, name=name, ms_p20=p20, ms_p50=p50, ms_p80=p80,
                    tflops=rate, of_matmul=rate / ceiling[dtype], extra_bytes=memory[name],
                    speedup_over_best_peer=best / p50 if best else None,
                )  # fmt: skip
    for name, error in errors.items():
        log.row(kind="time", **shape, name=name, error=error)
    return {key: times[1] for key, times in results.items()}, errors


def matmul_ceiling():
    """TFLOP/s of torch's own product, 8192 cubed (fp32: 4096), in this run."""
    ceiling = {}
    for dtype, n in ((torch.bfloat16, 8192), (torch.float32, 4096)):
        a, b = torch.randn(n, n, device="cuda", dtype=dtype), torch.randn(n, n, device="cuda", dtype=dtype)
        ceiling[dtype] = 2 * n**3 / do_bench(lambda a=a, b=b: a @ b, warmup=20, rep=100, return_mode="median") / 1e9
    ceiling[torch.float16] = ceiling[torch.bfloat16]
    return ceiling


def host_microseconds(function, *args):
    """Host time of one call, launches included, chip not waited for."""
    for _ in range(20):
        function(*args)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        function(*args)
    took = time.perf_counter() - start
    torch.cuda.synchronize()
    return took * 1e4


def host_times(log):
    q, k, v, do = make(1, 1, 1, 128, 128, 64, torch.bfloat16)
    line = []
    for name in (OURS, "FA2", "cuDNN", "plain"):
        try:
            run = PEERS[name]
            with chosen(name):
                forward = host_microseconds(lambda run=run: run(q, k, v, True))
                both = host_microseconds(lambda run=run: torch.autograd.grad(run(q, k, v, True), [q, k, v], do))
        except Exception as error:
            say("host time", name, repr(error)[:160])
            continue
        log.row(kind="host", name=name, forward_us=forward, both_us=both)
        line.append(f"{name} {forward:.0f}/{both:.0f}")
    say("host us a call, forward/both, T 128:", ", ".join(line))


# ---- the grids -----------------------------------------------------------------------------------------------------

MAIN = [(d, causal, t) for t in (16384, 2048, 8192, 512) for d in (128, 64) for causal in (True, False)]
MAIN = [m for m in MAIN if m[1] or m[2] == 16384]
ONE_HEAD_LENGTHS = [4096, 16384, 32768, 8192, 1024, 65536, 2048, 512, 256, 128]


def main_grid(log, table, ceiling, deadline):
    for d, causal, t in MAIN:
        if seconds() > deadline:
            table.append("main grid cut short by the time budget")
            return
        heads, batch = 2048 // d, 16384 // t
        names = ["FA2", "cuDNN", *(["FA4"] if "FA4" in PEERS else []), OURS, "ours-atomic"]
        results, errors = compare(log, "main", batch, heads, t, d, causal, torch.bfloat16, names, ceiling, rep=60)
        cells = []
        for name in names:
            rates = [
                f"{flops(batch, heads, t, t, d, causal, x) / results[name, x] / 1e9:.0f}"
                if (name, x) in results
                else "-"
                for x in ("forward", "backward", "both")
            ]
            cells.append(f"{name} {'/'.join(rates)}" + (f" {errors[name]}" if name in errors else ""))
        table.append(f"main D{d:<3} {'causal' if causal else 'full  '} T{t:<5} TFLOP/s  " + "  ".join(cells))


def long_one(log, table, ceiling):
    """One sequence, 16 heads, T 16384, D 64, causal, forward and backward: the anchor is in ms."""
    names = ["FA2", "cuDNN", OURS, "ours-atomic"]
    results, errors = compare(log, "anchor", 1, 16, 16384, 64, True, torch.bfloat16, names, ceiling, rep=150)
    cells = [f"{n} {results[n, 'both']:.2f}" for n in names if (n, "both") in results]
    table.append("1 x 16 heads, T 16384, D 64, causal, both, ms: " + "  ".join(cells) + f" {errors or ''}")


def one_head(log, table, ceiling, deadline):
    for t, dtype, d in itertools.product(ONE_HEAD_LENGTHS, (torch.bfloat16, torch.float32), (64, 128, 16, 32)):
        if seconds() > deadline:
            table.append("one-head grid cut short by the time budget")
            return
        names = ["efficient", "plain", OURS] if dtype == torch.float32 else ["FA2", "cuDNN", "plain", OURS]
        if t > (16384 if dtype == torch.float32 else 32768):
            names.remove("plain")  # its scores: 4 GiB and more, several times over
        rep = 15 if t <= 16384 else 30
        results, errors = compare(log, "E7c", 1, 1, t, d, True, dtype, names, ceiling, rep=rep)
        cells = []
        for name in names:
            times = [
                f"{results[name, x]:.3f}" if (name, x) in results else "-" for x in ("forward", "backward", "both")
            ]
            cells.append(f"{name} {'/'.join(times)}" + (f" {errors[name][:40]}" if name in errors else ""))
        lost = [
            f"{x} {n}"
            for n in names
            for x in ("forward", "backward", "both")
            if n != OURS and (n, x) in results and (OURS, x) in results and results[n, x] < results[OURS, x]
        ]
        table.append(
            f"E7c {NAMES[dtype]} T{t:<5} D{d:<3} ms  "
            + "  ".join(cells)
            + ("  LOST: " + ", ".join(lost) if lost else "")
        )


def plain_batch(log, table, ceiling, deadline):
    """E7(a): batch 8, no heads, not causal."""
    for t, d in itertools.product((4096, 16384, 1024, 256, 8192), (64, 128, 16, 32)):
        if seconds() > deadline:
            table.append("E7a cut short by the time budget")
            return
        results, _ = compare(log, "E7a", 8, 1, t, d, False, torch.bfloat16, ["FA2", "plain", OURS], ceiling, rep=20)
        cells = [f"{n} {results[n, 'forward']:.3f}/{results[n, 'backward']:.3f}" for n in ("FA2", "plain", OURS)
                 if (n, "backward") in results]  # fmt: skip
        table.append(f"E7a bf16 T{t:<5} D{d:<3} ms f/b  " + "  ".join(cells))


# ---- compiling beforehand ------------------------------------------------------------------------------------------


def warm_cases():
    """What the grids will launch, grouped so that no two processes compile the same kernel."""
    groups = []
    for dtype, d in itertools.product((torch.bfloat16, torch.float32), (64, 128, 16, 32)):
        groups.append([(1, 1, t, d, True, dtype, True) for t in ONE_HEAD_LENGTHS])
    for d, causal in itertools.product((64, 128), (True, False)):
        ts = [t for dd, c, t in MAIN if dd == d and c == causal]
        groups.append([(16384 // t, 2048 // d, t, d, causal, torch.bfloat16, det) for t in ts for det in (True, False)])
    groups.append([(8, 1, t, d, False, torch.bfloat16, True) for t in (256, 4096) for d in (16, 32)])
    return groups


def warm(index):
    for batch, heads, t, d, causal, dtype, deterministic in warm_cases()[index]:
        q, k, v, do = make(batch, heads, heads, t, t, d, dtype, grad=False)
        try:
            o, lse = kernels.forward(q, k, v, causal, d**-0.5)
            kernels.backward(do, q, k, v, o, lse, causal, d**-0.5, deterministic)
        except Exception as error:
            say("WARM FAILED", batch, heads, t, d, causal, dtype, deterministic, repr(error)[:300])
        del q, k, v, do
    torch.cuda.synchronize()


def spread(count, arguments, limit_s):
    """Runs this script `count` times at once, with --part 0, 1, ...; returns what each printed."""
    processes = []
    for i in range(count):
        out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the process has ended
        command = [sys.executable, __file__, *arguments, "--part", str(i)]
        processes.append((subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=os.environ), out))
    end = time.time() + limit_s
    texts = []
    for process, out in processes:
        try:
            process.wait(max(0.1, end - time.time()))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        out.seek(0)
        texts.append(out.read())
        if process.returncode != 0:
            say("part ended with", process.returncode, texts[-1][-300:])
    return texts


# ---- tuning --------------------------------------------------------------------------------------------------------

# The first sweep (282 jobs, 2026-11-21) is in benchmarks/results; these are what is still open: (kernel, D, dtype,
# tiles, which of dk and dv: 1 dv alone, 2 dk alone, 3 both). Causal only.
BF16, FP32 = torch.bfloat16, torch.float32


def _open(kernel, d, tiles, dtype=BF16, grads=3):
    return [(kernel, d, True, dtype, Tiles(*t[:4], dtype == BF16, order=(*t, "late")[4]), grads) for t in tiles]


def jobs():
    """(kernel, width, causal, dtype, tiles, grads): all that --tune compiles, in the order it is measured."""
    early = "early"
    out = _open("dkdv", 128, [(64, 64, 4, 2), (64, 64, 4, 2, early), (32, 64, 4, 3), (32, 64, 4, 3, early),
                              (32, 64, 4, 4), (64, 128, 8, 2), (64, 128, 8, 2, early)])  # fmt: skip
    out += _open("dkdv", 64, [(128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2, early),
                              (64, 64, 4, 3, early), (64, 128, 8, 2), (32, 64, 4, 3, early),
                              (128, 128, 8, 2)])  # fmt: skip
    out += _open("dkdv", 128, [(64, 64, 4, 2, "folded")]) + _open("dkdv", 64, [(128, 64, 4, 2, "folded")])
    out += _open("fused", 64, [(64, 64, 4, 2), (128, 64, 4, 2)]) + _open("fused", 128, [(64, 128, 8, 2)])
    out += _open("dkdv", 128, [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 3), (128, 64, 4, 2)], grads=1)
    out += _open("dkdv", 128, [(64, 64, 4, 2, early), (64, 128, 8, 3, early), (32, 64, 4, 3, early)], grads=2)
    out += _open("dkdv", 64, [(128, 64, 4, 2), (64, 64, 4, 3)], grads=1)
    out += _open("dkdv", 64, [(128, 64, 4, 2, early), (64, 64, 4, 3, early)], grads=2)
    out += _open("dq", 128, [(128, 64, 8, 3), (64, 32, 4, 4), (64, 32, 4, 5)])
    out += _open("dq", 64, [(64, 128, 4, 3), (64, 64, 4, 4)])
    out += _open("forward", 128, [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4)])
    out += _open("forward", 64, [(64, 64, 4, 3), (64, 64, 4, 4)])
    out += _open("dkdv", 32, [(128, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 3, early)])
    out += _open("dq", 32, [(64, 128, 4, 3), (64, 64, 4, 3)]) + _open("forward", 32, [(64, 64, 4, 3), (64, 128, 4, 3)])
    out += _open("dq", 128, [(32, 32, 4, 2), (32, 16, 4, 2), (32, 32, 8, 2)], FP32)
    out += _open("dkdv", 128, [(32, 32, 4, 2), (16, 32, 4, 2), (32, 32, 8, 2)], FP32)
    return out


def selected(kernel, d):
    return plan.select_tiles(kernel, arch=90, itemsize=2, head_width=d, is_causal=True, tma=True)


def stage(kernel, d, causal, dtype, tiles, shape, num_splits=1, given=None, grads_of=3):
    """A function that launches one kernel with the given tiles on a shape and returns what it wrote.

    `given`: o and the log-sum-exp, where they are known without compiling a forward kernel for them.
    """
    batch, heads, t = shape
    q, k, v, do = make(batch, heads, heads, t, t, d, dtype, grad=False)
    scale = d**-0.5
    if kernel == "forward":

        def run():
            with plan.override_tiles(forward=tiles):
                return kernels.forward(q, k, v, causal, scale, num_splits=num_splits)

        return run
    o, lse = given or kernels.forward(q, k, v, causal, scale)
    grads = [torch.full_like(x, math.nan) for x in (q, k, v)]
    delta = (o.double() * do.double()).sum(-1).float() if o.numel() < 1 << 26 else (o.float() * do.float()).sum(-1)
    with plan.override_tiles(**{kernel: tiles}):
        case = kernels._case(q, k, v, causal, scale, num_splits, o=o, do=do)
        steps = [x.stride()[:3] for x in grads]
        if kernel == "dq":
            step = kernels._plan_dq(case, steps[0])
        else:
            step = kernels._plan_dkdv(case, steps[1], steps[2], kernel == "fused", grads_of)
    dq_sum = torch.zeros(q.shape, dtype=torch.float32, device="cuda") if kernel == "fused" else None

    def run():
        if kernel == "dq":
            kernels._run_dq(step, q, k, v, do, o, lse, delta, grads[0])
            return grads[:1]
        kernels._run_dkdv(step, q, k, v, do, lse, delta, grads[1], grads[2], dq_sum)
        return {1: grads[2:], 2: grads[1:2], 3: grads[1:]}[grads_of]

    return run


SMALL = (1, 8, 1024)  # batch, heads, T: large enough for descriptors, small enough for a float64 reference


def tune_part(part, parts):
    """Builds and runs each of this part's jobs once on a small shape, and says which of them are right."""
    for index, (kernel, d, causal, dtype, tiles, grads) in enumerate(jobs()):
        if index % parts != part:
            continue
        try:
            batch, heads, t = SMALL
            q, k, v, do = make(batch, heads, heads, t, t, d, dtype, grad=False)
            (o, lse, dq, dk, dv), _ = float64_reference(q, k, v, do, causal)
            given = (o.to(dtype), lse.float())
            got = [x.clone() for x in stage(kernel, d, causal, dtype, tiles, SMALL, given=given, grads_of=grads)()]
            wanted = {"forward": (o, lse), "dq": (dq,)}.get(kernel) or {1: (dv,), 2: (dk,), 3: (dk, dv)}[grads]
            worst = max(relative(a, b) for a, b in zip(got, wanted, strict=True))
            say("JOB", index, f"{worst:.2e}")
        except Exception as error:
            say("BAD", index, repr(error)[:200].replace("\n", " "))
    for index, (d, kernel) in enumerate(SWEPT):  # what the sweep of splits will launch
        if index % parts == part:
            stage(kernel, d, True, BF16, selected(kernel, d), (1, 1, 4096), 2)()


def describe(tiles):
    marks = "tma" if tiles.use_tma else "ptr"
    return f"{tiles.block_q}x{tiles.block_k} w{tiles.num_warps} s{tiles.num_stages} {marks} {tiles.order}"


def tune(out_dir, budget):
    log = Log(out_dir / "attention_tune.jsonl")
    parts = max(1, min(14, (os.cpu_count() or 2) - 1))
    texts = spread(parts, [str(out_dir), "--tune"], limit_s=0.55 * budget)
    lines = [line.split() for text in texts for line in text.splitlines() if line.startswith(("JOB", "BAD"))]
    errors = {int(line[1]): float(line[2]) for line in lines if line[0] == "JOB"}
    everything = jobs()
    bad = [i for i in range(len(everything)) if i not in errors]
    say(f"compiled {len(errors)} of {len(everything)} jobs in {seconds():.0f} s on {parts} processes")
    for line in [" ".join(line) for line in lines if line[0] == "BAD"][:12]:
        say("  ", line[:200])
    say(
        "not usable:",
        "; ".join(f"{everything[i][0]} D{everything[i][1]} {describe(everything[i][4])}" for i in bad)[:1500],
    )
    results = {}
    for index, (kernel, d, causal, dtype, tiles, grads) in enumerate(everything):
        if index not in errors or errors[index] > LIMITS[dtype] * 5 or seconds() > 0.85 * budget:
            if index in errors and errors[index] > LIMITS[dtype] * 5:
                say("WRONG", kernel, d, causal, describe(tiles), errors[index])
            continue
        shape = (2, 2048 // d, 8192) if dtype == BF16 else (1, 8, 4096)
        try:
            run = stage(kernel, d, causal, dtype, tiles, shape, grads_of=grads)
            ms = do_bench(run, warmup=5, rep=25, return_mode="median")
        except Exception as error:
            say("failed", kernel, d, describe(tiles), repr(error)[:120])
            continue
        kernel = {1: "dv", 2: "dk", 3: kernel}[grads]
        products = {"forward": 2, "dq": 3, "dkdv": 4, "dv": 2, "dk": 3, "fused": 5}[kernel]
        rate = products * 2 * shape[0] * shape[1] * shape[2] ** 2 * d * (0.5 if causal else 1) / ms / 1e9
        key = kernel, d, causal, NAMES[dtype], tiles.fp32_products if dtype == torch.float32 else ""
        results.setdefault(key, []).append((ms, rate, tiles, errors[index]))
        log.row(kind="tune", kernel=kernel, D=d, causal=causal, dtype=NAMES[dtype], products=key[4], tiles=vars(tiles),
                ms=ms, tflops=rate, error=errors[index])  # fmt: skip
    for key, rows in results.items():
        rows.sort(key=lambda row: row[0])
        best = "   ".join(f"{describe(t)} {ms:.3f}ms {rate:.0f}T" for ms, rate, t, _ in rows[:5])
        pointers = min((r[0] for r in rows if not r[2].use_tma), default=None)
        say(f"{key[0]:8} D{key[1]:<3} {'causal' if key[2] else 'full'} {key[3]} {key[4]} err {rows[0][3]:.0e}: {best}"
            + (f"   best ptr {pointers:.3f}ms" if pointers and rows[0][2].use_tma else ""))  # fmt: skip
    tune_splits(log, budget)


SWEPT = [(d, kernel) for kernel in ("forward", "dq", "dkdv") for d in (64, 128)]


def tune_splits(log, budget):
    """One head: time against the number of splits, beside what plan.choose_num_splits predicts and takes."""
    for (d, kernel), t in itertools.product(SWEPT, (16384, 4096, 8192, 2048)):
        if seconds() > budget:
            say("splits cut short by the time budget")
            return
        tiles, cells = selected(kernel, d), []
        shape = {"num_heads": 1, "num_queries": t, "num_keys": t, "head_width": d, "itemsize": 2, "num_sms": 132}
        chosen = plan.choose_num_splits(kernel, tiles, **shape, is_causal=True)
        for splits in (1, 2, 3, 4, 6, 8, 12):
            run = stage(kernel, d, True, BF16, tiles, (1, 1, t), splits)
            ms = do_bench(run, warmup=3, rep=10, return_mode="median")
            predicted = plan.predict_us(kernel, tiles, splits, **shape, is_causal=True) / 1e3
            cells.append(f"{splits}{'*' if splits == chosen else ''} {ms:.3f}/{predicted:.3f}")
            log.row(kind="splits", kernel=kernel, D=d, T=t, splits=splits, tiles=vars(tiles), ms=ms,
                    predicted=predicted, chosen=chosen)  # fmt: skip
        say(f"splits {kernel:8} D{d:<3} T{t:<5} ms/predicted, * chosen:", "  ".join(cells))


# ---- main ----------------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--budget", type=float, default=None, help="seconds in all; default 200, with --tune 90")
    parser.add_argument("--part", type=int, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out_dir.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    if options.part is not None:
        parts = max(1, min(14, (os.cpu_count() or 2) - 1))
        if options.tune:
            return tune_part(options.part, parts)
        check_part(options.part, len(warm_cases()))
        return warm(options.part)
    if options.tune:
        return tune(options.out_dir, options.budget or 90)
    budget = options.budget or 200
    log, table = Log(options.out_dir / "attention.jsonl"), []
    texts = spread(len(warm_cases()), [str(options.out_dir)], limit_s=80)
    for line in [line for text in texts for line in text.splitlines() if line.startswith("WARM FAILED")]:
        say(line[:300])
    say(f"compiled and checked on {len(texts)} processes at {seconds():.0f} s")
    failures = check(log, texts)
    ceiling = matmul_ceiling()
    say("matmul TFLOP/s in this run:", {NAMES[k]: round(v) for k, v in ceiling.items()})
    with contextlib.suppress(torch.OutOfMemoryError):
        check_beyond_int32(log)
    torch.cuda.empty_cache()
    host_times(log)
    main_grid(log, table, ceiling, deadline=0.55 * budget)
    long_one(log, table, ceiling)
    if not options.quick:
        one_head(log, table, ceiling, deadline=0.93 * budget)
        plain_batch(log, table, ceiling, deadline=0.97 * budget)
    say(f"measured at {seconds():.0f} s; {failures} checks failed")
    print("\n".join(table), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
