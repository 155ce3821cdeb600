"""What to change first: rows that differ in one choice alone, ranked by the milliseconds it saves.

Rows that were measured apart may differ because the machine's speed has changed between: only those
that were measured in turns (spec.turns) confirm a finding.
"""

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from stepgauge.report.names import declared_fields, flatten, label_fields, labels
from stepgauge.report.numbers import duration, number
from stepgauge.spec.disturbance import is_disturbed
from stepgauge.spec.fallbacks import fallbacks
from stepgauge.spec.model import SIZES
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.options import flag_of, written
from stepgauge.spec.record import Record
from stepgauge.spec.turns import STEP_MS as TURN_STEP_MS
from stepgauge.spec.turns import USUAL, turns_together
from stepgauge.spec.user_model import UserModel

# What a user may choose without changing what is trained: fields, and what each is compared with.
CHOICES: tuple[Mapping[str, Any], ...] = (
    {"precision": "fp32"},
    {"compile": "off"},
    {"norm": "rmsnorm", "attention": "sdpa", "loss": "cross-entropy", "optimizer": "adamw"},
    {"wrapper": "torch-ddp"},
    {"reduce_dtype": "own"},
    {"bucket_mb": 25.0},
)
# Computes the forward pass again, to hold less: such a row saves no time beside the one without it.
RECOMPUTING = {"checkpointing": "none", "checkpoint_blocks": 1}
# Values of these that do less than their peers, or something else.
OTHER_WORK: Mapping[str, Collection[str]] = {
    "norm": [name for name, function in NORMS.items() if function != "rmsnorm"],
    "wrapper": ["none"],
}
CAUTIONS = {
    "bf16-pure": "Weights and optimizer state are bf16 then: compare the loss.",
    "fp16": "Needs loss scaling: compare the loss.",
}
GRAPHS = "reduce-overhead"
LEAST_IDLE = 0.1  # of a step: less is not worth a finding
MOST = 6
COMMANDS = {
    "step": "bench step",
    "data-parallel": "bench data-parallel",
    "layout": "bench layout",
    "profile": "profile step",
    "memory": "profile memory",
    "comm": "bench comm",
    "train": "train",
}


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two measured rows that differ in one choice alone."""

    before: Record
    after: Record
    change: str  # "precision=bf16"
    instead_of: str  # "precision=fp32"

    @property
    def saved_ms(self) -> float:
        return _ms(self.before) - _ms(self.after)

    @property
    def ratio(self) -> float:
        return _ms(self.after) / _ms(self.before)

    @property
    def turns(self) -> int:
        """How many turns both rows had together; 0 where they were measured apart."""
        return turns_together((self.before, self.after))

    @property
    def is_confirmed(self) -> bool:
        return self.turns > 1

    @property
    def exceeds_spread(self) -> bool:
        """Of rows measured in turns: every turn of one is quicker than all of the other. Else the
        ranges p10 to p90 do not meet.
        """
        if self.is_confirmed:
            old, new = (each.series[TURN_STEP_MS] for each in (self.before, self.after))
            return max(new) < min(old) or max(old) < min(new)
        before, after = (each.metrics["step_ms"] for each in (self.before, self.after))
        return before.p10 > after.p90 or after.p10 > before.p90


@dataclasses.dataclass(frozen=True)
class Finding:
    """What to change, what that saves a step, and the command that does it; where it is not
    confirmed, the command that measures whether it is so.

    rows  the two that it rests on; none where nothing was measured with the change
    """

    saved_ms: float
    title: str
    text: str
    command: str
    is_confirmed: bool
    rows: tuple[Record, ...] = ()


def _ms(record: Record) -> float:
    return record.metrics["step_ms"].median


def is_comparable(record: Record) -> bool:
    """Whether there is a time of a step, measured without disturbance, and it is what its options
    say.
    """
    step = record.metrics.get("step_ms")
    if record.status != "ok" or record.provenance != "measured" or not step or not step.median:
        return False
    return not fallbacks(record) and not is_disturbed(record)


def pairs(records: Sequence[Record], choice: Mapping[str, Any]) -> list[Pair]:
    """Each row with another value of the choice, beside the one with the usual value."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in filter(is_comparable, records):
        spec = flatten(record.spec)
        if any(spec.get(name) in values for name, values in OTHER_WORK.items()):
            continue
        if any(name in spec for name in choice):
            rest = sorted((n, str(v)) for n, v in spec.items() if n not in choice)
            groups.setdefault((record.kind, *rest), []).append(record)
    found = []
    for group in groups.values():
        base = [r for r in group if all(flatten(r.spec).get(n, v) == v for n, v in choice.items())]
        for record in group:
            if base and record not in base:
                found.append(_pair(base[0], record, list(choice)))
    return found


def _pair(before: Record, after: Record, fields: Sequence[str]) -> Pair:
    old, new = flatten(before.spec), flatten(after.spec)
    changed = [name for name in fields if old.get(name) != new.get(name)]
    told = (" ".join(f"{name}={spec.get(name)}" for name in changed) for spec in (new, old))
    return Pair(before, after, *told)


def findings(records: Sequence[Record]) -> list[Finding]:
    """The change of each choice that saves most, and idle time: what is confirmed first, and then by
    milliseconds.
    """
    steps = _steps(records)
    by_choice = [pairs(steps, choice) for choice in CHOICES]
    # A row that another choice has made slower is no fair start for a change.
    slowed = {id(pair.after) for of_choice in by_choice for pair in of_choice if pair.saved_ms < 0}
    slowed |= {id(pair.after) for pair in pairs(steps, RECOMPUTING)}
    found = [_idle(records)]
    for of_choice in by_choice:
        found.append(_best([pair for pair in of_choice if id(pair.before) not in slowed]))
    told = [finding for finding in found if finding]
    return sorted(told, key=lambda each: (not each.is_confirmed, -each.saved_ms))[:MOST]


