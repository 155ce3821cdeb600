"""Predicts and measures the peak memory of a training step, for models of other libraries.

    python benchmarks/memory_of_models.py OUT                 # all on the GPU, under 150 seconds
    python benchmarks/memory_of_models.py OUT llama:bf16      # these rows
    python benchmarks/memory_of_models.py OUT --trial         # predictions for an H100, without a GPU

Needs transformers, torchvision and timm. Weights are random; nothing is downloaded. Appends a JSON
line per row to OUT/memory_of_models.jsonl and skips rows that the file already has. Prints at the
end which rows failed or have an error above 2 %; exits with status 1 if there are any.
"""

import argparse
import concurrent.futures
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# At the same time: each counts its own memory, and the sum of their peaks fits into one GPU.
MAX_PROCESSES = 6
ROW_SECONDS = 120
MAX_ERROR = 0.02
PRECISIONS = ("fp32", "bf16")
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "numpy")
TRIAL_ARCHITECTURE = "sm90"
MAX_TABLE_ROWS = 12
ModelAndBatch = tuple[nn.Module, tuple[Any, ...]]


class KeywordModel(nn.Module):
    """A model of transformers that takes its keyword arguments by position and returns the loss."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, values, strict=True))).loss


def transformers_model(
    model: str, config: str, batch: Mapping[str, Tensor], **fields: Any
) -> ModelAndBatch:
    import transformers

    built = getattr(transformers, model)(getattr(transformers, config)(**fields))
    return KeywordModel(built, [*batch]), tuple(batch.values())


def text(batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)


LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip


def gpt2() -> ModelAndBatch:
    return transformers_model("GPT2LMHeadModel", "GPT2Config", text(4, 512))


def llama() -> ModelAndBatch:
    return transformers_model("LlamaForCausalLM", "LlamaConfig", text(4, 1024), **LLAMA)


def llama_tied() -> ModelAndBatch:
    fields = LLAMA | {"tie_word_embeddings": True}
    return transformers_model("LlamaForCausalLM", "LlamaConfig", text(4, 512), **fields)


def mixtral() -> ModelAndBatch:
    fields = LLAMA | {"num_hidden_layers": 4, "num_local_experts": 8}
    return transformers_model("MixtralForCausalLM", "MixtralConfig", text(4, 512), **fields)


def bert() -> ModelAndBatch:
    batch = text(16, 256) | {"attention_mask": torch.ones(16, 256, dtype=torch.long)}
    return transformers_model("BertForMaskedLM", "BertConfig", batch)


def t5() -> ModelAndBatch:
    fields = {"num_layers": 6, "decoder_start_token_id": 0}
    return transformers_model("T5ForConditionalGeneration", "T5Config", text(8, 256), **fields)


def whisper() -> ModelAndBatch:
    batch = {"input_features": torch.zeros(4, 80, 3000), "labels": text(4, 128)["labels"]}
    return transformers_model("WhisperForConditionalGeneration", "WhisperConfig", batch)


def vit() -> ModelAndBatch:
    pixels, labels = images(16)
    batch = {"pixel_values": pixels, "labels": labels % 2}
    return transformers_model("ViTForImageClassification", "ViTConfig", batch)


class Classifier(nn.Module):
    """A model of images with the cross-entropy loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixels), labels)


def resnet50() -> ModelAndBatch:
    import torchvision

    return Classifier(torchvision.models.resnet50()), images(16)


def convnext() -> ModelAndBatch:
    import torchvision

    return Classifier(torchvision.models.convnext_tiny()), images(16)


def timm_vit() -> ModelAndBatch:
    import timm

    return Classifier(timm.create_model("vit_base_patch16_224")), images(32)


def lstm() -> ModelAndBatch:
    return nn.LSTM(512, 1024, num_layers=3, batch_first=True), (torch.ones(32, 256, 512),)


class LowRank(nn.Module):
    """A frozen linear layer with LoRA of rank 16 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> ModelAndBatch:
    model, batch = llama()
    model.requires_grad_(False)
    for layer in model.model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return model, batch


def embedding_bag() -> ModelAndBatch:
    bags = torch.zeros(4096, 32, dtype=torch.long)
    return nn.Sequential(nn.EmbeddingBag(200_000, 128), nn.Linear(128, 1)), (bags,)


class SparseRows(nn.Module):
    """An embedding with sparse gradients, which hold only the rows that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.out = nn.Embedding(200_000, 128, sparse=True), nn.Linear(128, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.rows(tokens)).mean()


def sparse_embedding() -> dict[str, Any]:
    batch = torch.zeros(4096, 32, dtype=torch.long)
    return {"module": SparseRows(), "batch": (batch,), "optimizer": torch.optim.SGD}


MODELS: tuple[Callable[[], Any], ...] = (
    gpt2, llama, llama_tied, mixtral, bert, t5, whisper, vit, timm_vit, resnet50, convnext, lstm,
    lora, embedding_bag, sparse_embedding,
)  # fmt: skip


