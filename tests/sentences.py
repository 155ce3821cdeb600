"""What the command line complains of."""


def one_sentence(err):
    """The only complaint on standard error, which has no traceback."""
    lines = [line for line in err.splitlines() if line.startswith("stepgauge:")]
    assert len(lines) == 1, err
    assert "Traceback" not in err
    return lines[0]
