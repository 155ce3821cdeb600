"""Peak memory of a training step, predicted and measured, of models of other libraries.

    OUT=folder python benchmarks/memory_of_models.py          # all on the GPU, under four minutes
    python benchmarks/memory_of_models.py llama:bf16          # one row
    PREDICT=sm90 python benchmarks/memory_of_models.py        # predicted alone, without a GPU

Wants transformers and torchvision; weights are random, nothing is downloaded. Writes a line of JSON
a row to $OUT/memory_of_models.jsonl and says at the end which predictions are off by more than 2 %.
"""

import concurrent.futures
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

AT_ONCE = 4  # processes; each counts its own memory
WIDEST_ERROR = 0.02
PRECISIONS = ("fp32", "bf16")
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


class Classified(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        import torchvision

        self.model = getattr(torchvision.models, name)()

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(pixels), labels)


def resnet50() -> Made:
    return Classified("resnet50"), images(16)


def convnext() -> Made:
    return Classified("convnext_tiny"), images(16)


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


MODELS: tuple[Callable[[], Made], ...] = (
    gpt2, llama, llama_tied, mixtral, bert, t5, whisper, vit, resnet50, convnext, lstm, lora,
    embedding_bag,
)  # fmt: skip


def measure_row(name: str, precision: str) -> dict[str, Any]:
    """Both records of one row, in this process."""
    from stepgauge.bench.memory import jobs
    from stepgauge.spec.memory import MemorySpec
    from stepgauge.spec.predictions import paired
    from stepgauge.spec.user_model import UserModel

    fields = {"predict": os.environ["PREDICT"]} if "PREDICT" in os.environ else {"device": "cuda"}
    model = UserModel.read(f"{Path(__file__).resolve()}:{name}")
    spec = MemorySpec(model=model, precision=precision, **fields)
    (row,) = paired([job.run(job.spec) for job in jobs(spec)])
    found: dict[str, Any] = {"model": name, "precision": precision, "torch": torch.__version__}
    for record in {id(each): each for each in (row.record, row.prediction) if each}.values():
        figures = {metric: sample.median for metric, sample in record.metrics.items()}
        found[record.provenance] = figures | ({"note": record.note} if record.note else {})
        found[f"{record.provenance} savers"] = record.tables.get("savers", [])[1:6]
        found[f"{record.provenance} at the peak"] = record.tables.get("at_the_peak", [])[1:6]
    return found | {"error": row.error("peak_bytes")}


def row_in_a_process(row: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, row], capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        name, precision = row.split(":")
        return {"model": name, "precision": precision, "failed": done.stderr[-1500:]}
    return json.loads(lines[-1])


def main() -> int:
    if len(sys.argv) == 2:
        print(json.dumps(measure_row(*sys.argv[1].split(":"))))
        return 0
    asked = [f"{model.__name__}:{precision}" for model in MODELS for precision in PRECISIONS]
    out = Path(os.environ.get("OUT", ".")) / "memory_of_models.jsonl"
    wrong = []
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool, out.open("w") as file:
        for found in pool.map(row_in_a_process, asked):
            file.write(json.dumps(found) + "\n")
            file.flush()
            print(line := summary(found), flush=True)
            if "failed" in found or abs(found.get("error") or 0.0) > WIDEST_ERROR:
                wrong.append(line)
    print(f"{len(wrong)} of {len(asked)} rows are off by more than {WIDEST_ERROR:.0%}, or failed:")
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
    return f"{name}: {', '.join(texts)}{error}"


if __name__ == "__main__":
    sys.exit(main())
