"""A network as a list of parts that any stage of a pipeline can be made of, each built alone.

A block is two parts, attention and feed-forward, since stages of whole blocks are rarely of equal
weight. Weights are drawn from the seed and the part's number: a stage has the same ones wherever it
is.

Legend: B batch, T sequence, D model width, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepgauge.models import bert, transformer
from stepgauge.models.parts import NORMS
from stepgauge.spec.bert import NUM_TYPES, BertSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.pipeline import PipelineSpec
from stepgauge.spec.plan.stages import PartTimes
from stepgauge.train.build import batch_for
from stepgauge.train.part_times import Context, agreed, forward_and_backward

Make = Callable[[torch.device], nn.Module]
# Fields of a ModelSpec that parts are built by; others have their defaults.
BUILT = "feed_forward norm positions rope_base rope_scaling tied_head attention loss"


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of a network: the block that it is of, and what builds it."""

    block: int
    make: Make


class Residual(nn.Module):
    """x + inner(norm(x)), or norm(x + inner(x)) where the norm comes after the sum."""

    def __init__(self, inner: nn.Module, norm: nn.Module, *, norm_first: bool):
        super().__init__()
        self.inner, self.norm, self.norm_first = inner, norm, norm_first

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.norm_first:
            return x_BTD + self.inner(self.norm(x_BTD))
        return self.norm(x_BTD + self.inner(x_BTD))


class RotaryAttention(nn.Module):
    """The Transformer's attention with the rotation that the whole network would hand it."""

    def __init__(self, spec: ModelSpec, device: torch.device):
        super().__init__()
        self.attention = transformer.Attention(spec, 0, device)
        cos_TW, sin_TW = transformer.rotary_tables(spec, device)
        self.cos_TW: Tensor
        self.sin_TW: Tensor
        self.register_buffer("cos_TW", cos_TW, persistent=False)
        self.register_buffer("sin_TW", sin_TW, persistent=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        dtype, length = transformer.compute_dtype(x_BTD), x_BTD.shape[1]
        rotation = (self.cos_TW[:length].to(dtype), self.sin_TW[:length].to(dtype))
        return self.attention(x_BTD, rotation)


class Embeddings(nn.Module):
    """The sum of token, position and type embeddings, those that there are, then a norm."""

    def __init__(self, sizes: list[int], width: int, norm: nn.Module | None, device: torch.device):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width, device=device) for size in sizes)
        self.norm = norm

    def forward(self, tokens_BT: Tensor) -> Tensor:
        tokens, *others = self.tables
        positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = tokens(tokens_BT)
        for table, rows in zip(others, (positions, torch.zeros_like(positions)), strict=False):
            x_BTD = x_BTD + table(rows)
        return self.norm(x_BTD) if self.norm else x_BTD


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Over the targets that count: BERT's are those of masked tokens."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=bert.NOT_MASKED
    )


def counted(targets_BT: Tensor) -> Tensor:
    """Of each sequence."""
    return (targets_BT != bert.NOT_MASKED).sum(1)


def parts(model: ModelSpec | BertSpec) -> list[Part]:
    """Embeddings, two parts a block, and the head."""
    if isinstance(model, ModelSpec):
        model.require_defaults(BUILT, "cannot be cut into the parts of a pipeline yet")
    makers = _bert(model) if isinstance(model, BertSpec) else _transformer(model)
    blocks = [
        Part(number, makers[half])
        for number in range(model.num_layers)
        for half in ("attention", "feed_forward")
    ]
    return [Part(-1, makers["first"]), *blocks, Part(-2, makers["last"])]


def _transformer(spec: ModelSpec) -> dict[str, Make]:
    norm = functools.partial(NORMS[spec.norm], spec.d_model)
    positions = [spec.context_length] if spec.positions == "learned" else []

    def attention(device: torch.device) -> nn.Module:
        if spec.positions == "rope":
            inner: nn.Module = RotaryAttention(spec, device)
        else:
            inner = _WithoutRotation(transformer.Attention(spec, 0, device))
        return Residual(inner, norm(device=device), norm_first=True)

    def feed_forward(device: torch.device) -> nn.Module:
        inner = transformer.build_feed_forward(spec, device)
        return Residual(inner, norm(device=device), norm_first=True)

    def last(device: torch.device) -> nn.Module:
        head = nn.Linear(spec.d_model, spec.vocab_size, bias=False, device=device)
        return nn.Sequential(norm(device=device), head)

    sizes = [spec.vocab_size, *positions]
    first = functools.partial(Embeddings, sizes, spec.d_model, None)
    return {"first": first, "attention": attention, "feed_forward": feed_forward, "last": last}


