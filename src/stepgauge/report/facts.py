"""Where and on what records were measured, and how many held: the facts that head a page."""

from collections.abc import Sequence

from stepgauge.spec.disturbance import CRITERION, is_disturbed
from stepgauge.spec.hardware import peaks
from stepgauge.spec.model import FLOP_CONVENTION
from stepgauge.spec.record import Record
from stepgauge.spec.units import GIB

SOFTWARE = {"Python": "python", "torch": "torch", "Triton": "triton", "stepgauge": "stepgauge"}


def page_facts(records: Sequence[Record]) -> dict[str, str]:
    """`measured_where`, peaks and conventions that figures need, and how many rows there are."""
    facts = measured_where(records)
    devices = {str(r.environment["device"]) for r in records if r.environment.get("device")}
    known = peaks(devices.pop()) if len(devices) == 1 else None
    if known:
        rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in known.flops.items())
        facts["Dense peak"] = f"{rates} TFLOP/s ({known.source})"
    if any("tflop_per_s" in record.metrics for record in records):
        facts["FLOPs"] = FLOP_CONVENTION
    ok = [record for record in records if record.status == "ok"]
    measured = sum(record.provenance == "measured" for record in ok)
    disturbed = sum(is_disturbed(r) for r in ok if r.provenance == "measured")
    if disturbed:
        facts["Spread"] = (
            f"{disturbed} of {measured} measured rows are disturbed ({CRITERION}). No finding rests "
            "on them."
        )
    counts = {
        "measured": measured,
        "predicted": len(ok) - measured,
        "did not fit or failed": len(records) - len(ok),
    }
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return {**facts, "Rows": told or "none"}


def measured_where(records: Sequence[Record]) -> dict[str, str]:
    """Device, host, software, commit and times of the records; what they do not know is left out."""
    known = [record for record in records if record.environment]
    if not known:
        return {}
    where = known[-1].environment
    cores = f"{where['cores']} cores" if where.get("cores") else ""
    size = f"{where['device_bytes'] / GIB:.0f} GiB" if where.get("device_bytes") else ""
    software = [f"{name} {where[key]}" for name, key in SOFTWARE.items() if where.get(key)]
    hosts = list(dict.fromkeys(where.get("hosts", [])))
    facts = {
        "Device": _listed(where.get("device"), size),
        "Host": _listed(where.get("cpu"), cores, where.get("os")),
        "Software": _listed(*software),
        "Library": _listed(where.get("library")),
        "Hosts": _listed(*hosts) if len(hosts) > 1 else "",
        "Commit": _listed(where.get("commit")),
        "Measured": _first_to_last([record.created for record in known if record.created]),
    }
    return {name: told for name, told in facts.items() if told}


def _first_to_last(times: Sequence[str]) -> str:
    if not times:
        return ""
    first, last = _minute(min(times)), _minute(max(times))
    return first if first == last else f"{first} to {last}"


def _minute(created: str) -> str:
    """Of an ISO 8601 time in UTC."""
    return f"{created[:16].replace('T', ' ')} UTC"


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
