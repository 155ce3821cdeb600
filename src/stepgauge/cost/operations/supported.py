"""Which steps the formulas cover completely."""

from stepgauge.cost.operations.terms import PRECISION
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import WorkSpec

# Fields of a ModelSpec, besides its sizes, that the terms take into account or that cost nothing.
PRICED = (
    "feed_forward norm norm_epsilon positions rope_base rope_fraction rope_scaling tied_head "
    "attention loss gate num_kv_heads head_dim qk_norm attention_bias feed_forward_bias block "
    "scaled_embedding"
)
WINDOW = "window full_attention_every"
NORMS = ("rmsnorm", "layernorm", "triton")
CALIBRATED = ("adamw", "fused")  # optimizers
ATTENTIONS = ("sdpa", "triton", "sdpa-flash", "sdpa-cudnn")  # if the hardware file has them
COMPILED = ("off", "on", "blocks", "reduce-overhead")
# How often backward recomputes a block's forward, or the part of it that was not kept.
RECOMPUTED = {"none": 0, "blocks": 1, "selective": 1, "feed-forward": 1, "nested": 2}


def require_predicted(*, compile: str, precision: str) -> None:
    """Raises ValueError for a compile mode or a precision that no prediction covers."""
    if compile not in COMPILED:
        raise ValueError(f"compile is {compile!r}; predicted are {', '.join(COMPILED)}")
    if precision not in PRECISION:
        raise ValueError(f"precision is {precision!r}; its cost is not calibrated")


def require_priced(spec: WorkSpec) -> ModelSpec:
    """Returns the step's network. Raises ValueError if a part of the step has no cost model."""
    require_predicted(compile=spec.compile, precision=spec.precision)
    if spec.checkpointing not in RECOMPUTED:
        raise ValueError(f"checkpointing is {spec.checkpointing!r}; its time is not predicted yet")
    return require_formulas(spec.model)


def require_formulas(model: object) -> ModelSpec:
    """Returns the network. Raises ValueError if a part of it has no cost model."""
    if not isinstance(model, ModelSpec):
        raise ValueError("a user's own model has no cost model yet; only presets are predicted")
    has_windows = any(map(model.window_of, range(model.num_layers)))  # shorter than the context
    free = PRICED if has_windows else f"{PRICED} {WINDOW}"
    model.require_defaults(free, "has no cost model yet")
    if model.norm not in NORMS:
        raise ValueError(f"norm is {model.norm!r}; its cost is not calibrated")
    if model.attention not in ATTENTIONS:
        raise ValueError(f"attention is {model.attention!r}; its cost is not calibrated")
    return model
