"""`stepgauge profile ...`: where the time and the memory of a step go."""

from cyclopts import App

from stepgauge.cli.profile import dtypes, memory, step, trace

app = App(name="profile", help="Show where the time and the memory of a step go.")
app.command(step.step)
app.command(trace.trace)
app.command(trace.diff)
app.command(memory.memory)
app.command(dtypes.dtypes)
