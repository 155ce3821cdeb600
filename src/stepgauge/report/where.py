"""Where and when records were measured, as a page says it at its top."""

from collections.abc import Sequence

from stepgauge.spec.record import Record


def measured_where(records: Sequence[Record]) -> dict[str, str]:
    """Device, host, software, commit and times of the records; what they do not know is left out."""
    known = [record for record in records if record.environment]
    if not known:
        return {}
    where = known[-1].environment
    software = {"Python": "python", "torch": "torch", "Triton": "triton", "stepgauge": "stepgauge"}
    cores = f"{where['cores']} cores" if where.get("cores") else ""
    size = f"{where['device_bytes'] / 2**30:.0f} GiB" if where.get("device_bytes") else ""
    times = sorted(record.created for record in known if record.created)
    hosts = list(dict.fromkeys(where.get("hosts", [])))
    facts = {
        "Device": _listed(where.get("device"), size),
        "Host": _listed(where.get("cpu"), cores, where.get("os")),
        "Software": _listed(
            *(f"{name} {where[key]}" for name, key in software.items() if where.get(key))
        ),
        "Library": _listed(where.get("library")),
        "Hosts": _listed(*hosts) if len(hosts) > 1 else "",
        "Commit": _listed(where.get("commit")),
        "Measured": " to ".join(dict.fromkeys([*times[:1], *times[-1:]])),
    }
    return {name: told for name, told in facts.items() if told}


def _listed(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
