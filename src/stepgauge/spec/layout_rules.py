"""Checks that a layout fits its network and step. Every command that takes a layout uses them."""

from stepgauge.spec.bert import BertSpec
from stepgauge.spec.layout import ULYSSES, WRAPPERS, Layout, check_wrapper, require_data_axis
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.model_fields import NORMS
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
    """Raises ValueError if the layout does not fit the network or the settings of the step.

    batch  sequences per forward and backward, over all ranks; ignored for a user's model, which
           brings one batch per data rank
    """
    require_data_axis(layout)
    check_wrapper(
        layout.wrapper,
        device=device,
        compile=compile,
        precision=precision,
        reduce_dtype=reduce_dtype,
        checkpointing=checkpointing,
    )
    if isinstance(model, UserModel):
        _check_user_model(layout, compile=compile)
    else:
        _check_network(layout, model, batch=batch, compile=compile)
    if layout.pipeline > 1:
        _check_split_backward(layout)
    if layout.data != layout.ranks:
        _check_cut(layout, precision=precision, checkpointing=checkpointing)


def _check_network(layout: Layout, model: Network, *, batch: int, compile: str) -> None:
    """Checks each axis against the shape of the network."""
    _check_batch(layout, batch)
    if layout.data != layout.ranks:
        _check_compile(layout, compile, "off", "blocks")
        if isinstance(model, BertSpec) and model.dropout:
            raise ValueError(
                f"dropout is {model.dropout}; the ranks of {str(layout)!r} would drop other values "
                "than one process: choose 0"
            )
    if layout.tensor > 1:
        _check_tensor(layout, model, compile=compile)
    if layout.pipeline > 1:
        cut_blocks(model, schedule_of(layout))
    if layout.context > 1:
        _check_context(layout, model)


def check_recorded(
    layout: Layout,
    model: Network | UserModel,
    *,
    device: str,
    backend: str,
    accumulation: int,
    reduce_dtype: str,
) -> None:
    """Raises ValueError if the layout's step cannot be captured as CUDA graphs: the stages of a
    pipeline, or forward and backward of a tensor axis, with or without a data axis.
    """
    if device.startswith("cpu"):
        raise ValueError("cuda_graphs needs a GPU; device is 'cpu'")
    has_tensor, has_pipeline = layout.tensor > 1, layout.pipeline > 1
    if layout.context > 1 or layout.torch_tensor or has_tensor == has_pipeline:
        raise ValueError(
            f"cuda_graphs needs our tensor axis or a pipeline, besides a data axis; layout is "
            f"{str(layout)!r}: choose one such as 'tp2 overlap' or 'pp2 1f1b m4 dp2'"
        )
    if has_tensor and backend == "gloo":
        raise ValueError("cuda_graphs is True; backend is 'gloo', which communicates on the host")
    if has_tensor:
        _check_recorded_step(layout, model, accumulation=accumulation, reduce_dtype=reduce_dtype)
        return
    if WRAPPERS[layout.wrapper].shards("gradients"):
        raise ValueError(
            f"cuda_graphs needs weights and gradients at fixed addresses; {layout.wrapper} frees "
            "them: choose zero1"
        )


def _check_recorded_step(
    layout: Layout, model: Network | UserModel, *, accumulation: int, reduce_dtype: str
) -> None:
    recorded = ", ".join(name for name, each in WRAPPERS.items() if each.recorded)
    if not WRAPPERS[layout.wrapper].recorded or reduce_dtype != "own":
        raise ValueError(
            f"cuda_graphs is True; layout is {str(layout)!r} with reduce_dtype {reduce_dtype!r}, and "
            f"only the communication of {recorded} in the gradients' own dtype can be captured"
        )
    if isinstance(model, UserModel):
        raise ValueError(
            "cuda_graphs is True; the step of a tensor axis can be recorded for presets only, because "
            "a user's batches may have any form"
        )
    if accumulation > 1:
        raise ValueError(
            f"cuda_graphs is True; accumulation is {accumulation}, and a recorded step of a tensor "
            f"axis has one batch: choose 1"
        )


def schedule_of(layout: Layout) -> Schedule:
    """Returns the pipeline's schedule, not lowered.

    Raises ValueError if the schedule does not support these numbers of ranks and micro-batches.
    """
    return build(
        layout.schedule,
        ranks=layout.pipeline,
        micro_batches=layout.microbatches,
        per_rank=layout.per_rank,
    )


def _check_user_model(layout: Layout, *, compile: str) -> None:
    """Checks axes that no user's model supports. The rest is checked once the model is built."""
    if layout.data != layout.ranks:
        _check_compile(layout, compile, "off")
    if layout.context > 1:
        raise ValueError(
            f"layout is {str(layout)!r}; a user's model has no context axis, because its attention "
            f"cannot be replaced: choose a data, tensor or pipeline axis"
        )
    if layout.torch_tensor:
        raise ValueError(
            f"layout is {str(layout)!r}; {layout.torch_tensor} supports only presets: choose "
            f"'tp{layout.tensor}'"
        )


