"""BERT: its published parameter count, and a comparison with the transformers library."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stepgauge.models.bert import NOT_MASKED, BertForMaskedLM
from stepgauge.spec.bert import BERT_SIZES, BertSpec
from stepgauge.train.data import masked_batch

SMALL = {"vocab_size": 50, "num_positions": 12, "context_length": 12}


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_base_has_the_published_number_of_parameters():
    assert BertSpec.preset("bert-base").num_parameters == 109_514_298


@pytest.mark.parametrize("size", BERT_SIZES)
def test_the_formula_counts_the_parameters_of_the_module(size):
    spec = BertSpec.preset(size)
    assert spec.num_parameters == count(BertForMaskedLM(spec, device=torch.device("meta")))


def test_flops_equal_those_of_the_flop_counter():
    spec = BertSpec.preset("bert-tiny", **SMALL)
    tokens, targets, types = masked_batch(spec.vocab_size, 2, spec.context_length, seed=1)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        BertForMaskedLM(spec)(tokens, targets, types).backward()
    assert counter.get_total_flops() == spec.step_flops(batch=2, sequence=spec.context_length)


def of_transformers(theirs, value=torch.Tensor.detach):
    """Returns value(parameter) of a transformers BertForMaskedLM, by the names of this package."""
    given, ours = (
        {name: value(p) for name, p in theirs.named_parameters(remove_duplicate=False)},
        {},
    )
    renamed = {
        "tokens": "bert.embeddings.word_embeddings",
        "positions": "bert.embeddings.position_embeddings",
        "types": "bert.embeddings.token_type_embeddings",
        "norm": "bert.embeddings.LayerNorm",
        "transform": "cls.predictions.transform.dense",
        "transform_norm": "cls.predictions.transform.LayerNorm",
        "head": "cls.predictions.decoder",
    }
    for index in range(theirs.config.num_hidden_layers):
        layer = f"bert.encoder.layer.{index}"
        renamed |= {
            f"blocks.{index}.attention.output": f"{layer}.attention.output.dense",
            f"blocks.{index}.attention_norm": f"{layer}.attention.output.LayerNorm",
            f"blocks.{index}.feed_forward.up": f"{layer}.intermediate.dense",
            f"blocks.{index}.feed_forward.down": f"{layer}.output.dense",
            f"blocks.{index}.feed_forward_norm": f"{layer}.output.LayerNorm",
        }
        for part in ("weight", "bias"):
            projections = [
                given[f"{layer}.attention.self.{name}.{part}"] for name in ("query", "key", "value")
            ]
            ours[f"blocks.{index}.attention.input.{part}"] = torch.cat(projections)
    for name, their_name in renamed.items():
        ours |= {
            f"{name}.{p}": given[f"{their_name}.{p}"]
            for p in ("weight", "bias")
            if f"{their_name}.{p}" in given
        }
    return ours


def test_logits_loss_and_gradients_equal_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    spec = BertSpec.preset("bert-tiny", **SMALL)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.d_model,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        intermediate_size=spec.d_ff,
        max_position_embeddings=spec.num_positions,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=None,
    )
    theirs = transformers.BertForMaskedLM(config).double()
    # Biases are initially zero and gains one, which would hide swapped parameters.
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = BertForMaskedLM(spec).double()
    ours.load_state_dict(of_transformers(theirs))
    tokens, targets, types = masked_batch(spec.vocab_size, 3, spec.context_length, seed=1)
    expected = theirs(input_ids=tokens, token_type_ids=types, labels=targets)
    torch.testing.assert_close(ours(tokens, None, types), expected.logits)
    loss = ours(tokens, targets, types)
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    gradients = of_transformers(theirs, lambda parameter: parameter.grad)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name])
    assert count(theirs) == spec.num_parameters


def test_every_token_sees_the_whole_sequence():
    spec = BertSpec.preset("bert-tiny", **SMALL)
    torch.manual_seed(0)
    model = BertForMaskedLM(spec)
    tokens, _, types = masked_batch(spec.vocab_size, 1, spec.context_length, seed=1)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % spec.vocab_size
    assert (model(tokens, None, types)[0, 0] != model(changed, None, types)[0, 0]).any()


def test_a_masked_batch_has_targets_at_the_chosen_tokens():
    tokens, targets, types = masked_batch(30_522, 64, 128, seed=3)
    chosen = targets != NOT_MASKED
    assert 0.14 < chosen.float().mean() < 0.16
    assert 0.75 < (tokens[chosen] == 103).float().mean() < 0.85
    assert 0.08 < (tokens[chosen] == targets[chosen]).float().mean() < 0.12
    assert set(types.unique().tolist()) == {0, 1}
    again = masked_batch(30_522, 64, 128, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(again, (tokens, targets, types), strict=True))


def test_sequences_longer_than_the_positions_and_unknown_sizes_are_refused():
    with pytest.raises(
        ValueError, match="context_length is 600; it must be at most num_positions, 512"
    ):
        BertSpec.preset("bert-base", context_length=600)
    with pytest.raises(ValueError, match="size is 'bert'; choose one of bert-tiny"):
        BertSpec.preset("bert")
