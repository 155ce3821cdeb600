"""Facts at the top of a page: the machine and software, and how many rows were measured."""

from collections.abc import Sequence

from stepgauge.spec.disturbance import CRITERION, is_disturbed
from stepgauge.spec.hardware import peaks
from stepgauge.spec.model import FLOP_CONVENTION
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB

SOFTWARE = {"Python": "python", "torch": "torch", "Triton": "triton", "stepgauge": "stepgauge"}


def page_facts(records: Sequence[Record]) -> dict[str, str]:
    """Returns `measured_where`, the device's peaks, the FLOP convention and the number of rows."""
    facts = measured_where(records)
    devices = {str(r.environment["device"]) for r in records if r.environment.get("device")}
    peak = peaks(devices.pop()) if len(devices) == 1 else None
    if peak:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in peak.flops.items())
        facts["Dense peak"] = f"{rates} TFLOP/s ({peak.source})"
    if any("tflop_per_s" in record.metrics for record in records):
        facts["FLOPs"] = FLOP_CONVENTION
    ok = [record for record in records if record.status == "ok"]
    measured = sum(record.provenance == "measured" for record in ok)
    disturbed = sum(is_disturbed(r) for r in ok if r.provenance == "measured")
    if disturbed:
        facts["Disturbed"] = (
            f"{disturbed} of {measured} measured rows ({CRITERION}). Findings do not use them."
        )
    if disturbed > measured / 2:
        facts["Disturbed"] += " Measure again with --fresh while nothing else runs."
    counts = {
        "measured": measured,
        "predicted": len(ok) - measured,
        "did not fit or failed": len(records) - len(ok),
    }
    rows = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return {**facts, "Rows": rows or "none"}


def measured_where(records: Sequence[Record]) -> dict[str, str]:
    """Returns device, host, software, commit and time of the measured records, or of predictions if
    nothing was measured. Unknown facts are left out.
    """
    complete = [record for record in records if record.environment]
    complete = [record for record in complete if record.provenance == "measured"] or complete
    if not complete:
        return {}
    environment = complete[-1].environment
    cores = f"{environment['cores']} cores" if environment.get("cores") else ""
    size = f"{environment['device_bytes'] / GIB:.0f} GiB" if environment.get("device_bytes") else ""
    software = [
        f"{name} {environment[key]}" for name, key in SOFTWARE.items() if environment.get(key)
    ]
    hosts = list(dict.fromkeys(environment.get("hosts", [])))
    facts = {
        "Device": _joined(environment.get("device"), size),
        "Host": _joined(environment.get("cpu"), cores, environment.get("os")),
        "Software": _joined(*software),
        "Library": _joined(environment.get("library")),
        "Hosts": _joined(*hosts) if len(hosts) > 1 else "",
        "Commit": _joined(environment.get("commit")),
        "Measured": _first_to_last([record.created for record in complete if record.created]),
    }
    return {name: text for name, text in facts.items() if text}


def _first_to_last(times: Sequence[str]) -> str:
    if not times:
        return ""
    first, last = _minute(min(times)), _minute(max(times))
    return first if first == last else f"{first} to {last}"


def _minute(created: str) -> str:
    """Returns an ISO 8601 time, which is in UTC, without its seconds."""
    return f"{created[:16].replace('T', ' ')} UTC"


def _joined(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
