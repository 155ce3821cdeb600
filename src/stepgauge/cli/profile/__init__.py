"""`stepgauge profile ...`: where the time and the memory of a step go."""

from cyclopts import App

# Each command, and where it stands: a module is loaded when its command is called.
COMMANDS = {
    "step": "step:step",
    "trace": "trace:trace",
    "memory": "memory:memory",
    "dtypes": "dtypes:dtypes",
}
app = App(name="profile", help="Show where the time and the memory of a step go.")
for _name, _place in COMMANDS.items():
    app.command(f"stepgauge.cli.profile.{_place}", name=_name)