class _WithoutRotation(nn.Module):
    def __init__(self, attention: nn.Module):
        super().__init__()
        self.attention = attention

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.attention(x_BTD, None)


def _bert(spec: BertSpec) -> dict[str, Make]:
    def norm(device: torch.device) -> nn.Module:
        return nn.LayerNorm(spec.d_model, eps=bert.NORM_EPSILON, device=device)

    def residual(make: Callable[..., nn.Module], device: torch.device) -> nn.Module:
        return Residual(make(spec, device), norm(device), norm_first=False)

    def first(device: torch.device) -> nn.Module:
        sizes = [spec.vocab_size, spec.num_positions, NUM_TYPES]
        return Embeddings(sizes, spec.d_model, norm(device), device)

    def last(device: torch.device) -> nn.Module:
        transform = nn.Linear(spec.d_model, spec.d_model, device=device)
        head = nn.Linear(spec.d_model, spec.vocab_size, device=device)
        return nn.Sequential(transform, nn.GELU(), norm(device), head)

    return {
        "first": first,
        "attention": functools.partial(residual, bert.Attention),
        "feed_forward": functools.partial(residual, bert.FeedForward),
        "last": last,
    }


def _heavier(spec: PipelineSpec) -> ModelSpec | BertSpec:
    layers = spec.model.num_layers + spec.overweight
    return dataclasses.replace(spec.model, num_layers=layers)


def part_times(
    spec: PipelineSpec, *, device: torch.device, dtype: torch.dtype, context: Context
) -> PartTimes:
    """Of the embeddings, of the halves of a block, and of the head. The same on all ranks, which
    must all call it.
    """
    batch = spec.batch // spec.micro_batches
    inputs, targets, *_ = (part.to(device) for part in batch_for(spec.model, batch, spec.seed))
    first, attention, feed_forward, *_, head = parts(spec.model)
    found = []
    for part in (first, attention, feed_forward):
        module = part.make(device).to(dtype)
        if spec.compile == "blocks" and part.block >= 0:
            module.compile()
        output, ms = forward_and_backward(module, (inputs,), device=device, context=context)
        inputs = output.detach().requires_grad_()
        found.append(ms)
    last = head.make(device).to(dtype)
    _, ms = forward_and_backward(
        lambda x_BTD: mean_loss(last(x_BTD), targets), (inputs,), device=device, context=context
    )
    return agreed(PartTimes(found[0], (found[1], found[2]), ms))


def build_stage(
    spec: PipelineSpec, numbers: range, device: torch.device, dtype: torch.dtype
) -> nn.Module:
    """A stage that has these parts of the network, and nothing else of it. The two halves of a
    block are compiled together where the stage has both.
    """
    found = parts(_heavier(spec))
    groups: list[list[nn.Module]] = []
    before = None
    for number in numbers:
        torch.manual_seed(spec.seed + number)
        made = found[number].make(device)
        _draw(made)
        if before is not None and found[number].block == before:
            groups[-1].append(made)
        else:
            groups.append([made])
        before = found[number].block
    modules = [nn.Sequential(*group) for group in groups]
    if spec.compile == "blocks":
        for module, number in zip(modules, _firsts(found, numbers), strict=True):
            if found[number].block >= 0:
                module.compile()
    return nn.Sequential(*modules).to(dtype)


def _firsts(found: list[Part], numbers: range) -> list[int]:
    """The first part of each group of parts of one block."""
    return [n for n in numbers if n == numbers[0] or found[n].block != found[n - 1].block]


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, as the whole networks have them; biases zero."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.02)
        elif name.endswith("bias"):
            parameter.zero_()
