"""Networks in plain torch for validation. Every command with --model takes these factories:

    stepgauge bench step --model benchmarks/networks.py:resnet50

A factory returns the module, its batch and the loss, or a module that computes the loss itself.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factory = tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]


class Bottleneck(nn.Module):
    """Three convolutions with a shortcut around them (He et al. 2016)."""

    def __init__(self, wide_in: int, narrow: int, stride: int):
        super().__init__()
        wide = 4 * narrow
        self.body = nn.Sequential(
            *_convolution(wide_in, narrow, 1), nn.ReLU(inplace=True),
            *_convolution(narrow, narrow, 3, stride), nn.ReLU(inplace=True),
            *_convolution(narrow, wide, 1),
        )  # fmt: skip
        same = stride == 1 and wide_in == wide
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(wide_in, wide, 1, stride))
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.body(x_BCHW) + self.shortcut(x_BCHW))


def _convolution(wide_in: int, wide: int, size: int, stride: int = 1) -> Sequence[nn.Module]:
    convolution = nn.Conv2d(wide_in, wide, size, stride, size // 2, bias=False)
    return convolution, nn.BatchNorm2d(wide)


def resnet50() -> Factory:
    """ResNet-50: 25.6 M parameters, 64 images of 224 x 224."""
    layers: list[nn.Module] = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    wide = 64
    for narrow, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(wide, narrow, stride if block == 0 else 1))
            wide = 4 * narrow
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(wide, 1000)]
    return nn.Sequential(*layers, *head), _images(64, 224), nn.CrossEntropyLoss()


def resnet50_channels_last() -> Factory:
    """ResNet-50 in the memory format channels_last."""
    network, (images, classes), loss = resnet50()
    last = torch.channels_last
    return network.to(memory_format=last), (images.to(memory_format=last), classes), loss


def _images(batch: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(1000, (batch,))


class VisionTransformer(nn.Module):
    """ViT-B/16 (Dosovitskiy et al. 2021) built from torch's layers."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 14 * 14 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.encoder = nn.TransformerEncoder(
            layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BTD = self.patches(x_BCHW).flatten(2).mT
        x_BTD = torch.cat((self.token.expand(len(x_BTD), -1, -1), x_BTD), dim=1)
        return self.head(self.encoder(x_BTD + self.positions)[:, 0])


def vit_b16() -> Factory:
    """ViT-B/16: 86 M parameters, 64 images of 224 x 224."""
    return VisionTransformer(), _images(64, 224), nn.CrossEntropyLoss()


class Translator(nn.Module):
    """torch's nn.Transformer: encoder and decoder, with dropout."""

    def __init__(self, vocabulary: int = 32_000, width: int = 512):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.transformer = nn.Transformer(width, 8, 6, 6, 4 * width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, source_BS: Tensor, target_BT: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(
            target_BT.shape[1], device=target_BT.device
        )
        hidden_BTD = self.transformer(
            self.embedding(source_BS), self.embedding(target_BT), tgt_mask=mask, tgt_is_causal=True
        )
        logits_BTV = self.head(hidden_BTD)
        return F.cross_entropy(logits_BTV.flatten(0, 1), target_BT.flatten())


def translator() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A translator: 77 M parameters, 32 pairs of 256 tokens."""
    source, target = (torch.randint(32_000, (32, 256)) for _ in range(2))
    return Translator(), (source, target)


class RelativeAttention(nn.Module):
    """T5's attention without a fused kernel. A bias depends on the distance (Raffel et al. 2020)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        self.qkv, self.out = (nn.Linear(width, n * width, bias=False) for n in (3, 1))

    def forward(self, x_BTD: Tensor, bias_HTT: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm(x_BTD)).chunk(3, dim=-1)
        )
        scores = q @ k.mT + bias_HTT
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = F.dropout(weights, 0.1, self.training)
        return x_BTD + self.out((weights @ v).transpose(1, 2).flatten(2))


