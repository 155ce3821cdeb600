"""`stepgauge bench ...`: one command a thing that can be timed, every option a list to sweep."""

from cyclopts import App

from stepgauge.cli.bench import (
    broadcast,
    comm,
    data_parallel,
    ddp_vs_fsdp,
    kernel,
    layout,
    op,
    pipeline,
    step,
)

app = App(name="bench", help="Time one thing over every combination of the options given.")
app.command(step.step)
app.command(data_parallel.data_parallel)
app.command(ddp_vs_fsdp.ddp_vs_fsdp)
app.command(pipeline.pipeline)
app.command(layout.layout)
app.command(kernel.app)
app.command(op.op)
app.command(comm.comm)
app.command(broadcast.broadcast)
