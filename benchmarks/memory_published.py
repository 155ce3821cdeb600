"""Peaks that others published beside ours, predicted.

    python benchmarks/memory_published.py [deit|bert|vit ...]      # a line a row; no GPU is needed

Each source measured by another command, on another GPU and torch; docs/log says what that means.
"""

import sys
from pathlib import Path

from stepgauge.bench.memory import predicted
from stepgauge.spec.memory import MemorySpec
from stepgauge.spec.user_model import UserModel

MIB, GB = 2**20, 1e9
MODELS = Path(__file__).resolve().with_name("published_models.py")

# facebookresearch/deit, README_revenge.md, "Peak Mem (MB)": max_memory_allocated / 2**20 of
# inference.
DEIT = {
    "deit_s_224": 987, "deit_s_384": 4569, "deit_b_224": 2078, "deit_b_384": 8956,
    "deit_l_224": 3789, "deit_l_384": 12866, "deit_h_224": 6984,
}  # fmt: skip
# huggingface/transformers, docs/source/en/perf_train_gpu_one.mdx: what NVML calls used, MiB, of a
# V100 after training, and 1343 of that before there was a model.
KERNELS = 1343
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
    """Bytes, by metric, of the model of that name on an A100."""
    model = UserModel.read(f"{MODELS}:{name}")
    spec = MemorySpec(model=model, precision=precision, optimizer=optimizer, predict="sm80")
    return {metric: sample.median for metric, sample in predicted(spec).metrics.items()}


def show(row: str, unit: str, published: float, ours: float) -> None:
    error = 100 * (ours / published - 1)
    print(f"| {row} | {published:,.6g} {unit} | {ours:,.6g} {unit} | {error:+.1f} |", flush=True)


def deit() -> None:
    for name, published in DEIT.items():
        ours = figures(name, "fp16", "sgd")["forward_only_peak_bytes"]
        show(f"{name}, inference, fp16", "MiB", published, round(ours / MIB))


def bert() -> None:
    for (name, precision), used in BERT.items():
        ours = figures(name, precision)["reserved_peak_bytes"]
        show(f"{name}, {precision}", "MiB", used - KERNELS, round(ours / MIB))


def vit() -> None:
    for script, (published, name, precision) in VIT.items():
        ours = figures(name, precision)["reserved_peak_bytes"]
        show(f"{script}, {precision}", "GB", published, round(ours / GB, 2))


def main() -> int:
    sources = {"deit": deit, "bert": bert, "vit": vit}
    for name in sys.argv[1:] or sources:
        if name not in sources:
            print(f"source is {name!r}; there are {', '.join(sources)}", file=sys.stderr)
            return 2
        sources[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
