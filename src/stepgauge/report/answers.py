"""Answers of one or two sentences to the question of a section, computed from its records."""

from collections.abc import Sequence
from typing import Any

from stepgauge.report.comm import comm_spec, transport
from stepgauge.report.figure import short, short_bytes
from stepgauge.report.findings import CHOICES, Pair, is_comparable, pairs
from stepgauge.report.names import SHAPE, describe, flatten, labels, network_name
from stepgauge.report.numbers import number, size_unit
from stepgauge.report.profile import KIND_LABELS
from stepgauge.report.views import undisturbed
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.kernel import OURS
from stepgauge.spec.record import Record
from stepgauge.spec.step import TRAINING_PHASES
from stepgauge.spec.units import NATS_PER_BIT

MAX_CHANGES = 4  # in one sentence
SAME = 0.05  # relative: a smaller change counts as none
NOT_OURS = "Our kernels did not run on this machine, so these rows do not measure them."


def step_answer(records: Sequence[Record]) -> str:
    """Returns the phases of the longest step and the time of the shortest."""
    timed = [r for r in records if r.median("step_ms") and r.provenance == "measured"]
    comparable = list(filter(is_comparable, timed))
    ignores_rows = 0 < len(comparable) < len(timed)
    timed = comparable or timed
    if not timed:
        return ""
    names = dict(zip(map(id, timed), labels(timed), strict=True))
    longest, shortest = (pick(timed, key=_step) for pick in (max, min))
    phases = {phase: longest.median(f"{phase}_ms") or 0.0 for phase in TRAINING_PHASES}
    total = sum(phases.values())
    shares = [f"{phase} {100 * ms / total:.0f} %" for phase, ms in phases.items() if ms]
    if longest is not shortest:
        which = "The longest"
    else:
        which = "The only" if ignores_rows else "A"
    step = "undisturbed step" if ignores_rows else "step"
    text = "All rows were disturbed. " if all(map(is_disturbed, timed)) else ""
    text += f"{which} {step} takes {number(_step(longest))} ms ({names[id(longest)]})"
    text += f": {', '.join(shares)}." if shares else "."
    if longest is not shortest:
        text += f" The shortest takes {number(_step(shortest))} ms ({names[id(shortest)]})."
    return text


def _step(record: Record) -> float:
    return record.median("step_ms") or 0.0


def choice_answer(records: Sequence[Record], field: str) -> str:
    """Returns the speedup of each value of a choice, and its effect on the phases of the best pair."""
    choice = next(choice for choice in CHOICES if field in choice)
    every = pairs(records, choice)
    if not every:
        return "Nothing to compare: no two undisturbed rows differ only in this choice."
    confirmed = [pair for pair in every if pair.is_confirmed]
    unconfirmed = [pair for pair in every if not pair.is_confirmed]
    sentences = [f"{_speedups(confirmed)}."] if confirmed else []
    if unconfirmed:
        sentences.append(f"{_speedups(unconfirmed)} (measured at different times, not in turns).")
    best = min(confirmed or unconfirmed, key=lambda pair: pair.ratio)
    phases = [effect for phase in TRAINING_PHASES if (effect := _effect(best, phase))]
    if phases:
        sentences.append(f"With {best.change} at {_size(best.after)}: {', '.join(phases)}.")
    return " ".join(sentences)


def _speedups(compared: Sequence[Pair]) -> str:
    """Returns how many times as fast the step is with each change, the largest speedup first."""
    by_change: dict[str, list[Pair]] = {}
    for pair in compared:
        by_change.setdefault(pair.change, []).append(pair)
    clauses = []
    for change, own in by_change.items():
        speedups = sorted(1 / pair.ratio for pair in own)
        span = f"{speedups[0]:.2f}" + (f" to {speedups[-1]:.2f}" if len(speedups) > 1 else "")
        clauses.append((-speedups[-1], f"{change} is {span} times as fast as {own[0].instead_of}"))
    return "; ".join(text for _, text in sorted(clauses)[:MAX_CHANGES])


def _effect(pair: Pair, phase: str) -> str:
    before, after = (each.median(f"{phase}_ms") for each in (pair.before, pair.after))
    if not before or not after:
        return ""
    if abs(after / before - 1) < SAME:
        return f"{phase} unchanged"
    return f"{phase} {before / after:.1f} × faster" if after < before else (
        f"{phase} {after / before:.1f} × slower")  # fmt: skip


