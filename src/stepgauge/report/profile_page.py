"""Files of a profile: the analysis, and the HTML page of all traces."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from stepgauge.report.page import Page, Section
from stepgauge.report.profile import answer, blocks, collectives_table
from stepgauge.report.profile_ranks import overlap_table, ranks_table, sentences, shared_table
from stepgauge.report.table import Table
from stepgauge.spec.analysis import AcrossRanks, Analysis
from stepgauge.spec.record import Record
from stepgauge.trace.ranks import rank_numbers

ANALYSIS = "analysis.json"
METHOD = (
    "The step runs under torch.profiler. A kernel belongs to the module whose host call launched it; "
    "a kernel in backward belongs to the module whose forward created the operation. On a device, a "
    "step or phase lasts from the end of the previous one's work to the end of its own. On a CPU, "
    "each operation counts only its own time, without the operations that it calls."
)


def folder_of(record: Record, run: Path) -> Path:
    """Returns the folder in which the run keeps the profile's trace and analysis."""
    digest = hashlib.sha256(record.key.encode()).hexdigest()[:8]
    spec = record.spec
    length = spec["model"].get("context_length")  # a user's model has none
    parts = [spec["size"], *([str(length)] if length else []), spec["precision"], digest]
    return run / "profiles" / "-".join(parts)


def write(analysis: Analysis, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANALYSIS).write_text(analysis.to_json(), encoding="utf-8")


def read(record: Record, run: Path) -> Analysis | None:
    """Returns the record's analysis, or None if it has none."""
    path = folder_of(record, run) / ANALYSIS
    return (
        Analysis.from_json(path.read_text(encoding="utf-8"))
        if record.status == "ok" and path.exists()
        else None
    )


def trace_names(files: Sequence[Path]) -> list[str]:
    """Returns a short name for each file: its name with as many parent folders as are needed to tell
    all files apart, without .json and .json.gz unless two files differ only in that.

    Raises ValueError if a file is given twice.
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


def ranks_tables(analyses: Sequence[Analysis], across: AcrossRanks) -> list[Table]:
    """Returns the tables that compare all ranks."""
    tables = [ranks_table(analyses, across), shared_table(across, analyses[0].steps)]
    return [table for table in tables if table.rows]


def of_one_rank(tables: Sequence[Table], analysis: Analysis) -> list[Table]:
    """Returns the tables of one rank without those that the tables of all ranks replace."""
    replaced = {
        overlap_table([analysis.overlap] if analysis.overlap else []).caption,
        collectives_table(analysis).caption,
    }
    return [table for table in tables if table.caption not in replaced]


def section(title: str, analysis: Analysis | None, note: str = "") -> Section:
    """Returns the section of one profile."""
    question = "Why does a step take this long?"
    if analysis is None:
        return Section(title, question, reason=note or "its analysis is not on disk")
    return Section(title, question, blocks(analysis), answer(analysis), METHOD)


def write_trace_report(
    by_name: Mapping[str, Analysis], folder: Path, across: AcrossRanks | None = None
) -> Path:
    """Writes one page for all traces; with `across`, a section on all ranks comes first."""
    devices = dict.fromkeys(analysis.device for analysis in by_name.values() if analysis.device)
    facts = {"Device": ", ".join(devices) or "not in the trace"}
    if across:
        analyses = list(by_name.values())
        ranks = rank_numbers(analyses)
        facts |= {f"Rank {rank}": name for rank, name in zip(ranks, by_name, strict=True)}
        question = "Which rank makes the others wait, and in which operation?"
        summary = " ".join(sentences(across, analyses))
        sections = [
            Section("All ranks", question, ranks_tables(analyses, across), summary),
            *(section(f"Rank {rank}", each) for rank, each in zip(ranks, analyses, strict=True)),
        ]
    else:
        sections = [section(name, analysis) for name, analysis in by_name.items()]
    folder.mkdir(parents=True, exist_ok=True)
    page = Page(title="stepgauge profile trace", sections=sections, facts=facts)
    return page.write(folder / "report.html")