def measured_row(name: str, precision: str, *, trial: bool) -> dict[str, Any]:
    """Predicts and measures one row in this process. Returns the figures of both as JSON."""
    from stepgauge.bench.memory import jobs
    from stepgauge.spec.memory import MemorySpec
    from stepgauge.spec.predictions import paired
    from stepgauge.spec.user_model import UserModel

    fields = {"predict": TRIAL_ARCHITECTURE} if trial else {"device": "cuda"}
    model = UserModel.read(f"{Path(__file__).resolve()}:{name}")
    spec = MemorySpec(model=model, precision=precision, **fields)
    start = time.perf_counter()
    (row,) = paired([job.run(job.spec) for job in jobs(spec)])
    found: dict[str, Any] = {
        "model": name,
        "precision": precision,
        "versions": {library: _version(library) for library in LIBRARIES},
        "environment": row.record.environment,
        "seconds": time.perf_counter() - start,
    }
    for record in {id(each): each for each in (row.record, row.prediction) if each}.values():
        figures = {metric: sample.median for metric, sample in record.metrics.items()}
        found[record.provenance] = figures | ({"note": record.note} if record.note else {})
        for table in ("savers", "at_the_peak"):
            found[f"{record.provenance} {table}"] = record.tables.get(table, [])[:MAX_TABLE_ROWS]
    return found | {"error": row.error("peak_bytes")}


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_row(row: str, *, trial: bool) -> dict[str, Any]:
    """Runs one row in a process of its own, so that its peak is its own."""
    name, precision = row.split(":")
    command = [sys.executable, __file__, "--alone", row, *(["--trial"] if trial else [])]
    threads = {"OMP_NUM_THREADS": "2"}  # several processes share the cores
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=ROW_SECONDS, env=os.environ | threads
        )
        lines = done.stdout.strip().splitlines()
        why = done.stderr[-1500:] or f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        lines, why = [], f"no result within {ROW_SECONDS} s"
    if not lines or not lines[-1].startswith("{"):
        return {"model": name, "precision": precision, "failed": why}
    return json.loads(lines[-1])


def known_rows(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of earlier runs that did not fail."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "failed" not in row]


def is_wrong(row: Mapping[str, Any], *, trial: bool) -> bool:
    """Returns whether a row failed or its error is too large. A trial only needs a prediction."""
    if trial:
        return "peak_bytes" not in row.get("modelled", {})
    error = row.get("error")
    return error is None or abs(error) > MAX_ERROR


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path())
    parser.add_argument(
        "rows", nargs="*", help="MODEL:PRECISION, such as llama:bf16; all by default"
    )
    parser.add_argument("--trial", action="store_true", help="predict only, without a GPU")
    parser.add_argument("--alone", help="run this row in this process and print it as JSON")
    arguments = parser.parse_intermixed_args()
    if arguments.alone:
        print(json.dumps(measured_row(*arguments.alone.split(":"), trial=arguments.trial)))
        return 0
    names = [f"{model.__name__}:{precision}" for model in MODELS for precision in PRECISIONS]
    return run_all(
        arguments.rows or names, arguments.out / "memory_of_models.jsonl", trial=arguments.trial
    )


def run_all(names: Sequence[str], file: Path, *, trial: bool) -> int:
    """Runs the rows that the file does not have, several at a time. Returns the exit status."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = known_rows(file)
    known = {f"{row['model']}:{row['precision']}" for row in rows}
    with (
        concurrent.futures.ThreadPoolExecutor(1 if trial else MAX_PROCESSES) as pool,
        file.open("a") as written,
    ):
        waiting = [pool.submit(run_row, name, trial=trial) for name in names if name not in known]
        for done in concurrent.futures.as_completed(waiting):
            rows.append(row := done.result())
            written.write(json.dumps(row) + "\n")
            written.flush()
            print(summary(row), flush=True)
    wrong = [summary(row) for row in rows if is_wrong(row, trial=trial)]
    print(f"{len(wrong)} of {len(rows)} rows failed or have an error above {MAX_ERROR:.0%}:")
    print("\n".join(wrong))
    return 1 if wrong else 0


def summary(found: Mapping[str, Any]) -> str:
    """Returns one line: the measured and the predicted peak and the error."""
    name = f"{found['model']} {found['precision']}"
    if "failed" in found:
        return f"{name}: {found['failed'].strip().splitlines()[-1:]}"
    sides = {side: found[side] for side in ("measured", "modelled") if side in found}
    texts = [
        f"{side} {figures['peak_bytes'] / 2**30:.3f} GiB" if "peak_bytes" in figures
        else f"{side}: {figures.get('note')}"
        for side, figures in sides.items()
    ]  # fmt: skip
    error = f", {found['error']:+.2%}" if found.get("error") is not None else ""
    return f"{name}: {', '.join(texts)}{error} ({found['seconds']:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
