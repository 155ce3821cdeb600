"""One or two sentences a set of records: what its table and plots show, computed from its rows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepgauge.report.comm import asked, moved_by
from stepgauge.report.figure import short, short_bytes
from stepgauge.report.findings import CHOICES, Pair, is_comparable, pairs
from stepgauge.report.layout import layout_answer
from stepgauge.report.names import describe, flatten, labels
from stepgauge.report.numbers import number, size_unit
from stepgauge.report.profile import SPELLED
from stepgauge.report.views import undisturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.kernel import KERNELS, OURS
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.spec.units import NATS_PER_BIT

MOST_CHANGES = 4  # of a sentence
SAME = 0.05  # relative: a change below it is called none
NOT_OURS = "Our kernels did not run on this machine: nothing here measures them."


def answer(records: Sequence[Record]) -> str:
    """The answer that rows of one kind give; nothing where no row has figures."""
    good = [record for record in records if record.status == "ok"]
    if not good:
        return "No row was measured: the table says why."
    kind = good[0].kind
    good = [record for record in good if record.kind == kind]
    if kind in KERNELS:
        return kernel_answer(good)
    return _ANSWERS[kind](good) if kind in _ANSWERS else ""


def step_answer(records: Sequence[Record]) -> str:
    """Where the longest step goes, and how far the shortest is from it."""
    timed = [r for r in records if r.median("step_ms") and r.provenance == "measured"]
    comparable = list(filter(is_comparable, timed))
    left_out = 0 < len(comparable) < len(timed)
    timed = comparable or timed  # disturbed rows where there are no others
    if not timed:
        return ""
    names = dict(zip(map(id, timed), labels(timed), strict=True))
    longest, shortest = (pick(timed, key=_step) for pick in (max, min))
    phases = {phase: longest.median(f"{phase}_ms") or 0.0 for phase in TRAINING_PHASES}
    whole = sum(phases.values())
    shares = [f"{phase} {100 * ms / whole:.0f} %" for phase, ms in phases.items() if ms]
    parts = f": {', '.join(shares)}" if shares else ""
    alone = "The only" if left_out else "A"
    which = alone if longest is shortest else "The longest"
    step = "undisturbed step" if left_out else "step"
    said = f"{which} {step} takes {number(_step(longest))} ms ({names[id(longest)]}){parts}."
    if longest is not shortest:
        said += f" The shortest takes {number(_step(shortest))} ms ({names[id(shortest)]})."
    return said


def _step(record: Record) -> float:
    return record.median("step_ms") or 0.0


def choice_answer(records: Sequence[Record], field: str) -> str:
    """What each value of a choice makes of the step, and which phases of the longest it changes."""
    choice = next(choice for choice in CHOICES if field in choice)
    every = pairs(records, choice)
    if not every:
        return "No two undisturbed rows differ in this alone: nothing to compare here."
    confirmed = [pair for pair in every if pair.is_confirmed]
    apart = [pair for pair in every if not pair.is_confirmed]
    sentences = [f"{_speeds(confirmed)}."] if confirmed else []
    if apart:
        sentences.append(f"{_speeds(apart)} (measured apart, not in turns).")
    best = min(confirmed or apart, key=lambda pair: pair.ratio)
    phases = ", ".join(_gain(best, phase) for phase in TRAINING_PHASES if _gain(best, phase))
    if phases:
        sentences.append(f"With {best.change} at {_size(best.after)}: {phases}.")
    return " ".join(sentences)


def _speeds(found: Sequence[Pair]) -> str:
    """How many times as fast each change makes the step, the largest first."""
    by_change: dict[str, list[Pair]] = {}
    for pair in found:
        by_change.setdefault(pair.change, []).append(pair)
    told = []
    for change, own in by_change.items():
        speeds = sorted(1 / pair.ratio for pair in own)
        reach = f"{speeds[0]:.2f}" + (f" to {speeds[-1]:.2f}" if len(speeds) > 1 else "")
        told.append((-speeds[-1], f"{change} is {reach} times as fast as {own[0].instead_of}"))
    return "; ".join(text for _, text in sorted(told)[:MOST_CHANGES])


def _gain(pair: Pair, phase: str) -> str:
    before, after = (each.median(f"{phase}_ms") for each in (pair.before, pair.after))
    if not before or not after:
        return ""
    if abs(after / before - 1) < SAME:
        return f"{phase} gains nothing"
    return f"{phase} {before / after:.1f} × faster" if after < before else (
        f"{phase} {after / before:.1f} × slower")  # fmt: skip


def _size(record: Record) -> str:
    spec = flatten(record.spec)
    names = ("size", "batch", "context_length")
    return " ".join(f"{name}={spec[name]}" for name in names if name in spec)


def kernel_answer(records: Sequence[Record]) -> str:
    """In how many rows ours is the fastest, and the least and largest ratio to the best peer."""
    if any(map(fallbacks, records)):
        return NOT_OURS
    ratios = sorted(ratio for r in records if (ratio := r.median("ratio_to_best_peer")))
    if not ratios:
        timed = [f"{describe(r)}: {number(r.median(f'{OURS}_ms'))} ms" for r in records[:1]]
        return f"No peer ran beside ours; {timed[0]}." if timed else ""
    wins = sum(ratio > 1 for ratio in ratios)
    ceilings = [share for r in records if (share := r.median("fraction_of_ceiling"))]
    reach = f" It reaches {max(ceilings):.2f} of the device's ceiling at most." if ceilings else ""
    return (
        f"Ours is the fastest in {wins} of {len(ratios)} rows: {ratios[0]:.2f} to {ratios[-1]:.2f} "
        f"times as fast as the best peer.{reach}"
    )


def comm_answer(records: Sequence[Record]) -> str:
    """The most bandwidth and the least time of all-reduce, else of the first operation."""
    op = "all_reduce"
    if all(record.spec["op"] != op for record in records):
        op = records[0].spec["op"]
    own = [record for record in records if record.spec["op"] == op]
    own = [record for record in own if record.spec["device"] != "cpu"] or own
    timed = [record for record in own if record.median("busbw_gb_per_s")]
    held, among = undisturbed(timed)
    if not held:
        return f"All rows of {op} were disturbed: none says what the links give." if timed else ""
    widest = max(held, key=lambda record: record.median("busbw_gb_per_s") or 0.0)
    soonest = min(held, key=lambda record: record.median("time_ms") or 0.0)
    return (
        f"{among}{op} reaches {number(widest.median('busbw_gb_per_s'))} GB/s of bus bandwidth at "
        f"most ({_moved(widest)}); the quickest row takes "
        f"{number(1e3 * (soonest.median('time_ms') or 0.0))} µs ({_moved(soonest)})."
    )


def _moved(record: Record) -> str:
    return f"{_bytes(record)} over {moved_by(asked(record))}, {record.spec['ranks']} ranks"


def _bytes(record: Record) -> str:
    size = record.spec["size_bytes"]
    return short_bytes(size) + ("iB" if size >= 1024 else " B")


def broadcast_answer(records: Sequence[Record]) -> str:
    """The fastest schedule, beside the naive copies."""
    held, among = undisturbed(records)
    if not held:
        return "All rows were disturbed: no schedule can be called the fastest."
    best = max(held, key=lambda r: r.median("gb_per_s") or 0.0)
    naive = [r for r in held if r.spec["schedule"] == "naive"]
    times = (
        f", {(naive[0].median('time_ms') or 0.0) / (best.median('time_ms') or 1.0):.1f} times as "
        "fast as the naive copies"
        if naive and best.spec["schedule"] != "naive"
        else ""
    )
    return (
        f"{among}{best.spec['schedule']} is the fastest: {number(best.median('gb_per_s'))} GB/s to "
        f"each of {best.spec['gpus']} devices{times}."
    )


def data_parallel_answer(records: Sequence[Record]) -> str:
    """What the quickest wrapper costs beside one rank alone and beside torch's DDP."""
    timed = [record for record in records if record.median("step_ms")]
    ours = [record for record in _of_most_gradients(timed) if not fallbacks(record)]
    rows, among = undisturbed(ours)
    wrapped = [record for record in rows if record.spec["wrapper"] != "none"]
    if not wrapped:
        return "All rows were disturbed: no wrapper can be called the quickest."
    best = min(wrapped, key=_step)
    at = f"{among}at" if among else "At"
    low = " with gradients in bf16" if best.spec.get("reduce_dtype", "own") != "own" else ""
    said = (
        f"{at} size={best.spec['size']} on {best.spec['ranks']} ranks {best.spec['wrapper']}{low} "
        f"is the quickest: {number(_step(best))} ms a step"
    )
    if single := _beside(best, rows, "none"):
        said += f", {_step(best) / _step(single):.2f} × one rank alone"
    torch_ddp = _beside(best, rows, "torch-ddp")
    if torch_ddp and torch_ddp is not best:
        said += f"; torch-ddp takes {number(_step(torch_ddp))} ms"
    return f"{said}.{_exposed(best)}"


