"""Helper for tests of the command line's error messages."""


def one_sentence(err):
    """Returns the only error message on standard error, after checking that there is no traceback."""
    lines = [line for line in err.splitlines() if line.startswith("stepgauge:")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]
