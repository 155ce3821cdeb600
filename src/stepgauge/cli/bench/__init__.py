"""`stepgauge bench ...`: one command a thing that can be timed, every option a list to sweep."""

from cyclopts import App

# Each command, and where it stands: a module is loaded when its command is called.
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
app = App(name="bench", help="Time one thing over every combination of the options given.")
for _name, _place in COMMANDS.items():
    app.command(f"stepgauge.cli.bench.{_place}", name=_name)
