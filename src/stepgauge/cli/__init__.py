"""The command line. Commands load torch only when they run, so that help is quick."""

import contextlib
import difflib
import os
import signal
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from cyclopts import (
    App,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts.config import Toml

import stepgauge
from stepgauge.cli.console import complain, print_errors_only
from stepgauge.cli.option_names import speak_of
from stepgauge.cli.rows import RunFailedError, TerminatedError
from stepgauge.runtime.torchrun import torchrun_numbers

# Each command, and where it stands: a module is loaded when its command is called.
COMMANDS = {
    "study": "study:study",
    "calibrate": "calibrate:calibrate",
    "predict": "predict:predict",
    "validate": "validate:validate",
    "tune": "tune:tune",
    "plan": "plan:command",
    "bench": "bench:app",
    "profile": "profile:app",
    "comm": "comm:app",
    "topo": "topo:topo",
    "train": "train:train",
    "model": "model:model",
    "schedule": "schedule:app",
    "demo": "demo:app",
    "show": "records:show",
    "compare": "records:compare",
    "report": "records:report",
    "completion": "completion:completion",
}
INTERRUPTED, TERMINATED = 130, 143
NUMBERS: Mapping[type | None, str] = {int: "a whole number", float: "a number"}


def shown_default(value: object) -> str | None:
    """A default as it is typed, for the help; nothing of one that stands for "not given"."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return str(value) if value or isinstance(value, float) else None


app = App(
    name="stepgauge",
    help="""Measure a Transformer training step, explain it, make it faster, and train with it.

    --config FILE.toml gives any command's options by their names, [bench.step] those of bench step;
    the command line's own options override them. A table shows the columns that fit the terminal; --format
    csv or json has all.
    """,
    version=stepgauge.__version__,
    help_format="markdown",
    # flags have no opposites, and options of several values take them one after another
    default_parameter=Parameter(negative="", consume_multiple=True, show_default=shown_default),
    suppress_keyboard_interrupt=False,
)
for _name, _place in COMMANDS.items():
    app.command(f"stepgauge.cli.{_place}", name=_name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits: 0 done, 1 a run failed, 2 asked wrongly, 130 interrupted, 143
    terminated.
    """
    numbers = torchrun_numbers()
    if numbers is None:  # torchrun ends its processes itself
        signal.signal(signal.SIGTERM, _terminated)
    elif numbers[0] != 0:  # under torchrun rank 0 speaks
        print_errors_only()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # in place of it stands another
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = run(sys.argv[1:] if arguments is None else arguments)
    if status in (INTERRUPTED, TERMINATED):  # a second Ctrl-C does not cut the cleaning up short
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """The command's exit status. A user's mistake is one sentence on standard error, never a
    traceback.
    """
    from stepgauge.spec.store import NoRunError, StoreError

    try:
        given, app.config = _config_of(arguments)
        speak_of(app, given)
        _load_listed(given)
        status = app(given, exit_on_error=False, print_error=False, result_action="return_value")
        sys.stdout.flush()
        return status or 0
    except CycloptsError as error:
        return complain(_sentence(error), 2)
    except StoreError as error:
        for unsaved in error.args[1:]:
            print(unsaved)  # the record that found no place on disk is not lost with it
        return complain(error.args[0], 2 if isinstance(error, NoRunError) else 1)
    except RunFailedError as error:
        return complain(str(error), 1)
    except ValueError as error:
        return complain(str(error), 2)
    except BrokenPipeError:  # a reader such as head has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return complain(_of_file(error), 1)
    except KeyboardInterrupt as error:
        is_terminated = isinstance(error, TerminatedError)
        word = "terminated" if is_terminated else "interrupted"
        status = TERMINATED if is_terminated else INTERRUPTED
        return complain(": ".join([word, *map(str, error.args)]), status)


def _terminated(number: int, _: object) -> None:
    """Leaves as at an interrupt, so that processes and semaphores do not stay behind."""
    signal.signal(number, signal.SIG_IGN)  # sent to a group it comes twice: cleaning up goes on
    raise TerminatedError


def _load_listed(arguments: Sequence[str]) -> None:
    """Loads the commands of a group whose help is asked for: it has the first line of each."""
    group, rest = app, list(arguments)
    while rest and not rest[0].startswith("-") and rest[0] in [*group]:
        group = group[rest.pop(0)]
    if not rest or rest[0] in ("-h", "--help"):
        for name in group:
            group[name]


def _config_of(arguments: Sequence[str]) -> tuple[list[str], tuple[Toml, ...]]:
    """The arguments without --config FILE, and the file. Raises ValueError where there is none."""
    given = list(arguments)
    if "--config" not in given:
        return given, ()
    place = given.index("--config")
    if place + 1 == len(given):
        raise ValueError("--config needs a value: a TOML file")
    file = given[place + 1]
    del given[place : place + 2]
    if not Path(file).is_file():
        raise ValueError(f"--config is {file!r}; there is no such file")
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"cannot read --config {file}, which is no TOML: {error}") from None
    for name in tables:
        if name not in COMMANDS:  # it would be left out without a word
            raise ValueError(
                f"--config {file} has {name!r}, which is no command; options stand in the table of "
                f"theirs, such as [bench.step]"
            )
    return given, (Toml(Path(file), search_parents=False),)


def _of_file(error: OSError) -> str:
    """A sentence of what the system refused, a full disk or a folder in a file's place."""
    if error.filename is None:  # what is still to be printed finds no place either
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"cannot write the output: {error.strerror or error}"
    return f"cannot use {error.filename}: {error.strerror}"


def _sentence(error: CycloptsError) -> str:
    if isinstance(error, CoercionError) and error.token and error.target_type in NUMBERS:
        name = error.token.keyword or "value"
        return f"{name} is {error.token.value!r}; it must be {NUMBERS[error.target_type]}"
    if isinstance(error, MissingArgumentError) and error.argument and not error.tokens_so_far:
        command = " ".join(error.command_chain or ())
        is_place = error.argument.index is not None  # one that stands without a flag
        name = error.argument.name.lstrip("-").upper() if is_place else error.argument.name
        return f"{command} needs a value for {name}: see {command} --help"
    if isinstance(error, UnknownOptionError) and (error.token.keyword or "").startswith("["):
        asked = f"--{error.token.keyword[1:-1].rpartition('.')[2]}"  # type: ignore[index]
        known = [name for option in error.argument_collection for name in option.names]
        near = difflib.get_close_matches(asked, known, 1)
        hint = f" Did you mean {near[0][2:]}?" if near else ""
        return f"Unknown option: {asked[2:]!r} from {error.token.source}.{hint}"
    if isinstance(error, UnknownOptionError) and error.token.keyword == "--seconds":
        command = " ".join(error.command_chain or ())
        known = [name for option in error.argument_collection for name in option.names]
        if command.startswith("bench ") and "--steps" in known:
            return f"{command} has no --seconds: all its ranks time equally many --steps"
    if isinstance(error, UnusedCliTokensError):
        command = " ".join(error.command_chain or ())
        first, *_ = error.unused_tokens or [""]
        return f"{first!r} belongs to no option of {command}: see {command} --help"
    cause = error.__cause__ or error.__context__
    return str(cause) if isinstance(cause, ValueError) else " ".join(str(error).split())
