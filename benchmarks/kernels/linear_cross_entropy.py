"""Linear + cross-entropy beside its peers on one GPU: accuracy against float64 first, then time and extra memory.

    PYTHONPATH=src python benchmarks/kernels/linear_cross_entropy.py OUT_DIR [--quick] [--tune] [--budget SECONDS]

Writes OUT_DIR/linear_cross_entropy.jsonl, one line a row, and prints the table last. A result whose error is above the
limit gets no time. "extra" is the peak above the inputs and the two gradients. `--quick` takes the main shape and the
model's own, and five functions. `--tune` weighs instead the launch of the pass over the logits, other ways to the three
products, two streams, the size of a chunk, and what the host takes. Peers that cannot be imported are left out.

Legend: N tokens, D model width, V vocabulary.
"""

import argparse
import contextlib
import importlib
import json
import statistics
import time
from pathlib import Path

import torch
import triton
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from triton.testing import do_bench

from stepgauge.kernels.linear_cross_entropy import chunked, linear_cross_entropy

kernels = importlib.import_module("stepgauge.kernels.linear_cross_entropy.triton")

MAIN = (16384, 4096, 128256)
# By importance: the main target, the project's own model, two usual vocabularies, the second of them odd.
SHAPES = [MAIN, (2048, 2560, 10000), (8192, 4096, 32000), (16384, 2048, 50257)]
LARGEST_ERROR = 3e-2


# The functions compared


def eager(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def eager_bf16(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets)


def checkpointed_chunks(hidden, weight, targets):
    def part(hidden, targets):
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")

    chunks = zip(hidden.split(2048), targets.split(2048), strict=True)
    return sum(checkpoint(part, h, t, use_reentrant=False) for h, t in chunks) / len(targets)


def liger(accumulate=None):
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(**({"accum_dtype": accumulate} if accumulate else {}))
    return lambda hidden, weight, targets: loss(weight, hidden, targets)


def quack():
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda hidden, weight, targets: chunked_linear_cross_entropy(hidden, weight, targets)


def cut_cross_entropy():
    from cut_cross_entropy import linear_cross_entropy as cut

    return lambda hidden, weight, targets: cut(hidden, weight, targets)


def torch_chunked():
    options = torch.nn.LinearCrossEntropyOptions()
    return lambda hidden, weight, targets: F.linear_cross_entropy(hidden, weight, targets, options=options)


def ours(**options):
    return lambda hidden, weight, targets: linear_cross_entropy(hidden, weight, targets, **options)


@contextlib.contextmanager
def launches_of(row_launch):
    """Within, the pass over the logits is launched as `row_launch(row_length)` says."""
    default = kernels.row_launch
    kernels.row_launch = lambda row_length, itemsize, *, write_gradient=True: row_launch(row_length)
    try:
        yield
    finally:
        kernels.row_launch = default


def ours_split(block=16384, num_warps=16):
    def run(hidden, weight, targets):
        with launches_of(lambda row_length: kernels.split_launch(row_length, block=block, num_warps=num_warps)):
            return linear_cross_entropy(hidden, weight, targets)

    return run


def candidates(quick):
    """Name and maker of each function, the most important first."""
    makers = {
        "ours": ours,
        "compile": lambda: torch.compile(eager, dynamic=False),
        "ours split rows": ours_split,
        "liger": liger,
        "eager": lambda: eager,
        "ours fp32 sum": lambda: ours(weight_grad_accumulation="fp32"),
        "quack": quack,
        "cut-cross-entropy": cut_cross_entropy,
        "torch chunked": torch_chunked,
        "liger fp32 sum": lambda: liger(torch.float32),
        "checkpointed chunks": lambda: checkpointed_chunks,
        "eager bf16 loss": lambda: eager_bf16,
    }
    made = {}
    for name, make in list(makers.items())[: 5 if quick else None]:
        try:
            made[name] = make()
        except (ImportError, AttributeError, TypeError) as error:
            print(f"without {name}: {type(error).__name__}: {error}")
    return made


# Inputs and the float64 reference


def inputs(shape, *, seed=0, spread=2.0):
    """bf16 inputs whose logits have a standard deviation of `spread`."""
    N, D, V = shape
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = torch.randn(N, D, device="cuda", generator=generator, dtype=torch.bfloat16)
    weight = torch.randn(V, D, device="cuda", generator=generator, dtype=torch.bfloat16) * (spread * D**-0.5)
    targets = torch.randint(V, (N,), device="cuda", generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def confident_inputs(shape, top):
    """As `inputs`, each target's logit about `top` and the others' 0.5 in standard deviation."""
    _, weight, targets = inputs(shape, spread=1.0)
    weight = weight.detach()
    chosen = weight[targets].float()
    hidden = top * chosen / chosen.square().sum(1, keepdim=True) + torch.randn_like(chosen) / 2
    return hidden.bfloat16().requires_grad_(), weight.requires_grad_(), targets


@torch.no_grad()
def float64_reference(hidden, weight, targets, chunk=1024):
    """Loss and gradients, without the cancellation in 1 - p that float64 too would suffer."""
    N = len(targets)
    wide = weight.double()
    loss, grad_hidden = 0.0, torch.empty(hidden.shape, dtype=torch.float64, device="cuda")
    grad_weight = torch.zeros(weight.shape, dtype=torch.float64, device="cuda")
    for first in range(0, N, chunk):
        part, index = hidden[first : first + chunk].double(), targets[first : first + chunk, None]
        logits = part @ wide.T
        target = logits.gather(1, index)
        others = logits.scatter_(1, index, -torch.inf).logsumexp(1, keepdim=True)
        x = others - target
        cross_entropy = x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))
        loss += cross_entropy.sum() / N
        gradient = logits.sub_(target + cross_entropy).exp_().scatter_(1, index, -torch.sigmoid(x)).div_(N)
        grad_hidden[first : first + chunk] = gradient @ wide
        grad_weight.addmm_(gradient.T, part)
    return loss, grad_hidden, grad_weight


