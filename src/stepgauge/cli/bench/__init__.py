"""`stepgauge bench ...`: one command for each thing that can be timed. Every option is a sweep."""

from cyclopts import App

# Command -> module:function. A module is imported when its command is called.
COMMANDS = {
    "step": "steps:step",
    "data-parallel": "steps:data_parallel",
    "pipeline": "pipeline:pipeline",
    "layout": "steps:layout",
    "kernel": "kernel:app",
    "op": "op:op",
    "comm": "comm:comm",
    "broadcast": "broadcast:broadcast",
}
app = App(
    name="bench",
    help="Time training steps, kernels and collectives over all combinations of options.",
)
for _name, _target in COMMANDS.items():
    app.command(f"stepgauge.cli.bench.{_target}", name=_name)