def _size(record: Record) -> str:
    spec = flatten(record.spec)
    names = ("size", "batch", "context_length")
    return " ".join(f"{name}={spec[name]}" for name in names if name in spec)


def kernel_answer(records: Sequence[Record]) -> str:
    """Returns how often our kernel is the fastest, and its speedup over the best peer."""
    if any(map(fallbacks, records)):
        return NOT_OURS
    ratios = sorted(ratio for r in records if (ratio := r.median("ratio_to_best_peer")))
    if not ratios:
        ours = f"{describe(records[0])} takes {number(records[0].median(f'{OURS}_ms'))} ms"
        return f"{ours} with our kernel; no peer ran to compare it with."
    wins = sum(ratio > 1 for ratio in ratios)
    ceilings = [share for r in records if (share := r.median("fraction_of_ceiling"))]
    ceiling = f" It reaches up to {max(ceilings):.2f} of the device's ceiling." if ceilings else ""
    return (
        f"Our kernel is the fastest in {wins} of {len(ratios)} rows: {ratios[0]:.2f} to "
        f"{ratios[-1]:.2f} times as fast as the best peer.{ceiling}"
    )


def comm_answer(records: Sequence[Record]) -> str:
    """Returns the highest bandwidth and the shortest time of all-reduce, or of the first operation if
    all-reduce was not measured.
    """
    op = "all_reduce"
    if all(record.spec["op"] != op for record in records):
        op = records[0].spec["op"]
    own = [record for record in records if record.spec["op"] == op]
    own = [record for record in own if record.spec["device"] != "cpu"] or own
    timed = [record for record in own if record.median("busbw_gb_per_s")]
    kept, among, why_none = undisturbed(timed)
    if not kept:
        return f"No bandwidth of {op} is given: {why_none}."
    widest = max(kept, key=lambda record: record.median("busbw_gb_per_s") or 0.0)
    quickest = min(kept, key=lambda record: record.median("time_ms") or 0.0)
    return (
        f"{among}{op} reaches at most {number(widest.median('busbw_gb_per_s'))} GB/s of bus "
        f"bandwidth ({_transfer(widest)}). The quickest row takes "
        f"{number(1e3 * (quickest.median('time_ms') or 0.0))} µs ({_transfer(quickest)})."
    )


def _transfer(record: Record) -> str:
    size = record.spec["size_bytes"]
    nbytes = short_bytes(size) + ("iB" if size >= 1024 else " B")
    return f"{nbytes} over {transport(comm_spec(record))}, {record.spec['ranks']} ranks"


def broadcast_answer(records: Sequence[Record]) -> str:
    """Returns the fastest schedule and its speedup over the naive copies."""
    kept, among, why_none = undisturbed(records)
    if not kept:
        return f"No schedule is named as the fastest: {why_none}."
    best = max(kept, key=lambda r: r.median("gb_per_s") or 0.0)
    same = ("gpus", "size_bytes", "device")
    naive = [
        r
        for r in kept
        if r.spec["schedule"] == "naive" and all(r.spec[n] == best.spec[n] for n in same)
    ]
    speedup = ""
    if naive and best.spec["schedule"] != "naive":
        times = (naive[0].median("time_ms") or 0.0) / (best.median("time_ms") or 1.0)
        speedup = f", {times:.1f} times as fast as the naive copies"
    return (
        f"{among}{best.spec['schedule']} is the fastest schedule: "
        f"{number(best.median('gb_per_s'))} GB/s to each of {best.spec['gpus']} devices{speedup}."
    )


def data_parallel_answer(records: Sequence[Record]) -> str:
    """Returns the fastest wrapper of the largest network, compared with a single rank and with
    torch's DDP.
    """
    timed = [record for record in records if record.median("step_ms")]
    ours = [record for record in _of_largest_network(timed) if not fallbacks(record)]
    rows, among, why_none = undisturbed(ours)
    wrapped = [record for record in rows if record.spec["wrapper"] != "none"]
    if not wrapped:
        why_none = why_none or f"{among.lower()}none has a wrapper"
        return f"No wrapper is named as the fastest: {why_none}."
    best = min(wrapped, key=_step)
    network = network_name(best, timed)
    low = " with gradients in bf16" if best.spec.get("reduce_dtype", "own") != "own" else ""
    text = (
        f"{among}{f'at {network} ' if network else ''}on {best.spec['ranks']} ranks, "
        f"{best.spec['wrapper']}{low} is the fastest: {number(_step(best))} ms per step"
    )
    if single := _same_work(best, rows, "none"):
        text += f", {_step(best) / _step(single):.2f} × the time of a single rank"
    torch_ddp = _same_work(best, rows, "torch-ddp")
    if torch_ddp and torch_ddp is not best:
        text += f"; torch-ddp takes {number(_step(torch_ddp))} ms"
    return f"{text[0].upper()}{text[1:]}.{_exposed(best)}"


