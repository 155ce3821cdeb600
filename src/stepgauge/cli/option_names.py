"""Replaces field names in messages by the options of the running command.

The package raises its errors for Python callers: "num_heads is 5, which does not divide d_model 64".
On the command line this becomes "--num-heads is 5, which does not divide --d-model 64".
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from cyclopts import App

NAME = re.compile(
    r"(?<!\w)'[^']*'(?!\w)"  # a quoted value, which is matched so that it is left as it is
    r"|(?<![\w./=-])[a-z]+(?:_[a-z0-9]+)+(?![\w/=]|\.\w)"  # words joined by _: never English
    # A single word is a field only at the start of a clause and before one of these verbs.
    r"|(?:(?<=^)|(?<=[:;,] )|(?<=\band ))[a-z]+[0-9]*(?= (?:is|needs|must|has no effect)\b| (?:has )?')"
)
_options_of_command: Callable[[], Mapping[str, str]] = dict


def use_option_names(app: App, arguments: Sequence[str]) -> None:
    """Makes with_option_names use the options of the command that the arguments call."""
    global _options_of_command
    _options_of_command = functools.cache(functools.partial(options_by_field, app, arguments))


def options_by_field(app: App, arguments: Sequence[str]) -> dict[str, str]:
    """Returns the command's options by field or parameter name, underscores removed."""
    _, apps, _ = app.parse_commands(arguments)
    if not getattr(apps[-1].default_command, "__module__", "").startswith("stepgauge."):
        return {}  # a group of commands, or --help and --version, which cyclopts handles itself
    return {
        _without_underscores((*argument.keys, argument.field_info.name)[0]): argument.name
        for argument in apps[-1].assemble_argument_collection()
        if argument.index is None and argument.name.startswith("--")
    }


def with_option_names(message: str) -> str:
    """Returns the message with the running command's options in place of field names."""

    def option_of(match: re.Match[str]) -> str:
        return _options_of_command().get(_without_underscores(match[0]), match[0])

    return NAME.sub(option_of, message)


def _without_underscores(name: str) -> str:
    """Makes micro_batches and microbatches the same name."""
    return name.replace("_", "")
