"""`stepgauge completion`."""

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="The shell to complete in.")],
    /,
) -> None:
    """Print a script that completes commands and options; source it from the shell's start file."""
    from stepgauge.cli import app

    print(app.generate_completion(shell=shell))
