"""What each data parallel wrapper adds to a rank's step: communication, copies and host time."""
