"""The options of the running command in place of the fields that a sentence names.

The package raises its errors for Python callers: "num_heads is 5, which does not divide d_model 64".
At the command line that is "--num-heads is 5, which does not divide --d-model 64".
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence

from cyclopts import App

NAME = re.compile(
    r"(?<!\w)'[^']*'(?!\w)"  # quoted: a value
    r"|(?<![\w./=-])[a-z]+(?:_[a-z0-9]+)+(?![\w/=]|\.\w)"  # of several words: no English word
    r"|(?:(?<=^)|(?<=[:;,] )|(?<=\band ))[a-z]+[0-9]*(?= (?:is|needs|must|has no effect)\b| (?:has )?')"
)
_of_command: Callable[[], Mapping[str, str]] = dict


def speak_of(app: App, arguments: Sequence[str]) -> None:
    """From now on sentences are those of the command that the arguments call."""
    global _of_command
    _of_command = functools.cache(functools.partial(options_by_field, app, arguments))


def options_by_field(app: App, arguments: Sequence[str]) -> dict[str, str]:
    """The command's options by the fields and parameters that they give, written as one word."""
    _, apps, _ = app.parse_commands(arguments)
    if not getattr(apps[-1].default_command, "__module__", "").startswith("stepgauge."):
        return {}  # a group of commands, and what cyclopts itself answers
    return {
        _one_word((*argument.keys, argument.field_info.name)[0]): argument.name
        for argument in apps[-1].assemble_argument_collection()
        if argument.index is None and argument.name.startswith("--")
    }


def in_options(sentence: str) -> str:
    """The sentence with the running command's options in place of fields."""
    return NAME.sub(lambda found: _of_command().get(_one_word(found[0]), found[0]), sentence)


def _one_word(name: str) -> str:
    """micro_batches and microbatches are one."""
    return name.replace("_", "")
