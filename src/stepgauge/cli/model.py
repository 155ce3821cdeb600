"""`stepgauge model`: parameters, FLOPs and bytes that follow from a network's shape."""

from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_table
from stepgauge.cli.options import Values, expand, spec_options
from stepgauge.report.table import Table
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.hf_config import HfConfig
from stepgauge.spec.model import FLOP_CONVENTION, SIZES, ModelSpec
from stepgauge.spec.presets import preset_names
from stepgauge.spec.step import StepSpec

PRESETS_NOTE = (
    "Presets have the published widths and depths. Their names assume a feed-forward layer with two "
    "matrices; SwiGLU, the default here, has three. So 2.7b has 3.4 billion parameters and 10b has "
    "12.8; with --feed-forward gelu it is 2.6 and 10.0."
)


@spec_options(ModelSpec, HfConfig, sweep=True)
def model(
    *,
    values: Values,
    size: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"Presets ({', '.join(preset_names(ModelSpec, BertSpec))}). [all but BERT's]",
            show_default=False,
        ),
    ] = tuple(SIZES),
    batch: Annotated[int, Parameter(help="Sequences in a batch.")] = 4,
    format: Annotated[Format, Parameter(help="Output format.")] = "table",
) -> None:
    """Print parameters, FLOPs and residual-stream bytes of networks. Needs neither torch nor a GPU."""
    rows = []
    chosen = {"size": size, "batch": (batch,), **values}
    for spec in expand(StepSpec, chosen):
        network, sequence = spec.model, spec.model.context_length
        forward = network.forward_flops(batch=batch, sequence=sequence)
        step = network.step_flops(batch=batch, sequence=sequence)
        residual = network.residual_stream_bytes(batch=batch, sequence=sequence)
        shape = (network.d_model, network.d_ff, network.num_layers, network.num_heads, sequence)
        figures = (
            network.num_parameters,
            forward / 1e12,
            step / 1e12,
            residual / 2**20,
        )
        rows.append([spec.size, *map(str, shape), *figures])
    head = ["size", "d_model", "d_ff", "layers", "heads", "context"]
    figures_head = ["parameters", "forward TFLOP", "step TFLOP", "residual MiB (fp32)"]
    table = Table([*head, *figures_head], rows, numeric=frozenset([*head[1:], *figures_head]))
    print_table(table, format)
    if format == "table":
        print(f"\nBatch {batch}; {FLOP_CONVENTION}.\n{PRESETS_NOTE}")
