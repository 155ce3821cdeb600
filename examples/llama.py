"""A HuggingFace model as it is, as --model examples/llama.py:llama takes it. Needs transformers."""

import torch
from torch import nn


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module and a batch by names: its output has the loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    tokens_BT = torch.randint(4096, (4, 128))
    return LlamaForCausalLM(config), {"input_ids": tokens_BT, "labels": tokens_BT}
