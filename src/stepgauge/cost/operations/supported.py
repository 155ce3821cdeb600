"""Which steps have terms for all that they do."""

from stepgauge.cost.operations.terms import PRECISION
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

# Fields of a ModelSpec beside its shape that the terms know, or that cost nothing.
PRICED = (
    "feed_forward norm norm_epsilon positions rope_base rope_fraction rope_scaling tied_head "
    "attention loss gate num_kv_heads head_dim qk_norm attention_bias feed_forward_bias block "
    "scaled_embedding"
)
NORMS = ("rmsnorm", "layernorm", "triton")
CALIBRATED = ("adamw", "fused")  # optimizers
ATTENTIONS = ("sdpa", "triton", "sdpa-flash", "sdpa-cudnn")  # where a hardware file has them
COMPILED = ("off", "on", "blocks", "reduce-overhead")
# How often backward runs a block's forward again, or of it what was not kept.
RECOMPUTED = {"none": 0, "blocks": 1, "selective": 1, "feed-forward": 1, "nested": 2}


def require_predicted(*, compile: str, precision: str) -> None:
    """Raises ValueError for a way to compute that is not predicted, of whatever network."""
    if compile not in COMPILED:
        raise ValueError(f"compile is {compile!r}; predicted are {', '.join(COMPILED)}")
    if precision not in PRECISION:
        raise ValueError(f"precision is {precision!r}; its cost is not calibrated")


def require_priced(spec: WorkSpec) -> ModelSpec:
    """The network. Raises ValueError for a step that has parts whose cost is not modelled."""
    model = spec.model
    require_predicted(compile=spec.compile, precision=spec.precision)
    if spec.checkpointing not in RECOMPUTED:
        raise ValueError(f"checkpointing is {spec.checkpointing!r}; its time is not predicted yet")
    if not isinstance(model, ModelSpec):
        raise ValueError("a user's own model has no cost model yet; only presets are predicted")
    model.require_defaults(PRICED, "has no cost model yet")
    if model.norm not in NORMS:
        raise ValueError(f"norm is {model.norm!r}; its cost is not calibrated")
    if model.attention not in ATTENTIONS:
        raise ValueError(f"attention is {model.attention!r}; its cost is not calibrated")
    return model
