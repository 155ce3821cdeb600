"""Predicts peaks of memory that others published, and prints both with the error.

    python benchmarks/memory_published.py [deit|bert|vit ...]      # one line per row; needs no GPU

Each source measured with its own command, on another GPU and another version of torch.
docs/log/2026-11-22-published-peaks.md explains what that means for the comparison.
"""

import sys
from pathlib import Path

from stepgauge.bench.memory import predicted
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.user_model import UserModel

MIB, GB = 2**20, 1e9
MODELS = Path(__file__).resolve().with_name("published_models.py")

# facebookresearch/deit, README_revenge.md, column "Peak Mem (MB)": max_memory_allocated / 2**20 during
# inference.
DEIT = {
    "deit_s_224": 987, "deit_s_384": 4569, "deit_b_224": 2078, "deit_b_384": 8956,
    "deit_l_224": 3789, "deit_l_384": 12866, "deit_h_224": 6984,
}  # fmt: skip
# huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx: NVML's used memory of a V100 after
# training, in MiB. Before there was a model, 1343 MiB were used.
USED_BEFORE_MIB = 1343
BERT = {
    ("bert_4", "fp32"): 14949, ("bert_1", "fp32"): 8681, ("bert_1_checkpointed", "fp32"): 6775,
    ("bert_4", "fp16"): 13939, ("bert_1_checkpointed", "fp16"): 7275,
}  # fmt: skip
# rasbt/pytorch-memory-optim, logs.md: max_memory_reserved / 1e9.
VIT = {
    "01_pytorch-vit.py": (26.79, "vit_64", "fp32"),
    "01-2_pytorch-fabric.py": (26.84, "vit_64", "fp32"),
    "02_mixed-precision.py": (18.21, "vit_64", "fp16"),
    "03_bfloat16.py": (13.82, "vit_64", "bf16-pure"),
    "04_lower-batchsize.py": (5.69, "vit_16", "bf16-pure"),
    "05_gradient-accum.py": (3.91, "vit_4", "bf16-pure"),
    "06_sgd-with-scheduler.py": (2.02, "vit_4_sgd", "bf16-pure"),
}


def figures(name: str, precision: str, optimizer: str = "adamw") -> dict[str, float]:
    """Returns the predicted metrics of a model of published_models.py on an A100, in bytes."""
    model = UserModel.read(f"{MODELS}:{name}")
    spec = MemorySpec(model=model, precision=precision, optimizer=optimizer, predict="sm80")
    return {metric: sample.median for metric, sample in predicted(spec).metrics.items()}


def print_row(row: str, unit: str, published: float, predicted_size: float) -> None:
    error = 100 * (predicted_size / published - 1)
    print(
        f"| {row} | {published:,.6g} {unit} | {predicted_size:,.6g} {unit} | {error:+.1f} |",
        flush=True,
    )


def deit() -> None:
    for name, published in DEIT.items():
        peak = figures(name, "fp16", "sgd")["forward_only_peak_bytes"]
        print_row(f"{name}, inference, fp16", "MiB", published, round(peak / MIB))


def bert() -> None:
    for (name, precision), used in BERT.items():
        peak = figures(name, precision)["reserved_peak_bytes"]
        print_row(f"{name}, {precision}", "MiB", used - USED_BEFORE_MIB, round(peak / MIB))


def vit() -> None:
    for script, (published, name, precision) in VIT.items():
        peak = figures(name, precision)["reserved_peak_bytes"]
        print_row(f"{script}, {precision}", "GB", published, round(peak / GB, 2))


def main() -> int:
    sources = {"deit": deit, "bert": bert, "vit": vit}
    for name in sys.argv[1:] or sources:
        if name not in sources:
            print(f"source is {name!r}; choose from {', '.join(sources)}", file=sys.stderr)
            return 2
        sources[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