def _of_largest_network(records: Sequence[Record]) -> list[Record]:
    """Returns the records of the network with the most bytes of gradients on a rank that has them all."""
    nbytes: dict[tuple[Any, ...], float] = {}
    for record in records:
        network = _network(record)
        size = record.median("gradient_bytes") or 0.0
        nbytes[network] = max(size, nbytes.get(network, 0.0))
    largest = max(nbytes, key=nbytes.__getitem__, default=())
    return [record for record in records if _network(record) == largest]


def _network(record: Record) -> tuple[Any, ...]:
    spec = flatten(record.spec)
    return tuple(spec.get(name) for name in ("size", "model", *SHAPE))


def _exposed(record: Record) -> str:
    exposed = record.median("exposed_ms")
    if exposed is None:
        return ""
    if exposed <= 0:
        return " Its exposed communication is too short to measure."
    return f" {number(exposed)} ms of its communication are exposed."


def _same_work(record: Record, others: Sequence[Record], wrapper: str) -> Record | None:
    """Returns the row of the wrapper that does the same work as the record."""

    def work(each: Record) -> dict[str, Any]:
        spec = flatten(each.spec)
        return {name: spec.get(name) for name in ("size", "batch", "context_length", "precision")}

    same = [r for r in others if r.spec["wrapper"] == wrapper and work(r) == work(record)]
    return min(same, key=_step, default=None)


def memory_answer(records: Sequence[Record]) -> str:
    """Returns the largest peak and the three categories that hold most of it."""
    measured = [r for r in records if r.provenance == "measured" and r.median("peak_bytes")]
    if not measured:
        return ""
    largest = max(measured, key=lambda r: r.median("peak_bytes") or 0.0)
    peak = largest.median("peak_bytes") or 1.0
    parts = ("parameters", "optimizer_state", "gradients", "activations", "temporaries")
    sizes = {part: largest.median(f"{part}_bytes") or 0.0 for part in parts}
    shares = ", ".join(
        f"{part.replace('_', ' ')} {100 * size / peak:.0f} %"
        for part, size in sorted(sizes.items(), key=lambda each: -each[1])[:3]
    )
    name = dict(zip(map(id, measured), labels(measured), strict=True))[id(largest)]
    unit = size_unit([peak])
    return f"The largest peak is {unit.format(peak)} ({name}): {shares}."


def train_answer(records: Sequence[Record]) -> str:
    """Returns the first, last and held-out loss of the first two runs, which it names if several ran."""
    sentences = []
    names = [f" of {label}" for label in labels(records)] if len(records) > 1 else [""]
    for name, record in zip(names, records, strict=True):
        first, last, held_out = (record.median(n) for n in ("first_loss", "last_loss", "held_out"))
        if first is None or last is None:
            continue
        is_text = "corpus_bytes" in record.environment
        unit = " nats a token" if is_text else ""
        text = f"The loss{name} fell from {short(first)} to {short(last)}{unit}"
        if held_out:
            loss = held_out * NATS_PER_BIT if is_text else held_out
            bits = f" ({short(held_out)} bits a byte)" if is_text else ""
            text += f"; on held-out data it is {short(loss)}{bits}"
        sentences.append(f"{text}.")
    return " ".join(sentences[:2])


def profile_answer(records: Sequence[Record]) -> str:
    """Returns the three kinds of work that take most of the longest profiled step."""
    largest = max(records, key=_step)
    kinds = {
        name.removeprefix("kind_").removesuffix("_ms"): sample.median
        for name, sample in largest.metrics.items()
        if name.startswith("kind_")
    }
    total = sum(kinds.values())
    if not total:
        return ""
    first = sorted(kinds.items(), key=lambda each: -each[1])[:3]
    shares = ", ".join(
        f"{KIND_LABELS.get(kind, kind)} ({100 * ms / total:.0f} %)" for kind, ms in first
    )
    noun = "kernels" if "idle_ms" in largest.metrics else "operations"
    name = labels(records)[records.index(largest)].removeprefix(f"{largest.kind} ")
    return f"Most of the {noun}' time in a step ({name}) goes to {shares}."
