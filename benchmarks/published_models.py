"""Networks whose peak memory others published: layers, shapes and the training loop around them.

`memory_published.py` predicts their peaks. Shapes: B batch, T tokens, D width, H heads.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ModelAndBatch = tuple[nn.Module, tuple[Tensor, ...]]


class Encoder(nn.Module):
    """torchvision's EncoderBlock without its dropout, whose rate is 0."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.first(x_BTD)
        x_BTD = x_BTD + self.attention(y_BTD, y_BTD, y_BTD, need_weights=False)[0]
        return x_BTD + self.mlp(self.second(x_BTD))


class ViT(nn.Module):
    """torchvision's vit_l_16 with the loss."""

    def __init__(self, width: int = 1024, heads: int = 16, layers: int = 24):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.Sequential(*(Encoder(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 10)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x_BTD = self.patches(pixels).flatten(2).transpose(1, 2)
        x_BTD = torch.cat([self.token.expand(len(pixels), -1, -1), x_BTD], dim=1) + self.positions
        x_BD = self.norm(self.blocks(x_BTD))[:, 0]
        return F.cross_entropy(self.head(x_BD), labels)


class ClearedAfterForward(ViT):
    """Frees the gradients of the previous step after the forward pass, as the first scripts do."""

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(pixels, labels)
        for parameter in self.parameters():
            parameter.grad = None
        return loss


class Accumulated(ViT):
    """Accumulates gradients of four batches. Forward also runs backward of the first three."""

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            for _ in range(3):
                super().forward(pixels, labels).backward()
        return super().forward(pixels, labels)


class AdamOfJune2023(torch.optim.Optimizer):
    """torch's Adam of June 2023 for all parameters at once. Its peak was higher (pytorch issue
    97712): the square root and the denominator are in memory at the same time.
    """

    def __init__(self, parameters: Any):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        for p in parameters:
            if not self.state[p]:
                self.state[p] = {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
        means, squares = ([self.state[p][name] for p in parameters] for name in ("mean", "square"))
        torch._foreach_mul_(means, 0.9)
        torch._foreach_add_(means, gradients, alpha=0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.001)
        roots = torch._foreach_sqrt(squares)
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(parameters, means, denominators, -5e-5)


class AdamWithoutZeroGrad(AdamOfJune2023):
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: ClearedAfterForward clears the gradients."""


def _vit(batch: int, network: type[ViT], optimizer: Any) -> dict[str, Any]:
    pixels, labels = torch.ones(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)
    return {"module": network(), "batch": (pixels, labels), "optimizer": optimizer}


vit_64, vit_16 = (
    functools.partial(_vit, batch, ClearedAfterForward, AdamWithoutZeroGrad) for batch in (64, 16)
)
vit_4 = functools.partial(_vit, 4, Accumulated, AdamOfJune2023)
vit_4_sgd = functools.partial(
    _vit, 4, Accumulated, functools.partial(torch.optim.SGD, foreach=True)
)


class DeitBlock(nn.Module):
    """The block of models_v2.py of facebookresearch/deit, with layer scale and stored scores."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale_1, self.scale_2 = (
            nn.Parameter(torch.ones(width)),
            nn.Parameter(torch.ones(width)),
        )

    def attention(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD, v_BHTD = parts.unbind(0)
        q_BHTD = q_BHTD * q_BHTD.shape[-1] ** -0.5
        scores_BHTT = q_BHTD @ k_BHTD.transpose(-2, -1)
        scores_BHTT = scores_BHTT.softmax(dim=-1)
        x_BTD = (scores_BHTT @ v_BHTD).transpose(1, 2).flatten(2)
        return self.out(x_BTD)

    def mlp(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.up(x_BTD)
        x_BTD = F.gelu(x_BTD)
        return self.down(x_BTD)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.scale_1 * self.attention(self.first(x_BTD))
        return x_BTD + self.scale_2 * self.mlp(self.second(x_BTD))


class Deit(nn.Module):
    """DeiT III (facebookresearch/deit) for inference."""

    def __init__(self, width: int, heads: int, layers: int, pixels: int, patch: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (pixels // patch) ** 2, width))
        self.blocks = nn.ModuleList(DeitBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        x_BTD = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        x_BTD = torch.cat([self.token.expand(len(x_BTD), -1, -1), x_BTD], dim=1)
        for block in self.blocks:  # no variable keeps the result of an earlier block
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD)[:, 0])


def _deit(width: int, heads: int, layers: int, pixels: int, patch: int = 16) -> ModelAndBatch:
    return Deit(width, heads, layers, pixels, patch), (torch.ones(256, 3, pixels, pixels),)


deit_s_224, deit_b_224, deit_l_224, deit_s_384, deit_b_384, deit_l_384 = (
    functools.partial(_deit, *shape, pixels)
    for pixels in (224, 384)
    for shape in ((384, 6, 12), (768, 12, 12), (1024, 16, 24))
)
deit_h_224 = functools.partial(_deit, 1280, 16, 32, 224, 14)


class SoftmaxSavingItsInput(torch.autograd.Function):
    """Softmax of torch before 1.11. It saved its input, because backward needs the input's type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(dim=-1, dtype=torch.float32)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return torch._softmax_backward_data(grad, y, -1, x.dtype)


class BertBlock(nn.Module):
    """A layer of BERT-large as in transformers 4.15."""

    def __init__(self, width: int = 1024):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def attention(self, x_BTD: Tensor, mask: Tensor) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            part(x_BTD).unflatten(-1, (16, -1)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        scores_BHTT = q_BHTD @ k_BHTD.transpose(-1, -2)
        scores_BHTT = scores_BHTT / 8
        scores_BHTT = scores_BHTT + mask
        weights_BHTT = F.dropout(SoftmaxSavingItsInput.apply(scores_BHTT), 0.1)
        return (weights_BHTT @ v_BHTD).transpose(1, 2).flatten(2)

    def forward(self, x_BTD: Tensor, mask: Tensor) -> Tensor:
        x_BTD = self.first(F.dropout(self.out(self.attention(x_BTD, mask)), 0.1) + x_BTD)
        return self.second(F.dropout(self.down(F.gelu(self.up(x_BTD))), 0.1) + x_BTD)


class Bert(nn.Module):
    """bert-large-uncased with a head for two classes and the loss."""

    def __init__(self, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.words, self.positions = nn.Embedding(30522, 1024), nn.Embedding(512, 1024)
        self.types, self.norm = nn.Embedding(2, 1024), nn.LayerNorm(1024)
        self.blocks = nn.ModuleList(BertBlock() for _ in range(24))
        self.pool, self.head = nn.Linear(1024, 1024), nn.Linear(1024, 2)

    def forward(self, tokens_BT: Tensor, labels: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.words(tokens_BT) + self.types(torch.zeros_like(tokens_BT))
        x_BTD = F.dropout(self.norm(x_BTD + self.positions(places)), 0.1)
        mask = torch.zeros(len(tokens_BT), 1, 1, tokens_BT.shape[1], device=x_BTD.device)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                x_BTD = checkpoint(block, x_BTD, mask, use_reentrant=True)
            else:
                x_BTD = block(x_BTD, mask)
        pooled = F.dropout(torch.tanh(self.pool(x_BTD[:, 0])), 0.1)
        return F.cross_entropy(self.head(pooled), labels)


class AdamWWithZeroedGradients(torch.optim.AdamW):
    """Sets gradients to zero and keeps their memory, which was the default before torch 2.0."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none=False)


def _bert(batch: int, *, checkpointing: bool = False) -> dict[str, Any]:
    tokens, labels = torch.ones(batch, 512, dtype=torch.long), torch.zeros(batch, dtype=torch.long)
    return {
        "module": Bert(checkpointing),
        "batch": (tokens, labels),
        "optimizer": functools.partial(AdamWWithZeroedGradients, foreach=False),
    }


bert_4, bert_1 = functools.partial(_bert, 4), functools.partial(_bert, 1)
bert_1_checkpointed = functools.partial(_bert, 1, checkpointing=True)