def relative_error(actual, wanted):
    return ((actual.detach().double() - wanted).norm() / wanted.norm()).item()


# Measurement


def step(function, tensors):
    hidden, weight, _ = tensors
    hidden.grad = weight.grad = None
    loss = function(*tensors)
    loss.backward()
    return loss


def measure_errors(function, tensors, reference):
    """Relative errors of the loss, hidden's gradient and the weight's."""
    loss = step(function, tensors)
    return [relative_error(a, w) for a, w in zip((loss, tensors[0].grad, tensors[1].grad), reference, strict=True)]


def measure_extra_gib(function, tensors):
    hidden, weight, _ = tensors
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(function, tensors)
    torch.cuda.synchronize()
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))
    return (torch.cuda.max_memory_allocated() - before - gradients) / 2**30


def quantiles(times):
    return [round(q, 4) for q in statistics.quantiles(times, n=10)[1::3]]  # p20, p50, p80


def tflops(shape, ms, matmuls=3):
    N, D, V = shape
    return 2 * N * D * V * matmuls / ms / 1e9


class Rows:
    """JSON lines, flushed row by row, and the lines of the table that is printed at the end."""

    def __init__(self, folder, budget):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "linear_cross_entropy.jsonl").open("w")
        self.until = time.monotonic() + budget
        self.table = []
        self.common = {
            "op": "linear_cross_entropy",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": "bfloat16",
        }

    def write(self, line, **row):
        self.file.write(json.dumps(self.common | row) + "\n")
        self.file.flush()
        self.table.append(line)
        print(line, flush=True)

    def late(self):
        return time.monotonic() > self.until


@contextlib.contextmanager
def survive(rows, name):
    try:
        yield
    except Exception as error:  # a peer's failure is a row, not the end of the run
        torch.cuda.empty_cache()
        message = " ".join(str(error)[:400].split())
        rows.write(f"{name:<20} FAILED {type(error).__name__}: {message[:150]}", name=name, error=message)


