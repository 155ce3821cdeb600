"""`stepgauge completion`."""

from typing import Annotated, Literal

from cyclopts import Parameter


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], Parameter(help="Your shell.")],
    /,
) -> None:
    """Print a completion script; source it from the start-up file of your shell."""
    from stepgauge.cli import app

    print(app.generate_completion(shell=shell))
