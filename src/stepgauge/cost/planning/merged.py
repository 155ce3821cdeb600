"""One ranking from the plans of the same run with different settings, such as compile modes."""

from collections.abc import Mapping

from stepgauge.cost.planning.planner import Plan
from stepgauge.spec.record import Record


def merged(plans: Mapping[str, Plan], *, noun: str) -> Plan:
    """Returns the rows of all plans as one ranking, and the fastest row of each plan by `noun`.

    plans  by the value of the setting in which they differ; each has rows
    """
    every = list(plans.values())
    names = dict.fromkeys(name for plan in every for name in plan.fastest)
    fastest = {name: _fastest([plan.fastest.get(name, {}) for plan in every]) for name in names}
    fastest[noun] = _fastest([{value: plan.rows[0]} for value, plan in plans.items()])
    screened, fitting = (sum(counts) for counts in zip(*(p.counted for p in every), strict=True))
    return Plan(
        rows=sorted((row for plan in every for row in plan.rows), key=_step_ms),
        fastest=fastest,
        counted=(screened, fitting),
        limit_bytes=every[0].limit_bytes,
        refused={axis: reason for plan in every for axis, reason in plan.refused.items()},
    )


def _fastest(candidates: list[Mapping[str, Record]]) -> dict[str, Record]:
    """Returns the fastest row of each name, the fastest of all first."""
    fastest: dict[str, Record] = {}
    for name, row in (item for rows in candidates for item in rows.items()):
        fastest[name] = min(fastest.get(name, row), row, key=_step_ms)
    return dict(sorted(fastest.items(), key=lambda item: _step_ms(item[1])))


def _step_ms(row: Record) -> float:
    return row.metrics["step_ms"].median