def compare_shape(rows, shape, functions):
    """Errors and extra memory of each function, then rounds of timing, so that none has the cool chip to itself."""
    tensors = inputs(shape)
    reference = float64_reference(*tensors)
    found = {}
    rows.table.append(f"\nN D V = {shape}, bf16, forward+backward")
    for name, function in functions.items():
        if rows.late():
            break
        with survive(rows, name):
            errors = measure_errors(function, tensors, reference)
            found[name] = {"errors": errors, "extra_gib": measure_extra_gib(function, tensors), "times": []}
    del reference
    torch.cuda.empty_cache()
    right = [name for name, result in found.items() if max(result["errors"]) < LARGEST_ERROR]
    for _ in range(3):
        for name in right:
            if rows.late() and found[name]["times"]:
                continue
            with survive(rows, name):
                run = functions[name]
                found[name]["times"] += do_bench(
                    lambda run=run: run(*tensors).backward(),
                    warmup=60, rep=500 if shape == MAIN else 100, grad_to_none=tensors[:2], return_mode="all",
                )  # fmt: skip
    write_comparison(rows, shape, found)


def write_comparison(rows, shape, found):
    timed = {name: quantiles(result["times"]) for name, result in found.items() if len(result["times"]) > 2}
    peers = [ms[1] for name, ms in timed.items() if not name.startswith("ours")]
    for name, result in found.items():
        e_loss, e_hidden, e_weight = result["errors"]
        row = {"name": name, "shape": shape, "extra_gib": round(result["extra_gib"], 4)}
        row |= {"error_loss": e_loss, "error_hidden": e_hidden, "error_weight": e_weight}
        line = f"{name:<20} errors {e_loss:.0e} {e_hidden:.1e} {e_weight:.1e}  extra {result['extra_gib']:6.3f} GiB  "
        if name in timed:
            p20, p50, p80 = timed[name]
            ratio = min(peers) / p50 if peers else None
            row |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "samples": len(result["times"])}
            row |= {"tflops": round(tflops(shape, p50), 1), "speed_vs_best_peer": ratio and round(ratio, 4)}
            line += f"{p50:8.3f} ms ({p20:.3f}-{p80:.3f})  {tflops(shape, p50):5.0f} TFLOP/s  "
            line += f"x{ratio:.3f} of the best peer" if ratio else ""
        else:
            line += "WRONG: no time" if max(result["errors"]) >= LARGEST_ERROR else "not timed"
        rows.write(line, **row)


def compare_confident(rows, functions):
    """The true class's gradient where the loss is 1e-1 down to 1e-9: errors only."""
    shape = (1024, 1024, 8192)
    left_out = {"ours fp32 sum", "liger fp32 sum", "checkpointed chunks"}
    functions = {name: function for name, function in functions.items() if name not in left_out}
    for top in (8, 18, 24, 30):
        tensors = confident_inputs(shape, top)
        reference = float64_reference(*tensors)
        rows.table.append(f"\nconfident logits, N D V = {shape}, bf16, loss {reference[0].item():.1e}")
        for name, function in functions.items():
            if rows.late():
                return
            with survive(rows, name):
                e_loss, e_hidden, e_weight = measure_errors(function, tensors, reference)
                row = {"error_loss": e_loss, "error_hidden": e_hidden, "error_weight": e_weight}
                line = f"{name:<20} errors {e_loss:.1e} {e_hidden:.1e} {e_weight:.1e}"
                rows.write(line, name=name, shape=shape, confident=top, loss=reference[0].item(), **row)


def compare_autocast(rows, functions):
    """The project's own model: fp32 weight, bf16 autocast."""
    shape = SHAPES[1]
    hidden, weight, targets = inputs(shape)
    tensors = hidden, weight.detach().float().requires_grad_(), targets
    rows.table.append(f"\nN D V = {shape}, bf16 autocast over an fp32 weight, forward+backward")
    for name in ("ours", "compile", "liger", "eager"):
        if name not in functions or rows.late():
            continue

        def run(function=functions[name]):
            with torch.autocast("cuda", torch.bfloat16):
                loss = function(*tensors)
            loss.backward()

        with survive(rows, name):
            p20, p50, p80 = quantiles(do_bench(run, warmup=100, rep=300, grad_to_none=tensors[:2], return_mode="all"))
            line = f"{name:<20} {p50:8.3f} ms ({p20:.3f}-{p80:.3f})"
            rows.write(line, name=name, shape=shape, autocast=True, ms_p20=p20, ms_p50=p50, ms_p80=p80)


