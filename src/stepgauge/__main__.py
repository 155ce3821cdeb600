"""Where the command `stepgauge` begins."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C while that is still imported is a sentence, too."""
    try:
        from stepgauge.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("stepgauge: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
