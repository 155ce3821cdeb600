"""Networks that imitate those of the transformers library without needing it: they use its names,
read lengths from inputs, pass arguments by keyword and repeat key heads by a count.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, KEY_HEADS, HEAD_WIDTH = 16, 4, 2, 4


class Config:
    def to_dict(self):
        return {
            "model_type": "qwen3",
            "hidden_size": WIDTH,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_HEADS,
            "head_dim": HEAD_WIDTH,
        }


class LibraryModel(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.config = Config()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(vocabulary, WIDTH)
        self.model.layers = nn.ModuleList(LibraryBlock() for _ in range(2))
        self.model.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, targets):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(hidden_states=x)
        return F.cross_entropy(self.lm_head(self.model.norm(x)).flatten(0, 1), targets.flatten())


class LibraryBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attn = LibraryAttention()
        self.post_attention_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = LibraryFeedForward()

    def forward(self, hidden_states):
        x = hidden_states
        x = x + self.self_attn(hidden_states=self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LibraryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_key_value_groups = HEADS // KEY_HEADS
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_WIDTH)
        self.k_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH)
        self.v_proj = nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH)
        self.o_proj = nn.Linear(HEADS * HEAD_WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_WIDTH), nn.LayerNorm(HEAD_WIDTH)

    def forward(self, hidden_states):
        shape = *hidden_states.shape[:-1], -1, HEAD_WIDTH
        q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        k, v = (x.repeat_interleave(self.num_key_value_groups, 1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(*shape[:-2], -1))


class LibraryFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24)
        self.down_proj = nn.Linear(24, WIDTH)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CountingAttention(nn.Module):
    """Reshapes its columns' outputs into num_heads heads, as OPT does. With a rank's part of the heads
    and the whole count, tokens would be mixed without a shape error.
    """

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            each(x).view(len(x), -1, self.num_heads, HEAD_WIDTH).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        return self.o(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1)
        )


class Conv1D(nn.Module):
    """A linear layer whose weight is (inputs, outputs), as in the library's GPT-2."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return y.view(*x.shape[:-1], self.nf)


class GPT2Config:
    def to_dict(self):
        return {"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS}


class GPT2Model(nn.Module):
    def __init__(self, vocabulary):
        super().__init__()
        self.config = GPT2Config()
        self.transformer = nn.Module()
        self.transformer.wte = nn.Embedding(vocabulary, WIDTH)
        self.transformer.wpe = nn.Embedding(8, WIDTH)
        self.transformer.h = nn.ModuleList(GPT2Block() for _ in range(2))
        self.transformer.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens, targets):
        parts = self.transformer
        x = parts.wte(tokens) + parts.wpe(torch.arange(tokens.shape[1]))
        for block in parts.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(parts.ln_f(x)).flatten(0, 1), targets.flatten())


class GPT2Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = GPT2Attention(), nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(24, WIDTH), Conv1D(WIDTH, 24)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class GPT2Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.split_size = WIDTH
        self.c_attn, self.c_proj = Conv1D(3 * WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, hidden_states):
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        heads = [x.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for x in (query, key, value)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(-2))


class OneKeyHead(nn.Module):
    """Attention with GPT-2's layers and one key head that all query heads read."""

    def __init__(self):
        super().__init__()
        self.fused, self.out = Conv1D(WIDTH + 2 * HEAD_WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)

    def forward(self, x):
        fused = self.fused(x)
        query, key, value = (
            each.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2)
            for each in fused.split([fused.shape[-1] - 2 * HEAD_WIDTH, HEAD_WIDTH, HEAD_WIDTH], -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class AdaptedLinear(nn.Module):
    """A frozen layer with two low-rank layers, like peft's LoRA."""

    __module__, __qualname__ = "peft.tuners.lora.layer", "Linear"

    def __init__(self, base_layer, inputs, outputs):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs)})

    def forward(self, x):
        return self.base_layer(x) + 0.5 * self.lora_B["default"](self.lora_A["default"](x))


def adapt(blocks):
    """Adds LoRA to every linear layer of the blocks and freezes everything else."""
    for name, layer in list(blocks.requires_grad_(False).named_modules()):
        if isinstance(layer, nn.Linear):
            sizes = layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            sizes = tuple(layer.weight.shape)
        else:
            continue
        blocks.set_submodule(name, AdaptedLinear(layer, *sizes))
