"""The command line. Commands load torch only when they run, so that help is quick."""

import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

import stepgauge
from stepgauge.cli import (
    bench,
    calibrate,
    comm,
    demo,
    model,
    predict,
    profile,
    records,
    schedule,
    study,
    topo,
    train,
)
from stepgauge.cli.console import complain, silence
from stepgauge.cli.rows import RunFailedError
from stepgauge.runtime.torchrun import torchrun_numbers

app = App(
    name="stepgauge",
    help="Measure a Transformer training step, explain it, make it faster, and train with it.",
    version=stepgauge.__version__,
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)
app.command(study.study)
app.command(calibrate.calibrate)
app.command(predict.predict)
app.command(bench.app)
app.command(profile.app)
app.command(comm.app)
app.command(topo.topo)
app.command(train.train)
app.command(model.model)
app.command(schedule.app)
app.command(demo.app)
app.command(records.show)
app.command(records.compare)
app.command(records.report)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 a run failed, 2 asked wrongly, 130 interrupted, 143
    terminated.
    """
    numbers = torchrun_numbers()
    if numbers is None:  # torchrun ends its processes itself
        signal.signal(signal.SIGTERM, _terminated)
    elif numbers[0] != 0:  # under torchrun rank 0 speaks
        silence()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """The command's exit status. A user's mistake is one sentence on standard error, never a
    traceback.
    """
    from stepgauge.spec.store import StoreError

    try:
        return (
            app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
            or 0
        )
    except CycloptsError as error:
        return complain(_sentence(error), 2)
    except StoreError as error:
        for unsaved in error.args[1:]:
            print(unsaved)  # the record that found no place on disk is not lost with it
        return complain(error.args[0], 1)
    except RunFailedError as error:
        return complain(str(error), 1)
    except ValueError as error:
        return complain(str(error), 2)
    except BrokenPipeError:  # a reader such as head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return complain(
            "interrupted; what was measured is on disk, and the same command goes on from there",
            130,
        )


def _terminated(number: int, _: object) -> None:
    """Leaves as at an interrupt, so that processes and semaphores do not stay behind."""
    raise SystemExit(128 + number)


def _sentence(error: CycloptsError) -> str:
    cause = error.__cause__ or error.__context__
    return str(cause) if isinstance(cause, ValueError) else " ".join(str(error).split())