class RelativeEncoder(nn.Module):
    """The encoder of T5."""

    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12):
        super().__init__()
        self.embedding = nn.Embedding(32_128, width)
        self.bias = nn.Embedding(32, heads)
        self.attentions = nn.ModuleList(RelativeAttention(width, heads) for _ in range(layers))
        self.feed_forwards = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(width), nn.Linear(width, 4 * width, bias=False), nn.ReLU(),
                nn.Dropout(0.1), nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(width, 32_128, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        distances = (places[None] - places[:, None]).abs().clamp(max=31)
        bias_HTT = self.bias(distances).permute(2, 0, 1)
        x_BTD = self.embedding(tokens_BT)
        for attention, feed_forward in zip(self.attentions, self.feed_forwards, strict=True):
            x_BTD = attention(x_BTD, bias_HTT)
            x_BTD = x_BTD + feed_forward(x_BTD)
        return self.head(x_BTD).flatten(0, 1)


def relative_encoder() -> Factory:
    """The encoder of T5-base: 16 sequences of 512 tokens."""
    tokens = torch.randint(32_128, (16, 512))
    return RelativeEncoder(), (tokens, tokens.flatten()), nn.CrossEntropyLoss()


class Residual(nn.Module):
    """Two convolutions with group norms, as in diffusion models (Ho et al. 2020)."""

    def __init__(self, wide_in: int, wide: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(32, wide_in), nn.GroupNorm(32, wide)])
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(wide_in, wide, 3, padding=1), nn.Conv2d(wide, wide, 3, padding=1)]
        )
        self.shortcut = nn.Identity() if wide_in == wide else nn.Conv2d(wide_in, wide, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            hidden = convolution(F.silu(norm(hidden)))
        return hidden + self.shortcut(x)


class UNet(nn.Module):
    """A U-Net: strided convolutions down, nearest-neighbour upsampling up, skip connections."""

    def __init__(self, widths: Sequence[int] = (128, 256, 512)):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(zip(widths, (*widths[1:], widths[-1]), strict=True))
        self.down = nn.ModuleList(Residual(a, b) for a, b in pairs)
        self.downsample = nn.ModuleList(nn.Conv2d(b, b, 3, 2, 1) for _, b in pairs)
        self.middle = Residual(widths[-1], widths[-1])
        self.up = nn.ModuleList(Residual(2 * b, a) for a, b in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for residual, downsample in zip(self.down, self.downsample, strict=True):
            x = residual(x)
            kept.append(x)
            x = downsample(x)
        x = self.middle(x)
        for residual in self.up:
            x = torch.cat((F.interpolate(x, scale_factor=2.0), kept.pop()), dim=1)
            x = residual(x)
        return self.head(x)


def unet() -> Factory:
    """A U-Net: 32 images of 64 x 64."""
    images = torch.randn(32, 3, 64, 64)
    return UNet(), (images, torch.randn_like(images)), nn.MSELoss()


class Tagger(nn.Module):
    """Two LSTM layers that label each token."""

    def __init__(self, width: int = 1024):
        super().__init__()
        self.embedding = nn.Embedding(20_000, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 50)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens_BT))[0]).flatten(0, 1)


def tagger() -> Factory:
    """An LSTM: 64 sequences of 128 tokens."""
    tokens, tags = torch.randint(20_000, (64, 128)), torch.randint(50, (64 * 128,))
    return Tagger(), (tokens, tags), nn.CrossEntropyLoss()


class Recommender(nn.Module):
    """DLRM: embedding bags and dense layers (Naumov et al. 2019)."""

    def __init__(self, tables: int = 26, rows: int = 200_000, width: int = 64):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        pairs = math.comb(tables + 1, 2)
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(),
            nn.Linear(512, 1),
        )  # fmt: skip

    def forward(self, dense_BF: Tensor, places_BSI: Tensor) -> Tensor:
        x_BD = self.bottom(dense_BF)
        bags = [table(places_BSI[:, n]) for n, table in enumerate(self.tables)]
        all_BND = torch.stack([x_BD, *bags], dim=1)
        products_BNN = all_BND @ all_BND.mT
        n, m = torch.triu_indices(*products_BNN.shape[1:], offset=1, device=x_BD.device)
        return self.top(torch.cat((x_BD, products_BNN[:, n, m]), dim=1)).square().mean()


