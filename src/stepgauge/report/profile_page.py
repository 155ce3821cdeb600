"""What a profile leaves on disk: the analysis, and one page of all traces."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepgauge.report.page import Section, page
from stepgauge.report.profile import answer, blocks, collectives_table
from stepgauge.report.profile_ranks import overlap_table, ranks_table, sentences, shared_table
from stepgauge.report.table import Table
from stepgauge.spec.analysis import AcrossRanks, Analysis
from stepgauge.spec.record import Record
from stepgauge.trace.ranks import numbers

ANALYSIS = "analysis.json"
METHOD = (
    "The step runs under torch.profiler. A kernel belongs to the host call that launched it, a "
    "backward kernel to the part of the model whose forward made its operation. On a device, a "
    "step lasts from the end of the work of the step before to the end of its own, and so does a "
    "phase. On a CPU every operation counts for what it did itself."
)


def folder_of(record: Record, run: Path) -> Path:
    """Where the run keeps the profile's trace and analysis."""
    digest = hashlib.sha256(record.key.encode()).hexdigest()[:8]
    spec = record.spec
    length = spec["model"].get("context_length")  # a user's model has none
    named = [spec["size"], *([str(length)] if length else []), spec["precision"], digest]
    return run / "profiles" / "-".join(named)


def write(found: Analysis, place: Path) -> None:
    """The analysis."""
    place.mkdir(parents=True, exist_ok=True)
    (place / ANALYSIS).write_text(found.to_json(), encoding="utf-8")


def read(record: Record, run: Path) -> Analysis | None:
    """The analysis beside the record; None for a row that has none."""
    path = folder_of(record, run) / ANALYSIS
    return (
        Analysis.from_json(path.read_text(encoding="utf-8"))
        if record.status == "ok" and path.exists()
        else None
    )


def trace_names(files: Sequence[Path]) -> list[str]:
    """Each file's name after as many of its folders as it takes to tell all apart, without its
    endings where these tell none apart.

    Raises ValueError for a file that is given twice.
    """
    full = [(file.parent.resolve() / file.name).parts[1:] for file in files]
    paths = [(*folders, name.removesuffix(".gz").removesuffix(".json")) for *folders, name in full]
    if len(set(paths)) < len(paths):
        paths = full  # trace.json and trace.json.gz are two files
    for depth in range(1, max(map(len, paths)) + 1):
        shown = ["/".join(path[-depth:]) for path in paths]
        if len(set(shown)) == len(shown):
            return shown
    twice = next(file for file, path in zip(files, paths, strict=True) if paths.count(path) > 1)
    raise ValueError(f"FILE is {twice} twice; give each trace once")


def ranks_tables(found: Sequence[Analysis], across: AcrossRanks) -> list[Table]:
    """The tables that are of all ranks."""
    shown = [ranks_table(found, across), shared_table(across, found[0].steps)]
    return [table for table in shown if table.rows]


def of_one_rank(tables: Sequence[Table], found: Analysis) -> list[Table]:
    """Those that the tables of all ranks do not say better."""
    said = {
        overlap_table([found.overlap] if found.overlap else []).caption,
        collectives_table(found).caption,
    }
    return [table for table in tables if table.caption not in said]


def section(title: str, found: Analysis | None, note: str = "") -> Section:
    """One profile's part of the page."""
    question = "Why does a step take this long?"
    if found is None:
        return Section(title, question, reason=note or "its analysis is not on disk")
    return Section(title, question, blocks(found), answer(found), METHOD)


def write_trace_report(
    found: Mapping[str, Analysis], folder: Path, across: AcrossRanks | None = None
) -> Path:
    """One page of all traces, by name; what they say together first."""
    devices = dict.fromkeys(one.device for one in found.values() if one.device)
    facts = {"Device": ", ".join(devices) or "not in the trace"}
    if not across:
        sections = [section(name, one) for name, one in found.items()]
        return write_page("stepgauge profile trace", sections, facts, folder)
    together = list(found.values())
    ranks = numbers(together)
    facts |= {f"Rank {rank}": name for rank, name in zip(ranks, found, strict=True)}
    question = "Which rank makes the others wait, and in what?"
    said = " ".join(sentences(across, together))
    sections = [
        Section("All ranks", question, ranks_tables(together, across), said),
        *(section(f"Rank {rank}", one) for rank, one in zip(ranks, together, strict=True)),
    ]
    return write_page("stepgauge profile trace", sections, facts, folder)


def write_page(
    title: str, sections: Sequence[Section], facts: Mapping[str, str], folder: Path
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "report.html"
    path.write_text(page(title, sections, facts=facts), encoding="utf-8")
    return path