def _check_batch(layout: Layout, batch: int) -> None:
    if batch % layout.data:
        raise ValueError(
            f"batch is {batch}, which dp{layout.data} does not divide; choose a multiple of "
            f"{layout.data * layout.microbatches}"
        )
    if (batch // layout.data) % layout.microbatches:
        raise ValueError(
            f"batch is {batch}, which is {batch // layout.data} sequences per data rank, and "
            f"m{layout.microbatches} does not divide them; choose a multiple of "
            f"{layout.data * layout.microbatches}"
        )


def _check_tensor(layout: Layout, model: Network, *, compile: str) -> None:
    degree, name = layout.tensor, f"tp{layout.tensor}"
    if model.context_length % (degree * layout.context):
        axes = f"{name} with cp{layout.context}" if layout.context > 1 else name
        raise ValueError(
            f"context_length is {model.context_length}, which {axes} does not divide: each rank "
            f"needs an equal part of the sequence"
        )
    if model.vocab_size < degree:
        raise ValueError(
            f"vocab_size is {model.vocab_size}; {name} needs at least one row per rank"
        )
    if isinstance(model, ModelSpec) and model.gate != "torch":
        raise ValueError(f"gate is {model.gate!r}, which {name} does not support: choose torch")
    if layout.torch_tensor:
        _check_torch_tensor(layout, model, compile=compile)
    sections = {
        (pattern, section) for pattern, rule in table_of(model).items() for section in rule.sections
    }
    for pattern, section in [*sorted(sections, key=str), ("feed_forward.up", Section(model.d_ff))]:
        try:
            section.copies(degree)
        except ValueError as error:
            if section.unit > 1:  # its units are heads
                raise ValueError(_why_heads(section, degree)) from None
            raise ValueError(f"{name} does not fit {pattern}: {error}") from None


def _why_heads(section: Section, degree: int) -> str:
    """Returns why tensor ranks cannot share the heads of the section."""
    noun, needed = "heads", f"{degree} divides"
    if section.shared:  # neighbouring ranks may have the same key head
        noun, needed = "key heads", f"{degree} divides or that divides {degree}"
    number = section.rows // section.unit
    return f"tp{degree} needs a number of {noun} that {needed}; the network has {number}"


def _check_torch_tensor(layout: Layout, model: Network, *, compile: str) -> None:
    """Checks what torch's tensor parallel supports of the presets."""
    name, degree = layout.torch_tensor, layout.tensor
    if compile != "off":
        raise ValueError(
            f"compile is {compile!r}; the backward of compiled blocks fails under {name} in torch "
            f"2.13: choose off"
        )
    if not isinstance(model, ModelSpec):
        raise ValueError(f"{name} does not support BERT, because it cannot split BERT's loss")
    supported = {"tied_head": (False,), "qk_norm": (False,), "positions": ("rope", "none")}
    norms = tuple(name for name, norm in NORMS.items() if norm.torch_tp)
    supported |= {"loss": ("cross-entropy",), "norm": norms, "scaled_embedding": (False,)}
    for field, values in supported.items():
        if (value := getattr(model, field)) not in values:
            raise ValueError(
                f"{field} is {value!r}, which {name} does not support; choose {values[0]!r}"
            )
    if model.vocab_size % degree or model.kv_heads % degree:
        raise ValueError(
            f"vocab_size is {model.vocab_size} and num_kv_heads {model.kv_heads}; {name} needs "
            f"multiples of {degree}"
        )


def _check_context(layout: Layout, model: Network) -> None:
    name = f"cp{layout.context}"
    if not isinstance(model, ModelSpec):
        raise ValueError(f"{name} does not support BERT")
    if layout.ulysses:
        _check_head_exchange(layout, model)
        return
    ring_positions(model.context_length, 0, layout.context)
    if model.attention != "triton":
        raise ValueError(
            f"attention is {model.attention!r}; the ring attention of {name} needs triton. "
            f"'{name} {ULYSSES}' works with every attention"
        )
    if any(model.window_of(layer) for layer in range(model.num_layers)):
        raise ValueError(f"window is {model.window}; {name} does not support windows: choose 0")


def _check_head_exchange(layout: Layout, model: ModelSpec) -> None:
    contiguous_positions(model.context_length, 0, layout.context)
    if model.kv_heads % (layout.tensor * layout.context):
        ranks = layout.tensor * layout.context
        raise ValueError(
            f"num_kv_heads is {model.kv_heads}, which the {ranks} tensor and context ranks of "
            f"{str(layout)!r} do not divide; without ulysses, keys go around a ring instead"
        )


def _check_split_backward(layout: Layout) -> None:
    """Checks a schedule that computes weight gradients apart from input gradients."""
    schedule = schedule_of(layout)
    splits = any(schedule.splits(stage) for stage in schedule.rank_of)
    if splits and WRAPPERS[layout.wrapper].shards("weights"):
        raise ValueError(
            f"{layout.schedule} delays weight gradients, but {layout.wrapper} needs input and "
            f"weight gradients together; choose 1f1b or zero2"
        )
    if splits and layout.tensor > 1:
        raise ValueError(
            f"{layout.schedule} fills its bubbles with weight gradients, which tensor parallel "
            f"layers (tp{layout.tensor}) compute together with input gradients; choose 1f1b or "
            f"interleaved"
        )


def _check_compile(layout: Layout, compile: str, *supported: str) -> None:
    if compile not in supported:
        raise ValueError(
            f"compile is {compile!r}; layout {str(layout)!r} supports only {' or '.join(supported)}"
        )


def _check_cut(layout: Layout, *, precision: str, checkpointing: str) -> None:
    """Checks settings that tensor, context and pipeline axes do not support."""
    if checkpointing == BUDGET:
        raise ValueError(
            f"layout is {str(layout)!r}; --checkpointing budget supports only data parallel layouts"
        )
    if WRAPPERS[layout.wrapper].is_torch:
        raise ValueError(
            f"wrapper is {layout.wrapper!r}, which supports only a data axis; in {str(layout)!r} choose "
            f"one of {', '.join(name for name, w in WRAPPERS.items() if not w.is_torch)}"
        )
    needs = {
        "fp16": "loss scaling needs every rank's gradients",
        "float8": "layers need unsharded weights",
    }
    if precision in needs:
        raise ValueError(
            f"precision is {precision!r}, whose {needs[precision]}; in {str(layout)!r} choose bf16"
        )
