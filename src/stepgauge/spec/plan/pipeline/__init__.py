"""Pipeline schedules as data: which micro-batch runs where and when.

The same Schedule object is read and written as text, checked, simulated
(cost/pipeline/timeline.py) and executed (parallel/pipeline).
"""

from stepgauge.spec.plan.pipeline.action import Action, Channel, Schedule, ScheduleError
from stepgauge.spec.plan.pipeline.check import Checked, check
from stepgauge.spec.plan.pipeline.lower import lower
from stepgauge.spec.plan.pipeline.schedules import SCHEDULES, build
from stepgauge.spec.plan.pipeline.text import (
    from_csv,
    from_json,
    from_text,
    to_csv,
    to_json,
    to_text,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Channel",
    "Checked",
    "Schedule",
    "ScheduleError",
    "build",
    "check",
    "from_csv",
    "from_json",
    "from_text",
    "lower",
    "to_csv",
    "to_json",
    "to_text",
]
