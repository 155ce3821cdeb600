"""What goes together in a layout, a network and a step: one place for every command that takes a
layout.
"""

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.layout import WRAPPERS, Layout, check_wrapper
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.context import contiguous_positions, ring_positions
from stepgauge.spec.plan.pipeline import Schedule, build
from stepgauge.spec.plan.stages import cut_blocks
from stepgauge.spec.plan.tensor import Section
from stepgauge.spec.plan.tensor_tables import table_of
from stepgauge.spec.step import BUDGET
from stepgauge.spec.user_model import UserModel

Network = ModelSpec | BertSpec


def check_layout(
    layout: Layout,
    model: Network | UserModel,
    *,
    batch: int,
    device: str,
    precision: str,
    compile: str,
    reduce_dtype: str,
    checkpointing: str,
) -> None:
    """Raises ValueError, a sentence, for what does not go together.

    batch  sequences of a forward and backward, of all ranks; a user's model brings a batch a rank
    """
    check_wrapper(
        layout.wrapper,
        device=device,
        compile=compile,
        precision=precision,
        reduce_dtype=reduce_dtype,
        checkpointing=checkpointing,
    )
    if isinstance(model, UserModel):
        _check_user_model(layout)
    else:
        _check_network(layout, model, batch=batch, compile=compile)
    if layout.pipeline > 1:
        _check_split_backward(layout)
    if layout.data != layout.ranks:
        _check_cut(layout, model, precision=precision, compile=compile, checkpointing=checkpointing)


def _check_network(layout: Layout, model: Network, *, batch: int, compile: str) -> None:
    """What a network of a known shape does on each axis."""
    _check_batch(layout, batch)
    if layout.tensor > 1:
        _check_tensor(layout, model, compile=compile)
    if layout.pipeline > 1:
        cut_blocks(model, schedule_of(layout))
    if layout.context > 1:
        _check_context(layout, model)


def check_recorded(layout: Layout, *, device: str) -> None:
    """Raises ValueError where stages cannot be recorded as CUDA graphs."""
    if device.startswith("cpu"):
        raise ValueError("cuda_graphs needs a GPU; device is 'cpu'")
    if layout.pipeline == 1 or layout.tensor > 1 or layout.context > 1:
        raise ValueError(
            f"cuda_graphs records the stages of a pipeline with a data axis or none; layout is "
            f"{str(layout)!r}: choose one such as 'pp2 1f1b m4 dp2'"
        )
    if WRAPPERS[layout.wrapper].shards("gradients"):
        raise ValueError(
            f"cuda_graphs needs weights and gradients that stay in one place; {layout.wrapper} "
            "frees them: choose zero1"
        )


def schedule_of(layout: Layout) -> Schedule:
    """The order of a pipeline's work, not lowered. Raises ValueError for numbers that the schedule
    does not do.
    """
    return build(
        layout.schedule, ranks=layout.pipeline, micro_batches=layout.microbatches,
        per_rank=layout.per_rank,
    )  # fmt: skip


def _check_user_model(layout: Layout) -> None:
    """What no table of a user's cuts. Whether its layers and batch can be cut is seen when they are
    built.
    """
    if layout.context > 1:
        raise ValueError(
            f"layout is {str(layout)!r}; a user's model has no context axis, for which its attention "
            f"would have to be replaced: choose a data, tensor or pipeline axis"
        )
    if layout.torch_tensor:
        raise ValueError(
            f"layout is {str(layout)!r}; {layout.torch_tensor} cuts presets of the Transformer: choose "
            f"'tp{layout.tensor}'"
        )