def recommender() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """DLRM: 26 tables of 200,000 rows, batch 8192, ten rows per table and sample."""
    return Recommender(), (torch.randn(8192, 13), torch.randint(200_000, (8192, 26, 10)))


class ConvNextBlock(nn.Module):
    """A depthwise convolution, a layer norm and two dense layers over channels (Liu et al. 2022)."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        hidden_BHWC = self.norm(self.depthwise(x_BCHW).permute(0, 2, 3, 1))
        hidden_BHWC = self.scale * self.down(F.gelu(self.up(hidden_BHWC)))
        return x_BCHW + hidden_BHWC.permute(0, 3, 1, 2)


class Downsample(nn.Module):
    """A strided convolution: fewer pixels, more channels."""

    def __init__(self, narrow: int, wide: int, step: int):
        super().__init__()
        self.convolution = nn.Conv2d(narrow, wide, step, step)
        self.norm = nn.LayerNorm(wide, eps=1e-6)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.norm(self.convolution(x_BCHW).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext() -> Factory:
    """ConvNeXt-T, 28 M parameters, 32 images of 224 x 224."""
    layers: list[nn.Module] = []
    narrow = 3
    for wide, blocks, step in ((96, 3, 4), (192, 3, 2), (384, 9, 2), (768, 3, 2)):
        layers += [Downsample(narrow, wide, step), *(ConvNextBlock(wide) for _ in range(blocks))]
        narrow = wide
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(narrow), nn.Linear(narrow, 1000)]
    return nn.Sequential(*layers, *head), _images(32, 224), nn.CrossEntropyLoss()


class MixerBlock(nn.Module):
    """Dense layers over patches, then over channels (MLP-Mixer, Tolstikhin et al. 2021)."""

    def __init__(self, patches: int, width: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches, self.over_channels = (
            nn.Sequential(nn.Linear(size, hidden), nn.GELU(), nn.Linear(hidden, size))
            for size, hidden in ((patches, width // 2), (width, 4 * width))
        )

    def forward(self, x_BPC: Tensor) -> Tensor:
        x_BPC = x_BPC + self.over_patches(self.norms[0](x_BPC).mT).mT
        return x_BPC + self.over_channels(self.norms[1](x_BPC))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    def __init__(self, width: int = 768, layers: int = 12):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(MixerBlock(196, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BPC = self.blocks(self.patches(x_BCHW).flatten(2).mT)
        return self.head(self.norm(x_BPC).mean(1))


def mixer() -> Factory:
    """Mixer-B/16: 60 M parameters, 96 images of 224 x 224."""
    return Mixer(), _images(96, 224), nn.CrossEntropyLoss()


class GptBlock(nn.Module):
    """GPT-2 without fused kernels: dropout, scores and mask are separate operations."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(0.1)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x_BTD)).split(x_BTD.shape[-1], dim=-1)
        )
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        scores = torch.where(self.seen, scores, torch.finfo(scores.dtype).min)
        weights = self.drop(scores.softmax(dim=-1).to(v.dtype))
        x_BTD = x_BTD + self.drop(self.out((weights @ v).transpose(1, 2).flatten(2)))
        hidden = F.gelu(self.up(self.norms[1](x_BTD)), approximate="tanh")
        return x_BTD + self.drop(self.down(hidden))


class Gpt(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12, layers: int = 12, length: int = 1024):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50_257, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GptBlock(width, heads, length) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 50_257, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(places)
        return self.head(self.norm(self.blocks(x_BTD))).flatten(0, 1)


def gpt() -> Factory:
    """GPT-2 small: 124 M parameters, 8 sequences of 1024 tokens."""
    tokens = torch.randint(50_257, (8, 1024))
    return Gpt(), (tokens, tokens.flatten()), nn.CrossEntropyLoss()