# The parts of a chunk, and the sweeps


def median_ms(run, rep=150):
    return do_bench(run, warmup=40, rep=rep, return_mode="median")


def row_pass(shape, tokens):
    """A function that runs the pass over a chunk's logits with a given launch, and the bytes it must move."""
    _, D, V = shape
    hidden, weight, targets = (x.detach() for x in inputs((tokens, D, V)))
    P = -(-V // chunked.ROW_MULTIPLE) * chunked.ROW_MULTIPLE
    logits = torch.empty(tokens, P, device="cuda", dtype=torch.bfloat16)
    torch.mm(hidden, weight.T, out=logits[:, :V])
    losses, scale = torch.empty(tokens, device="cuda"), torch.ones((), device="cuda")
    options = {"ignore_index": -100, "z_loss": 0.0, "softcap": None, "scale_gradient": True}

    def run(launch=None, write_gradient=True):
        kernels.softmax_gradient_(
            logits, V, hidden, weight, targets, scale, losses, write_gradient=write_gradient, launch=launch, **options
        )

    return run, 4 * tokens * P


def measure_parts(rows, shape):
    """Each product of one chunk alone: what the whole would take with nothing between, and who takes the rest."""
    N, D, V = shape
    P = -(-V // chunked.ROW_MULTIPLE) * chunked.ROW_MULTIPLE
    tokens = chunked.chunk_tokens(N, 2 * P, chunked.MAX_LOGITS_BYTES)
    num_chunks = -(-N // tokens)
    hidden, weight, _ = (x.detach() for x in inputs((tokens, D, V)))
    logits = torch.randn(tokens, P, device="cuda", dtype=torch.bfloat16).mul_(1e-3)[:, :V]
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    run_rows, row_bytes = row_pass(shape, tokens)
    parts = {
        "logits = hidden weight^T": lambda: torch.mm(hidden, weight.T, out=logits),
        "pass over the logits": run_rows,
        "hidden's gradient": lambda: torch.mm(logits, weight, out=grad_hidden),
        "weight's gradient, first": lambda: torch.mm(logits.T, hidden, out=grad_weight),
        "weight's gradient, added": lambda: torch.addmm(grad_weight, logits.T, hidden, out=grad_weight),
    }
    wide, fp32 = torch.zeros(V, D, device="cuda"), torch.float32
    parts["weight's gradient, fp32 sum"] = lambda: torch.addmm(wide, logits.T, hidden, out_dtype=fp32, out=wide)
    rows.table.append(f"\nparts of one of {num_chunks} chunks of {tokens} tokens, N D V = {shape}")
    for name, run in parts.items():
        with survive(rows, name):
            ms = median_ms(run)
            rate = tflops((tokens, D, V), ms, 1)
            speed = f"{row_bytes / ms / 1e6:.0f} GB/s" if run is run_rows else f"{rate:.0f} TFLOP/s"
            line = f"{name:<28} {ms:8.3f} ms, times {num_chunks} = {ms * num_chunks:8.3f} ms, {speed}"
            rows.write(line, name=name, shape=shape, part=True, ms_p50=ms, num_chunks=num_chunks)


def row_launches(row_length):
    """The default, then what else is in question for rows of this length: each costs a compilation."""
    walk = {"VEC": 8, "STAGES": 1, "REVERSE": True, "KEEP": "evict_last"}
    launches = [kernels.row_launch(row_length, 2)]
    shapes = ((16384, 16), (8192, 8), (32768, 32)) if row_length > 16384 else ((8192, 8),)
    launches += [kernels.split_launch(row_length, block=block, num_warps=warps) for block, warps in shapes]
    if row_length > 65536:
        # Fewer programs with room to spare, smaller parts, and the streamed kernel's former launch.
        launches.append({**launches[1], "maxnreg": 128})
        launches.append(kernels.split_launch(row_length, block=4096, num_warps=4))
        launches.append({"BLOCK_V": 8192, **walk, "num_warps": 16})
    elif row_length <= 16384:
        launches.append({"BLOCK_V": 2048, **walk, "num_warps": 8})
    return launches


def tune_rows(rows):
    for shape, tokens in ((MAIN, 2048), (SHAPES[1], 2048), (SHAPES[3], 4096), (SHAPES[2], 8192)):
        run, num_bytes = row_pass(shape, tokens)
        rows.table.append(f"\npass over {tokens} rows of {shape[2]}: GB/s, one read and one write; first the default")
        for launch in row_launches(-(-shape[2] // 64) * 64):
            with survive(rows, str(launch)):
                rate = num_bytes / median_ms(lambda run=run, launch=launch: run(launch), rep=60) / 1e6
                rows.write(f"{rate:7.0f}  {launch}", name="row pass", shape=shape, gb_per_s=rate, launch=launch)


def tune_products(rows):
    """The three products of a chunk otherwise: cuBLASLt, the vocabulary in slices, twice the tokens, all tokens."""
    _, D, V = MAIN
    for library, tokens in (("cublas", 2048), ("cublaslt", 2048), ("cublas", 4096), ("cublas", 16384)):
        hidden, weight, _ = (x.detach() for x in inputs((tokens, D, V)))
        logits = torch.randn(tokens, V, device="cuda", dtype=torch.bfloat16).mul_(1e-3)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

        def logits_in(slices, hidden=hidden, weight=weight, logits=logits):
            for w, out in zip(weight.chunk(slices), logits.chunk(slices, dim=1), strict=True):
                torch.mm(hidden, w.T, out=out)

        def add_in(slices, hidden=hidden, grad_weight=grad_weight, logits=logits):
            for g, out in zip(logits.chunk(slices, dim=1), grad_weight.chunk(slices), strict=True):
                torch.addmm(out, g.T, hidden, out=out)

        parts = {
            "logits": lambda run=logits_in: run(1),
            "hidden's": lambda a=logits, b=weight, out=grad_hidden: torch.mm(a, b, out=out),
            "weight's": lambda a=logits, b=hidden, out=grad_weight: torch.mm(a.T, b, out=out),
            "added": lambda run=add_in: run(1),
        }
        if (library, tokens) == ("cublas", 2048):
            parts |= {"logits, 4 slices": lambda run=logits_in: run(4), "added, 4 slices": lambda run=add_in: run(4)}
            parts |= {"added, 16 slices": lambda run=add_in: run(16)}
        found = {}
        torch.backends.cuda.preferred_blas_library(library)
        for name, run in parts.items():
            with survive(rows, name):
                found[name] = round(tflops((tokens, D, V), median_ms(run, rep=100), 1), 1)
        torch.backends.cuda.preferred_blas_library("cublas")
        line = f"{library} {tokens} tokens, TFLOP/s: " + ", ".join(f"{name} {rate}" for name, rate in found.items())
        rows.write(line, name="products", shape=MAIN, tokens=tokens, library=library, tflops=found)


def tune_streams(rows):
    """One chunk's four parts in turn, and in halves whose pass runs on a second stream under the other's products."""
    _, D, V = MAIN
    tokens, half = 2048, 1024
    hidden, weight, targets = (x.detach() for x in inputs((tokens, D, V)))
    logits = torch.empty(tokens, V, device="cuda", dtype=torch.bfloat16)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    losses, scale = torch.empty(tokens, device="cuda"), torch.ones((), device="cuda")
    options = {"ignore_index": -100, "z_loss": 0.0, "softcap": None, "write_gradient": True, "scale_gradient": True}

    def form(here):
        torch.mm(hidden[here], weight.T, out=logits[here])

    def turn(here):
        kernels.softmax_gradient_(logits[here], V, hidden[here], weight, targets[here], scale, losses[here], **options)

    def finish(*parts):
        for here in parts:
            torch.mm(logits[here], weight, out=grad_hidden[here])
        torch.addmm(grad_weight, logits.T, hidden, out=grad_weight)

    def in_turn():
        form(slice(None))
        turn(slice(None))
        finish(slice(None))

    def on_two(side):
        main, first, second = torch.cuda.current_stream(), slice(0, half), slice(half, tokens)
        form(first)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            turn(first)
            first_done = side.record_event()
        form(second)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            turn(second)
        main.wait_event(first_done)
        torch.mm(logits[first], weight, out=grad_hidden[first])
        main.wait_stream(side)
        finish(second)

    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    ways = {"in turn": in_turn, "two streams": lambda: on_two(low), "two, pass first": lambda: on_two(high)}
    for name, run in ways.items():
        with survive(rows, name):
            ms = median_ms(run, rep=250)
            rows.write(f"one chunk, {name:<16} {ms:8.3f} ms", name=f"chunk {name}", shape=MAIN, ms_p50=ms)


def step_ms(function, tensors, rep):
    return do_bench(
        lambda: function(*tensors).backward(), warmup=60, rep=rep, grad_to_none=tensors[:2], return_mode="median"
    )


def tune_steps(rows):
    """Forward and backward: the split of rows, cuBLASLt, the chunk."""
    for shape, rep in ((MAIN, 500), (SHAPES[1], 100), (SHAPES[3], 300)):
        tensors = inputs(shape)
        ways = {"as it is": ours(), "split 16384/16": ours_split(), "split 8192/8": ours_split(8192, 8)}
        ways |= {"cublaslt": ours()}
        if shape == MAIN:
            ways |= {f"{mib} MiB": ours(max_logits_bytes=mib * 2**20) for mib in (604, 1024)}
        rows.table.append(f"\nforward+backward, N D V = {shape}")
        for name, function in ways.items():
            if rows.late():
                return
            with survive(rows, name):
                torch.backends.cuda.preferred_blas_library("cublaslt" if name == "cublaslt" else "cublas")
                extra, ms = measure_extra_gib(function, tensors), step_ms(function, tensors, rep)
                line = f"{name:<16} {ms:8.3f} ms  extra {extra:.3f} GiB"
                rows.write(line, name=f"step {name}", shape=shape, ms_p50=ms, extra_gib=extra)
            torch.backends.cuda.preferred_blas_library("cublas")


def measure_host(rows):
    """Microseconds that the host takes to hand over a forward and a backward: what small shapes hang on."""
    tensors = inputs((256, 128, 1000))
    rows.table.append("\nhost, microseconds a step, at a shape of no work")
    for name, function in {"ours": ours(), "eager": eager, "compile": torch.compile(eager, dynamic=False)}.items():
        with survive(rows, name):
            forward, backward = [], []
            for _ in range(60):
                tensors[0].grad = tensors[1].grad = None
                torch.cuda.synchronize()
                times = [time.perf_counter()]
                loss = function(*tensors)
                times.append(time.perf_counter())
                loss.backward()
                times.append(time.perf_counter())
                forward.append((times[1] - times[0]) * 1e6)
                backward.append((times[2] - times[1]) * 1e6)
            first, second = statistics.median(forward[10:]), statistics.median(backward[10:])
            line = f"{name:<10} forward {first:6.0f}, backward {second:6.0f}"
            rows.write(line, name=f"host {name}", forward_us=first, backward_us=second)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--quick", action="store_true", help="the main shape and the model's own, five functions")
    parser.add_argument("--tune", action="store_true", help="weigh launches, products and chunks instead of comparing")
    parser.add_argument("--budget", type=float, default=140, help="seconds after which nothing new is started")
    arguments = parser.parse_args()
    rows = Rows(arguments.out_dir, arguments.budget)
    if arguments.tune:
        for tune in (tune_rows, tune_steps, tune_products, measure_host, tune_streams):
            if not rows.late():
                with survive(rows, tune.__name__):
                    tune(rows)
                torch.cuda.empty_cache()
    else:
        functions = candidates(arguments.quick)
        for shape in SHAPES[: 2 if arguments.quick else None]:
            if not rows.late():
                compare_shape(rows, shape, functions)
            if shape == MAIN and not arguments.quick and not rows.late():
                measure_parts(rows, MAIN)
                compare_confident(rows, functions)
        if not rows.late():
            compare_autocast(rows, functions)
    print("=" * 100)
    print("\n".join(rows.table))


if __name__ == "__main__":
    main()
