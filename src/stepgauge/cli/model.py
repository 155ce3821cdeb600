"""`stepgauge model`: what follows from a network's shape alone."""

from typing import Annotated

from cyclopts import Parameter

from stepgauge.cli.console import Format, print_table
from stepgauge.cli.options import Networks, Values, expand, spec_options
from stepgauge.report.table import Table
from stepgauge.spec.hf_config import HfConfig
from stepgauge.spec.model import FLOP_CONVENTION, SIZES, ModelSpec
from stepgauge.spec.step import StepSpec

OF_PRESETS = (
    "Presets have the published widths and depths. Their names count a feed-forward of two "
    "matrices; ours, SwiGLU, has three: 2.7b is 3.4 billion parameters and 10b 12.8, with "
    "--feed-forward gelu 2.6 and 10.0."
)


@spec_options(ModelSpec, HfConfig, sweep=True)
def model(
    *,
    values: Values,
    size: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"Presets ({', '.join(Networks.preset_names())}). [all but BERT's]",
            show_default=False,
        ),
    ] = tuple(SIZES),
    batch: Annotated[int, Parameter(help="Sequences in a batch.")] = 4,
    format: Annotated[Format, Parameter(help="What to print.")] = "table",
) -> None:
    """Print parameters, FLOPs and residual-stream bytes of a network. Needs no torch and no GPU."""
    rows = []
    asked = {"size": size, "batch": (batch,), **values}
    for spec in expand(StepSpec, asked, network=Networks):
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
    if format == "table":
        print_table(table)
        print(f"\nBatch {batch}. {FLOP_CONVENTION}.\n{OF_PRESETS}")
    else:
        print(table.to(format), end="")
