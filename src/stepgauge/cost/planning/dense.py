"""Finds the network with formulas that is nearest to one without.

Its layouts are screened by formula; the best are traced with the original network.
"""

import dataclasses

from stepgauge.cost.memory.parts import Memory
from stepgauge.cost.operations.supported import ATTENTIONS, CALIBRATED
from stepgauge.cost.operations.supported import NORMS as CALIBRATED_NORMS
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.planning import PlanSpec

OF_PARAMETERS = ("parameters", "gradients", "optimizer state")


def nearest_with_formulas(spec: PlanSpec) -> PlanSpec:
    """Returns the plan for a dense network with as much computation per token.

    The experts of a token become one feed-forward layer. Attention is causal without a window, and the
    norm and optimizer are calibrated ones.
    """
    model = spec.network
    norms = [n for n in (model.norm, NORMS[model.norm].function) if n in CALIBRATED_NORMS]
    dense = dataclasses.replace(
        model,
        d_ff=model.d_ff * max(1, model.experts_per_token),
        num_experts=0,
        experts_per_token=0,
        window=0,
        full_attention_every=0,
        mask="causal",
        attention=model.attention if model.attention in ATTENTIONS else "sdpa",
        norm=next(iter(norms), CALIBRATED_NORMS[0]),
    )
    optimizer = spec.optimizer if spec.optimizer in CALIBRATED else CALIBRATED[0]
    return dataclasses.replace(spec, model=dense, optimizer=optimizer)


def needed_bytes(memory: Memory, *, times: float) -> float:
    """Returns the bytes that a device needs if the network has `times` as many parameters."""
    held = sum(item.bytes for item in memory.items if item.name in OF_PARAMETERS)
    return memory.device_bytes + (times - 1) * held
