"""Peak memory of a training step, predicted and measured, of models of other libraries.

    python benchmarks/memory_of_models.py OUT                 # all on the GPU, under 150 seconds
    python benchmarks/memory_of_models.py OUT llama:bf16      # these rows
    python benchmarks/memory_of_models.py OUT --trial         # predicted for an H100, without a GPU

Wants transformers and torchvision; weights are random, nothing is downloaded. Appends a line of JSON
a row to OUT/memory_of_models.jsonl, leaves out rows that the file has, and says at the end which
predictions are off by more than 2 %.
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

AT_ONCE = 6  # processes; each counts its own memory, and their peaks fit into one GPU together
ROW_SECONDS = 120
WIDEST_ERROR = 0.02
PRECISIONS = ("fp32", "bf16")
LIBRARIES = ("torch", "transformers", "torchvision", "timm", "numpy")
PREDICTED_FOR = "sm90"
LARGEST_SHOWN = 12
Made = tuple[nn.Module, tuple[Any, ...]]


class Named(nn.Module):
    """A model of transformers, its arguments by position."""

    def __init__(self, model: nn.Module, names: list[str]):
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *values: Tensor) -> Tensor:
        return self.model(**dict(zip(self.names, values, strict=True))).loss


def of_transformers(model: str, config: str, batch: Mapping[str, Tensor], **fields: Any) -> Made:
    import transformers

    made = getattr(transformers, model)(getattr(transformers, config)(**fields))
    return Named(made, [*batch]), tuple(batch.values())


def text(batch: int, length: int) -> dict[str, Tensor]:
    tokens = torch.ones(batch, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)


LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
         "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip


def gpt2() -> Made:
    return of_transformers("GPT2LMHeadModel", "GPT2Config", text(4, 512))


def llama() -> Made:
    return of_transformers("LlamaForCausalLM", "LlamaConfig", text(4, 1024), **LLAMA)


def llama_tied() -> Made:
    fields = LLAMA | {"tie_word_embeddings": True}
    return of_transformers("LlamaForCausalLM", "LlamaConfig", text(4, 512), **fields)


def mixtral() -> Made:
    fields = LLAMA | {"num_hidden_layers": 4, "num_local_experts": 8}
    return of_transformers("MixtralForCausalLM", "MixtralConfig", text(4, 512), **fields)


def bert() -> Made:
    batch = text(16, 256) | {"attention_mask": torch.ones(16, 256, dtype=torch.long)}
    return of_transformers("BertForMaskedLM", "BertConfig", batch)


def t5() -> Made:
    fields = {"num_layers": 6, "decoder_start_token_id": 0}
    return of_transformers("T5ForConditionalGeneration", "T5Config", text(8, 256), **fields)


def whisper() -> Made:
    batch = {"input_features": torch.zeros(4, 80, 3000), "labels": text(4, 128)["labels"]}
    return of_transformers("WhisperForConditionalGeneration", "WhisperConfig", batch)


def vit() -> Made:
    pixels, labels = images(16)
    batch = {"pixel_values": pixels, "labels": labels % 2}
    return of_transformers("ViTForImageClassification", "ViTConfig", batch)


class Classifier(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixels), labels)


def resnet50() -> Made:
    import torchvision

    return Classifier(torchvision.models.resnet50()), images(16)


def convnext() -> Made:
    import torchvision

    return Classifier(torchvision.models.convnext_tiny()), images(16)


def timm_vit() -> Made:
    import timm

    return Classifier(timm.create_model("vit_base_patch16_224")), images(32)


def lstm() -> Made:
    return nn.LSTM(512, 1024, num_layers=3, batch_first=True), (torch.ones(32, 256, 512),)


class LowRank(nn.Module):
    """A frozen linear layer and its LoRA (Hu et al. 2021), of rank 16."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 16, bias=False)
        self.up = nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def lora() -> Made:
    model, batch = llama()
    model.requires_grad_(False)
    for layer in model.model.model.layers:
        for name in ("q_proj", "v_proj"):
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name)))
    return model, batch


def embedding_bag() -> Made:
    bags = torch.zeros(4096, 32, dtype=torch.long)
    return nn.Sequential(nn.EmbeddingBag(200_000, 128), nn.Linear(128, 1)), (bags,)


class SparseRows(nn.Module):
    """An embedding whose gradient has the rows that were used."""

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
    """Both records of one row, in this process."""
    from stepgauge.bench.memory import jobs
    from stepgauge.spec.memory import MemorySpec
    from stepgauge.spec.predictions import paired
    from stepgauge.spec.user_model import UserModel

    fields = {"predict": PREDICTED_FOR} if trial else {"device": "cuda"}
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
            found[f"{record.provenance} {table}"] = record.tables.get(table, [])[:LARGEST_SHOWN]
    return found | {"error": row.error("peak_bytes")}


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def row_in_a_process(row: str, *, trial: bool) -> dict[str, Any]:
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
    """The rows of an earlier run that have figures."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for row in map(json.loads, lines) if "failed" not in row]


def is_wrong(row: Mapping[str, Any], *, trial: bool) -> bool:
    if trial:
        return "peak_bytes" not in row.get("modelled", {})
    error = row.get("error")
    return error is None or abs(error) > WIDEST_ERROR


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", nargs="?", type=Path, default=Path())
    parser.add_argument("rows", nargs="*", help="such as llama:bf16; all by default")
    parser.add_argument("--trial", action="store_true", help="predicted alone, without a GPU")
    parser.add_argument("--alone", help="one row in this process, printed")
    asked = parser.parse_intermixed_args()
    if asked.alone:
        print(json.dumps(measured_row(*asked.alone.split(":"), trial=asked.trial)))
        return 0
    names = [f"{model.__name__}:{precision}" for model in MODELS for precision in PRECISIONS]
    return run_all(asked.rows or names, asked.out / "memory_of_models.jsonl", trial=asked.trial)


def run_all(names: Sequence[str], file: Path, *, trial: bool) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = known_rows(file)
    known = {f"{row['model']}:{row['precision']}" for row in rows}
    with (
        concurrent.futures.ThreadPoolExecutor(1 if trial else AT_ONCE) as pool,
        file.open("a") as written,
    ):
        waiting = [
            pool.submit(row_in_a_process, name, trial=trial) for name in names if name not in known
        ]
        for done in concurrent.futures.as_completed(waiting):
            rows.append(row := done.result())
            written.write(json.dumps(row) + "\n")
            written.flush()
            print(summary(row), flush=True)
    wrong = [summary(row) for row in rows if is_wrong(row, trial=trial)]
    print(f"{len(wrong)} of {len(rows)} rows are off by more than {WIDEST_ERROR:.0%}, or failed:")
    print("\n".join(wrong))
    return 1 if wrong else 0


def summary(found: Mapping[str, Any]) -> str:
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