def _of_most_gradients(records: Sequence[Record]) -> list[Record]:
    """Those of the largest network, by the bytes of its gradients."""
    nbytes = [record.median("gradient_bytes") or 0.0 for record in records]
    most = max(nbytes, default=0.0)
    return [record for record, size in zip(records, nbytes, strict=True) if size == most]


def _exposed(record: Record) -> str:
    exposed = record.median("exposed_ms")
    if exposed is None:
        return ""
    if exposed <= 0:
        return " Its exposed communication is too short to be measured here."
    return f" Of its communication {number(exposed)} ms are exposed."


def _beside(record: Record, others: Sequence[Record], wrapper: str) -> Record | None:
    """The row of that wrapper which does the same work."""

    def work(each: Record) -> dict[str, Any]:
        spec = flatten(each.spec)
        return {name: spec.get(name) for name in ("size", "batch", "context_length", "precision")}

    found = [r for r in others if r.spec["wrapper"] == wrapper and work(r) == work(record)]
    return min(found, key=_step, default=None)


def memory_answer(records: Sequence[Record]) -> str:
    """What holds the largest peak."""
    measured = [r for r in records if r.provenance == "measured" and r.median("peak_bytes")]
    if not measured:
        return ""
    largest = max(measured, key=lambda r: r.median("peak_bytes") or 0.0)
    peak = largest.median("peak_bytes") or 1.0
    parts = ("parameters", "optimizer_state", "gradients", "activations", "temporaries")
    held = {part: largest.median(f"{part}_bytes") or 0.0 for part in parts}
    shares = ", ".join(
        f"{part.replace('_', ' ')} {100 * size / peak:.0f} %"
        for part, size in sorted(held.items(), key=lambda each: -each[1])[:3]
    )
    name = dict(zip(map(id, measured), labels(measured), strict=True))[id(largest)]
    unit = size_unit([peak])
    return f"The largest peak is {unit.of(peak)} {unit.text} ({name}): {shares}."


