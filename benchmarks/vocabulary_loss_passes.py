"""Times the passes of the loss over parts of the vocabulary on one GPU.

    python benchmarks/vocabulary_loss_passes.py OUT            # 12 s
    python benchmarks/vocabulary_loss_passes.py OUT --trial    # on a CPU, to check that it runs

The cost model prices the loss by these (cost/operations/vocabulary_loss.py). Appends a line per size to
OUT/passes.jsonl: median ms of each pass over the logits, of the whole forward and backward, its peak in GB,
and the relative error of the loss of the first tokens in fp64.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from versions import versions

from stepgauge.measure import devices
from stepgauge.parallel.tensor_parallel.vocabulary_loss import _CrossEntropy

SIZES = ((32768, 64128), (16384, 32064), (8192, 50304), (18432, 5000), (65536, 5000))
MOST_FP32 = 1.2e9  # logits


def milliseconds(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    times = []
    for number in range(calls + 2):
        devices.synchronize(device)
        start = time.perf_counter()
        call()
        devices.synchronize(device)
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(times), 3)


def passes_over(logits: Tensor) -> dict[str, Callable[[], object]]:
    scale = torch.rand(len(logits), 1, device=logits.device)
    probabilities = logits.softmax(-1)
    return {
        "largest": lambda: logits.max(-1),
        "log_softmax_fp32": lambda: logits.log_softmax(-1, torch.float32),
        "softmax": lambda: logits.softmax(-1),
        "scaled": lambda: probabilities.mul_(scale),
    }


def row_of(tokens: int, words: int, dtype: torch.dtype, device: torch.device) -> dict[str, object]:
    logits = torch.randn(tokens, words, device=device, dtype=dtype)
    targets = torch.randint(0, words, (tokens,), device=device)
    times = {name: milliseconds(call, device) for name, call in passes_over(logits).items()}
    leaf = logits.detach().requires_grad_()

    def whole() -> None:
        leaf.grad = None
        _CrossEntropy.apply(leaf, targets, 0, None, False).backward()

    devices.reset_peak_memory(device)
    before = devices.allocated_memory(device) or 0
    times["whole"] = milliseconds(whole, device, calls=5)
    peak = devices.peak_memory(device).get("peak_bytes", before)
    few = slice(0, 2048)
    expected = F.cross_entropy(logits[few].double(), targets[few]).item()
    found = _CrossEntropy.apply(logits[few], targets[few], 0, None).item()
    sizes = {"tokens": tokens, "words": words, "dtype": str(dtype)}
    return {**sizes, "ms": times, "peak_gb": (peak - before) / 1e9, "error": found / expected - 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--trial", action="store_true", help="small, on a CPU")
    arguments = parser.parse_args()
    if not arguments.trial and torch.cuda.device_count() < 1:
        parser.error("this needs a GPU; --trial runs it small on a CPU")
    device = torch.device("cpu" if arguments.trial else "cuda")
    scale = 64 if arguments.trial else 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "passes.jsonl").open("a") as lines:
        for dtype in (torch.bfloat16, torch.float32):
            for tokens, words in SIZES:
                if dtype == torch.float32 and tokens * words > MOST_FP32:
                    continue
                row = row_of(tokens // scale, words // scale, dtype, device)
                lines.write(json.dumps(row | versions(trial=arguments.trial)) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
