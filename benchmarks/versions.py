"""What measuring scripts add to each of their rows: versions, device, date and commit."""

import datetime
import os

import torch


def versions(*, trial: bool) -> dict[str, str]:
    """Returns the fields of a row. A trial runs on the CPU. The commit is that of STEPGAUGE_COMMIT, if set."""
    return {
        "torch": torch.__version__,
        "device": "cpu" if trial else torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": os.environ.get("STEPGAUGE_COMMIT", ""),
    }
