"""Entry point of the `stepgauge` command."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C prints one sentence, even while imports are still running."""
    try:
        from stepgauge.runtime.interrupts import UninterruptedImports

        UninterruptedImports("torch", "numpy").install()
        from stepgauge.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("stepgauge: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