def _check_batch(layout: Layout, batch: int) -> None:
    if batch % layout.data:
        raise ValueError(
            f"batch is {batch}, which dp{layout.data} does not divide; choose a multiple"
        )
    if (batch // layout.data) % layout.microbatches:
        raise ValueError(
            f"batch is {batch}, {batch // layout.data} sequences a data rank, which "
            f"m{layout.microbatches} does not divide; choose a multiple"
        )


def _check_tensor(layout: Layout, model: Network, *, compile: str) -> None:
    degree, name = layout.tensor, f"tp{layout.tensor}"
    if model.context_length % (degree * layout.context):
        axes = f"{name} with cp{layout.context}" if layout.context > 1 else name
        raise ValueError(
            f"context_length is {model.context_length}, which {axes} does not divide: each rank "
            f"has a piece of the sequence"
        )
    if model.vocab_size < degree:
        raise ValueError(f"vocab_size is {model.vocab_size}; {name} needs a row a rank")
    if isinstance(model, ModelSpec) and model.gate != "torch":
        raise ValueError(f"gate is {model.gate!r}; {name} cuts its layers, choose gate torch")
    if layout.torch_tensor:
        _check_torch_tensor(layout, model, compile=compile)
    sections = {
        (pattern, section) for pattern, rule in table_of(model).items() for section in rule.sections
    }
    for pattern, section in [*sorted(sections, key=str), ("feed_forward.up", Section(model.d_ff))]:
        try:
            section.copies(degree)
        except ValueError as error:
            raise ValueError(f"{name} does not fit {pattern}: {error}") from None


TORCH_NORMS = ("rmsnorm", "rmsnorm-eager", "layernorm")


def _check_torch_tensor(layout: Layout, model: Network, *, compile: str) -> None:
    """What torch's tensor parallel does of our networks."""
    name, degree = layout.torch_tensor, layout.tensor
    if compile != "off":
        raise ValueError(
            f"compile is {compile!r}; the backward of compiled blocks fails under {name} (torch "
            f"2.13): choose off"
        )
    if not isinstance(model, ModelSpec):
        raise ValueError(f"{name} needs a preset of the Transformer; BERT's loss is not cut there")
    fields = {"tied_head": (False,), "qk_norm": (False,), "positions": ("rope", "none")}
    fields |= {"loss": ("cross-entropy",), "norm": TORCH_NORMS, "scaled_embedding": (False,)}
    for field, known in fields.items():
        if (value := getattr(model, field)) not in known:
            raise ValueError(
                f"{field} is {value!r}, which {name} does not cut; choose {known[0]!r}"
            )
    if model.vocab_size % degree or model.kv_heads % degree:
        raise ValueError(
            f"vocab_size is {model.vocab_size} and num_kv_heads {model.kv_heads}; {name} cuts them "
            f"into {degree} equal parts: choose multiples"
        )


def _check_context(layout: Layout, model: Network) -> None:
    name = f"cp{layout.context}"
    if not isinstance(model, ModelSpec):
        raise ValueError(
            f"{name} needs a preset of the Transformer; BERT's attention is in one process"
        )
    if layout.ulysses:
        _check_head_exchange(layout, model)
        return
    ring_positions(model.context_length, 0, layout.context)
    if model.attention != "triton":
        raise ValueError(
            f"attention is {model.attention!r}; {name} sends keys around a ring of ours: choose "
            f"triton"
        )
    if any(model.window_of(layer) for layer in range(model.num_layers)):
        raise ValueError(f"window is {model.window}; {name} has no windows yet: choose 0")


def _check_head_exchange(layout: Layout, model: ModelSpec) -> None:
    contiguous_positions(model.context_length, 0, layout.context)
    if model.kv_heads % (layout.tensor * layout.context):
        ranks = layout.tensor * layout.context
        raise ValueError(
            f"num_kv_heads is {model.kv_heads}, which {ranks} ranks of the layout {str(layout)!r} "
            "do not divide: each has some heads of all tokens; leave out ulysses for a ring of keys"
        )


def _check_split_backward(layout: Layout) -> None:
    """What goes with a schedule that computes gradients of weights apart."""
    schedule = schedule_of(layout)
    splits = any(schedule.splits(stage) for stage in schedule.rank_of)
    if splits and WRAPPERS[layout.wrapper].shards("weights"):
        raise ValueError(
            f"{layout.schedule} computes gradients of weights later than those of inputs, and "
            f"{layout.wrapper} takes both at once only; choose 1f1b or zero2"
        )
    if splits and layout.tensor > 1:
        raise ValueError(
            f"{layout.schedule} fills its bubbles with gradients of weights, which layers cut as "
            f"tp{layout.tensor} compute with those of inputs; choose 1f1b or interleaved"
        )


def _check_cut(
    layout: Layout, model: Network | UserModel, *, precision: str, compile: str, checkpointing: str
) -> None:
    """What a network does not do that is cut by layer, by sequence or into stages."""
    if checkpointing == BUDGET:
        raise ValueError(
            f"layout is {str(layout)!r}; --checkpointing budget is solved for data parallel ranks"
        )
    if WRAPPERS[layout.wrapper].is_torch:
        raise ValueError(
            f"wrapper is {layout.wrapper!r}, which takes whole networks; in {str(layout)!r} choose "
            f"one of {', '.join(name for name, w in WRAPPERS.items() if not w.is_torch)}"
        )
    if layout.num_replicas == 1 and layout.wrapper != "none":
        raise ValueError(
            f"{layout.wrapper} needs a data axis, which {str(layout)!r} has not: add dp2"
        )
    whole = {
        "fp16": "loss scale needs every rank's gradients",
        "float8": "layers need whole weights",
    }
    if precision in whole:
        raise ValueError(
            f"precision is {precision!r}, whose {whole[precision]}; in {str(layout)!r} choose bf16"
        )
    modes = ("off",) if isinstance(model, UserModel) else ("off", "blocks")
    if compile not in modes:
        raise ValueError(
            f"compile is {compile!r}; a network that is cut as {str(layout)!r} takes "
            f"{' or '.join(modes)}"
        )
    if isinstance(model, BertSpec) and model.dropout:
        raise ValueError(
            f"dropout is {model.dropout}; ranks of {str(layout)!r} would drop other values than "
            "one process: choose 0"
        )
