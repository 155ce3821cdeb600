"""`stepgauge profile ...`: shows where the time and the memory of a step go."""

from cyclopts import App

# Command -> module:function. A module is imported when its command is called.
COMMANDS = {
    "step": "step:step",
    "trace": "trace:trace",
    "memory": "memory:memory",
    "dtypes": "dtypes:dtypes",
}
app = App(name="profile", help="Show where the time and the memory of a step go.")
for _name, _target in COMMANDS.items():
    app.command(f"stepgauge.cli.profile.{_target}", name=_name)
