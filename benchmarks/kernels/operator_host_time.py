"""What one call of attention's operators costs the host, launched from C++ and from Python.

    python benchmarks/kernels/operator_host_time.py OUT.json [--device cuda] [--calls 300] [--rounds
    15]

One head of 128, so that the GPU is idle most of the time: what is left is the host's. Without
gradients, as a compiled graph calls the operators; beside them the built-in ones that stock
attention becomes there. µs a call, least and median of the rounds. Prints a line a row and writes
all of them to OUT.json, each with who served it.
"""

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from stepgauge.kernels.attention import extension
from stepgauge.runtime import extension as native

OURS = torch.ops.stepgauge
ATEN = torch.ops.aten


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,):
            inputs = [torch.randn(1, 1, 128, 64, device=device, dtype=dtype) for _ in range(4)]
            # One after another: who serves is decided between them.
            for name, run in itertools.chain(
                ours(*inputs), built_in(*inputs) if dtype == torch.bfloat16 else []
            ):
                least, median = microseconds(run, device, options.calls, options.rounds)
                row = {"call": name, "dtype": str(dtype), "least_us": least, "median_us": median}
                rows.append(
                    {
                        **row,
                        "native": native.served(),
                        "torch": torch.__version__,
                        "device": chip(device),
                    }
                )
                print(
                    f"{name:34} {dtype!s:15} {least:7.2f} {median:7.2f}  {rows[-1]['native']}",
                    flush=True,
                )
                options.out.write_text(json.dumps(rows, indent=1))


def ours(q, k, v, do):
    o, lse = OURS.flash_attention(q, k, v, True, 0.125, True)
    calls = {
        "forward": lambda: OURS.flash_attention.default(q, k, v, True, 0.125, True),
        "backward": lambda: OURS.flash_attention_backward.default(
            do, q, k, v, o, lse, True, 0.125, True
        ),
    }
    for run in calls.values():  # once to compile and to ask for C++, once to tell it
        run()
        native.settle()
        run()
    for name, run in calls.items():
        yield f"{name}, C++ where it serves", run
    call, extension.NATIVE.call = extension.NATIVE.call, None
    try:
        for name, run in calls.items():
            yield f"{name}, Python", run
    finally:
        extension.NATIVE.call = call


def built_in(q, k, v, do):
    if not q.is_cuda:
        return
    flash = ATEN._scaled_dot_product_flash_attention.default
    results = flash(q, k, v, 0.0, True, False, scale=0.125)
    o, lse, *lengths, seed, offset, _ = results
    yield "forward, built-in flash", lambda: flash(q, k, v, 0.0, True, False, scale=0.125)
    arguments = do, q, k, v, o, lse, *lengths, 0.0, True, seed, offset
    backward = ATEN._scaled_dot_product_flash_attention_backward.default
    yield "backward, built-in flash", lambda: backward(*arguments, scale=0.125)


def microseconds(run, device, calls, rounds):
    times = []
    native.forget()
    with native.counted():
        for _ in range(rounds):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times), statistics.median(times)


def chip(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
