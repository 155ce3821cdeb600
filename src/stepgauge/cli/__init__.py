"""The command line. A command imports torch only when it runs, so that --help stays fast."""

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
from stepgauge.cli.console import print_error, print_errors_only
from stepgauge.cli.option_names import use_option_names
from stepgauge.cli.rows import RunFailedError, TerminatedError
from stepgauge.runtime.torchrun import torchrun_numbers
from stepgauge.spec.hardware_files import names_to_predict_for

# Command -> module:function. A module is imported when its command is called.
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
INTERRUPTED, TERMINATED = 130, 143  # exit statuses
# Options as other programs name them, where the nearest name of ours is another option.
OTHER_NAMES = {
    **dict.fromkeys(("--sequence-length", "--seq-length", "--seq-len"), "--context"),
    **dict.fromkeys(("--hidden-size", "--hidden", "--dim"), "--d-model"),
    **dict.fromkeys(("--layers", "--n-layers"), "--num-layers"),
    "--dtype": "--precision",
}
NUMBERS: Mapping[type | None, str] = {int: "a whole number", float: "a number"}


def shown_default(value: object) -> str | None:
    """Returns a default as a user would type it, for the help; None if it means "not given"."""
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or None
    return str(value) if value or isinstance(value, float) else None


app = App(
    name="stepgauge",
    help="""Measure a Transformer training step, explain it, make it faster, and train with it.

    --config FILE.toml supplies options of any command: the table [bench.step] holds those of bench
    step. Options on the command line override the file. Tables show the columns that fit the
    terminal, or all where they go to a file, unless COLUMNS gives its width. --format csv or json
    prints all of them, unrounded.
    """,
    version=stepgauge.__version__,
    help_format="markdown",
    # No --no-FLAG options; an option with several values takes all that follow it.
    default_parameter=Parameter(negative="", consume_multiple=True, show_default=shown_default),
    suppress_keyboard_interrupt=False,
)
for _name, _target in COMMANDS.items():
    app.command(f"stepgauge.cli.{_target}", name=_name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command and exits with 0 (done), 1 (a run failed), 2 (usage error), 130
    (interrupted) or 143 (terminated).
    """
    numbers = torchrun_numbers()
    if numbers is None:  # torchrun ends its processes itself
        signal.signal(signal.SIGTERM, _raise_terminated)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored
            signal.signal(signal.SIGINT, _raise_interrupted)
    elif numbers[0] != 0:  # under torchrun only rank 0 prints
        print_errors_only()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the stream may have been replaced
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    status = run(sys.argv[1:] if arguments is None else arguments)
    if status in (INTERRUPTED, TERMINATED):  # Ctrl-C must not cut the rest of the cleanup short
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status. A user's mistake prints one sentence on
    standard error, never a traceback.
    """
    from stepgauge.spec.store import NoRunError, StoreError

    try:
        remaining, app.config = _read_config(arguments)
        use_option_names(app, remaining)
        _load_listed_commands(remaining)
        status = app(
            remaining, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
        return status or 0
    except CycloptsError as error:
        return print_error(_usage_message(error), 2)
    except StoreError as error:
        for unsaved in error.args[1:]:
            print(unsaved)  # a record that could not be written to disk is not lost
        return print_error(error.args[0], 2 if isinstance(error, NoRunError) else 1)
    except RunFailedError as error:
        return print_error(str(error), 1)
    except ValueError as error:
        return print_error(str(error), 2)
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return print_error(_os_error_message(error), 1)
    except KeyboardInterrupt as error:
        is_terminated = isinstance(error, TerminatedError)
        word = "terminated" if is_terminated else "interrupted"
        status = TERMINATED if is_terminated else INTERRUPTED
        return print_error(": ".join([word, *map(str, error.args)]), status)


def _raise_interrupted(*_: object) -> None:
    """Handles Ctrl-C."""
    _ignore_signals()
    raise KeyboardInterrupt


def _raise_terminated(*_: object) -> None:
    """Handles SIGTERM like an interrupt, so that no process or semaphore is left behind."""
    _ignore_signals()
    raise TerminatedError


def _ignore_signals() -> None:
    """Lets no second signal interrupt the cleanup. A signal to the process group arrives twice."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _load_listed_commands(arguments: Sequence[str]) -> None:
    """Imports the commands of a group if its help is requested, which shows a line of each."""
    group, rest = app, list(arguments)
    while rest and not rest[0].startswith("-") and rest[0] in [*group]:
        group = group[rest.pop(0)]
    if not rest or rest[0] in ("-h", "--help"):
        for name in group:
            group[name]


def _read_config(arguments: Sequence[str]) -> tuple[list[str], tuple[Toml, ...]]:
    """Returns the arguments without --config FILE, and that file as a source of options.

    Raises ValueError for a file that does not exist or is no valid configuration.
    """
    remaining = list(arguments)
    if "--config" not in remaining:
        return remaining, ()
    place = remaining.index("--config")
    if place + 1 == len(remaining):
        raise ValueError("--config needs a value: a TOML file")
    file = remaining[place + 1]
    del remaining[place : place + 2]
    if not Path(file).is_file():
        raise ValueError(f"--config is {file!r}; there is no such file")
    try:
        tables = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--config {file} is not valid TOML: {error}") from None
    for name, table in tables.items():
        _require_command(name, app, file)
        for within, options in table.items() if isinstance(table, dict) else ():
            if isinstance(options, dict):
                _require_command(within, app[name], f"{file} [{name}]")
    return remaining, (Toml(Path(file), search_parents=False),)


def _require_command(name: str, group: App, place: str) -> None:
    """Raises ValueError for a table of a configuration that is no command's. cyclopts would ignore it."""
    if name not in list(group):
        raise ValueError(
            f"--config {place} has {name!r}, which is not a command; put options into the table of "
            "their command, such as [bench.step]"
        )


def _os_error_message(error: OSError) -> str:
    """Returns a sentence for an error of the operating system, such as a full disk."""
    if error.filename is None:  # writing the rest of the output would fail, too
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"cannot write the output: {error.strerror or error}"
    return f"cannot use {error.filename}: {error.strerror}"


def _usage_message(error: CycloptsError) -> str:
    """Returns a sentence for a mistake in the options; cyclopts' own if no case below applies."""
    command = " ".join(error.command_chain or ())
    if isinstance(error, CoercionError) and error.token and error.target_type in NUMBERS:
        name = error.token.keyword or "value"
        return f"{name} is {error.token.value!r}; it must be {NUMBERS[error.target_type]}"
    if isinstance(error, MissingArgumentError) and error.argument and not error.tokens_so_far:
        is_positional = error.argument.index is not None
        name = error.argument.name.lstrip("-").upper() if is_positional else error.argument.name
        if name == "--hardware":
            files = ", ".join(names_to_predict_for())
            return (
                f"{command} needs a value for --hardware: {files}, or a file of stepgauge calibrate"
            )
        return f"{command} needs a value for {name}: see stepgauge {command} --help"
    if isinstance(error, UnknownOptionError) and (sentence := _unknown_option(error, command)):
        return sentence
    if isinstance(error, UnusedCliTokensError):
        first, *_ = error.unused_tokens or [""]
        return f"unexpected argument {first!r}: see stepgauge {command} --help"
    cause = error.__cause__ or error.__context__
    return str(cause) if isinstance(cause, ValueError) else " ".join(str(error).split())


def _unknown_option(error: UnknownOptionError, command: str) -> str:
    """Returns a sentence for an option that the command does not have; "" if cyclopts' own is as good."""
    keyword = error.token.keyword or ""
    known = [name for option in error.argument_collection for name in option.names]
    if keyword.startswith("["):  # from a configuration file: [bench.step.batch]
        name = keyword[1:-1].rpartition(".")[2]
        near = difflib.get_close_matches(f"--{name}", known, 1)
        hint = f" Did you mean {near[0][2:]}?" if near else ""
        return f"Unknown option: {name!r} from {error.token.source}.{hint}"
    if keyword == "--seconds" and command.startswith("bench ") and "--steps" in known:
        return f"{command} has no --seconds, because all ranks time the same number of --steps"
    ours = OTHER_NAMES.get(keyword.replace("_", "-"), "")
    return f"Unknown option: {keyword}. Did you mean {ours}?" if ours in known else ""