def _steps(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.kind == "step" or _is_of_gpus(record)]


def _is_of_gpus(record: Record) -> bool:
    """Whether a row is of GPUs: processes that share a CPU say nothing of wrappers."""
    network = record.spec.get("model", {}).get("network", "")
    is_gpu = str(record.spec.get("device", "")).startswith("cuda")
    return record.kind == "data-parallel" and is_gpu and not network


def _best(found: Sequence[Pair]) -> Finding | None:
    """The confirmed pair that saves most, else one that is not; nothing where none saves more than
    its spread.
    """
    saving = [pair for pair in found if pair.exceeds_spread and pair.saved_ms > 0]
    saving = [pair for pair in saving if not _cautions(pair)] or saving
    saving = [pair for pair in saving if pair.is_confirmed] or saving
    if not saving:
        return None
    most = max(saving, key=lambda pair: pair.saved_ms)
    return Finding(
        most.saved_ms,
        most.change,
        " ".join([_told(most), _certainty(most), *_cautions(most)]),
        command(most.after) if most.is_confirmed else command_in_turns(most),
        most.is_confirmed,
        (most.before, most.after),
    )


def _told(pair: Pair) -> str:
    return (
        f"{number(_ms(pair.before))} ms a step with {pair.instead_of}, {number(_ms(pair.after))} ms "
        f"with {pair.change}: {1 / pair.ratio:.2f} times as fast "
        f"({_where(pair.before, pair.change)})."
    )


def _certainty(pair: Pair) -> str:
    """How the two rows were measured, which is what their comparison rests on."""
    if pair.is_confirmed:
        return f"The rows were measured in turns, {pair.turns} times each."
    return (
        f"The rows were measured once each, {_apart(pair)}: the machine's speed may have changed "
        "in between."
    )


def _apart(pair: Pair) -> str:
    """How long after one another the two rows were measured."""
    first, last = sorted((pair.before.created, pair.after.created))
    if not first:
        return "one after the other"
    seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    return f"{duration(seconds)} apart"


def _cautions(pair: Pair) -> list[str]:
    """What the change does beside saving time."""
    return [said for value, said in CAUTIONS.items() if pair.change == f"precision={value}"]


def _where(record: Record, change: str) -> str:
    """The row in `key=value`, without what the change names."""
    changed = {each.partition("=")[0] for each in change.split()}
    parts = labels([record])[0].split()[1:]
    return " ".join(part for part in parts if part.partition("=")[0] not in changed)


def _idle(records: Sequence[Record]) -> Finding | None:
    """Of profiles: the one whose device waits longest for the host, which CUDA graphs may spare.

    The profiler itself slows the host, so that idle time is taken from the stopwatch: the step
    without the profiler less the time in which the device was busy under it.
    """
    waits = []
    for record in records:
        idle, profiled, step = (
            record.median(name) for name in ("idle_ms", "profiled_step_ms", "step_ms")
        )
        if record.kind == "profile" and idle and profiled and step:
            wait = step - (profiled - idle)
            waits += [(wait, step, record)] if wait > LEAST_IDLE * step else []
    if not waits:
        return None
    wait, step, record = max(waits, key=lambda each: each[0])
    text = (
        f"The device works {number(step - wait)} of the step's {number(step)} ms and waits for the "
        f"host in the rest ({_where(record, 'compile=')}). CUDA graphs launch all kernels at once: "
        "they can save up to that, which has to be measured."
    )
    modes = f"{flatten(record.spec).get('compile', 'off')} {GRAPHS}"
    compared = command(record, "bench step", compile=modes, turns=USUAL)
    return Finding(wait, f"compile={GRAPHS}", text, compared, is_confirmed=False)


def command_in_turns(pair: Pair) -> str:
    """The command that measures both rows of the pair, in turns."""
    old, new = flatten(pair.before.spec), flatten(pair.after.spec)
    known = {field.name: field for field in declared_fields(pair.after)}
    changed = [each.partition("=")[0] for each in pair.change.split()]
    both = {
        name: f"{written(known[name], old[name])} {written(known[name], new[name])}"
        for name in changed
    }
    return command(pair.after, **both, turns=USUAL)


def command(record: Record, verb: str = "", **changed: Any) -> str:
    """The command that measures such a row, with other values for the fields `changed`."""
    spec = flatten(record.spec)
    if not (verb or record.kind in COMMANDS):
        return f"stepgauge bench kernel {record.kind}"
    told, named = _network_options(record)
    known = {field.name: field for field in declared_fields(record)}
    own = [name for name in label_fields(record)[0] if name not in named and name not in changed]
    values = {name: shlex.quote(written(known[name], spec[name])) for name in own} | changed
    for name, value in values.items():
        flag = flag_of(known[name]) if name in known else name.replace("_", "-")
        told.append(f"--{flag}" + ("" if value == "true" else f" {value}"))
    return " ".join(["stepgauge", verb or COMMANDS[record.kind], *told])


def _network_options(record: Record) -> tuple[list[str], set[str]]:
    """The option of a network that is no preset, and the fields in whose place it stands."""
    network, size = record.spec.get("model", {}), record.spec.get("size", "custom")
    if network.get("network") == UserModel.network:
        return [f"--model {network['file']}:{network['factory']}"], {"size", "batch"}
    if size == "custom":  # no value of the option: the widths say it
        return [], {"size"}
    if size in SIZES:
        return [], set()
    # Its file is known to the user alone.
    return ["--hf-config CONFIG.json"], {"size", *network} - {"context_length"}