def train_answer(records: Sequence[Record]) -> str:
    told = []
    for record in records:
        first, last, held_out = (record.median(n) for n in ("first_loss", "last_loss", "held_out"))
        if first is None or last is None:
            continue
        fell = f"The loss fell from {short(first)} to {short(last)}"
        if "corpus_bytes" in record.environment:
            held = f", held out to {short(held_out * NATS_PER_BIT)}" if held_out else ""
            bits = f" ({short(held_out)} bits a byte)" if held_out else ""
            told.append(f"{fell}{held} nats a token{bits}.")
        else:
            told.append(f"{fell}{f', held out to {short(held_out)}' if held_out else ''}.")
    return " ".join(told[:2])


def profile_answer(records: Sequence[Record]) -> str:
    """The kinds of work that take most of the largest profiled step, and idle time."""
    largest = max(records, key=_step)
    kinds = {
        name.removeprefix("kind_").removesuffix("_ms"): sample.median
        for name, sample in largest.metrics.items()
        if name.startswith("kind_")
    }
    whole = sum(kinds.values())
    if not whole:
        return ""
    first = sorted(kinds.items(), key=lambda each: -each[1])[:3]
    shares = ", ".join(f"{SPELLED.get(kind, kind)} {100 * ms / whole:.0f} %" for kind, ms in first)
    noun = "the kernels' time" if "idle_ms" in largest.metrics else "the operations' time"
    name = labels(records)[records.index(largest)].removeprefix(f"{largest.kind} ")
    return f"Of {noun} in a step ({name}): {shares}."


_ANSWERS: Mapping[str, Callable[[Sequence[Record]], Any]] = {
    "step": step_answer,
    "data-parallel": data_parallel_answer,
    "layout": layout_answer,
    "memory": memory_answer,
    "comm": comm_answer,
    "broadcast": broadcast_answer,
    "train": train_answer,
    "profile": profile_answer,
}
