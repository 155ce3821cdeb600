"""What to change first: pairs of rows that differ in one choice, ranked by the time that it saves.

Rows measured at different times may differ because the machine's speed has changed. Only rows that
were measured in turns (spec.turns) confirm a finding.
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
from stepgauge.spec.kernel import KERNELS
from stepgauge.spec.kinds import COMMANDS
from stepgauge.spec.model import SIZES
from stepgauge.spec.model_fields import NORMS
from stepgauge.spec.options import flag_of, written
from stepgauge.spec.record import Record
from stepgauge.spec.turns import DEFAULT_TURNS, turns_together
from stepgauge.spec.turns import STEP_MS as TURN_STEP_MS
from stepgauge.spec.user_model import UserModel

# Choices that do not change the trained model: their fields, with the values used as baseline.
CHOICES: tuple[Mapping[str, Any], ...] = (
    {"precision": "fp32"},
    {"compile": "off"},
    {"norm": "rmsnorm", "attention": "sdpa", "loss": "cross-entropy", "optimizer": "adamw"},
    {"wrapper": "torch-ddp"},
    {"reduce_dtype": "own"},
    {"bucket_mb": 25.0},
)
# Checkpointing repeats forward to save memory. A row with it is never faster than one without.
RECOMPUTING = {"checkpointing": "none", "checkpoint_blocks": 1}
# Values whose step does less or other work than the alternatives: rows with them are not compared.
OTHER_WORK: Mapping[str, Collection[str]] = {
    "norm": [name for name, norm in NORMS.items() if norm.function != "rmsnorm"],
    "wrapper": ["none"],
}
CAUTIONS = {
    "precision=bf16-pure": "It keeps weights and optimizer state in bf16: compare the loss.",
    "precision=fp16": "It needs loss scaling: compare the loss.",
}
GRAPHS = "reduce-overhead"
MIN_IDLE = 0.1  # fraction of a step: less idle time is not worth a finding
MAX_FINDINGS = 6


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two measured rows that differ only in one choice."""

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
        """The number of turns in which both rows were measured; 0 if they were not measured in turns."""
        return turns_together((self.before, self.after))

    @property
    def is_confirmed(self) -> bool:
        return self.turns > 1

    @property
    def exceeds_spread(self) -> bool:
        """True if one row is faster in each of its turns than the other in any. For rows that were not
        measured in turns: if the ranges p10 to p90 do not overlap.
        """
        if self.is_confirmed:
            old, new = (each.series[TURN_STEP_MS] for each in (self.before, self.after))
            return max(new) < min(old) or max(old) < min(new)
        before, after = (each.metrics["step_ms"] for each in (self.before, self.after))
        return before.p10 > after.p90 or after.p10 > before.p90


@dataclasses.dataclass(frozen=True)
class Finding:
    """A change and the time that it saves per step.

    command  runs the step with the change; if the finding is not confirmed, measures both in turns
    rows     the two compared rows; empty if nothing was measured with the change
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
    """True if the step was measured without disturbance, and with the kernels that its options name."""
    step = record.metrics.get("step_ms")
    if record.status != "ok" or record.provenance != "measured" or not step or not step.median:
        return False
    return not fallbacks(record) and not is_disturbed(record)


def pairs(records: Sequence[Record], choice: Mapping[str, Any]) -> list[Pair]:
    """Pairs each row that has another value of the choice with the row that has the baseline value."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in filter(is_comparable, records):
        spec = flatten(record.spec)
        if any(spec.get(name) in values for name, values in OTHER_WORK.items()):
            continue
        if any(name in spec for name in choice):
            rest = sorted((n, str(v)) for n, v in spec.items() if n not in choice)
            groups.setdefault((record.kind, *rest), []).append(record)
    result = []
    for group in groups.values():
        base = [r for r in group if all(flatten(r.spec).get(n, v) == v for n, v in choice.items())]
        for record in group:
            if base and record not in base:
                result.append(_pair(base[0], record, list(choice)))
    return result


def _pair(before: Record, after: Record, fields: Sequence[str]) -> Pair:
    old, new = flatten(before.spec), flatten(after.spec)
    changed = [name for name in fields if old.get(name) != new.get(name)]
    change, instead_of = (
        " ".join(f"{name}={spec.get(name)}" for name in changed) for spec in (new, old)
    )
    return Pair(before, after, change, instead_of)


def findings(records: Sequence[Record]) -> list[Finding]:
    """Returns the best change of each choice and the device's idle time: first confirmed findings, then
    by milliseconds saved.
    """
    steps = [record for record in records if record.kind == "step" or _is_data_parallel(record)]
    by_choice = [pairs(steps, choice) for choice in CHOICES]
    # A row that another choice has made slower is not a fair baseline.
    slowed = {id(pair.after) for of_choice in by_choice for pair in of_choice if pair.saved_ms < 0}
    slowed |= {id(pair.after) for pair in pairs(steps, RECOMPUTING)}
    best = [
        _best([pair for pair in of_choice if id(pair.before) not in slowed])
        for of_choice in by_choice
    ]
    ranked = [finding for finding in (_idle(records), *best) if finding]
    return sorted(ranked, key=lambda each: (not each.is_confirmed, -each.saved_ms))[:MAX_FINDINGS]


def _is_data_parallel(record: Record) -> bool:
    """True for a data-parallel step of a preset on GPUs. Ranks that share a CPU cannot compare
    wrappers.
    """
    network = record.spec.get("model", {}).get("network", "")
    is_gpu = str(record.spec.get("device", "")).startswith("cuda")
    return record.kind == "data-parallel" and is_gpu and not network


def _best(compared: Sequence[Pair]) -> Finding | None:
    """Returns the pair that saves most, preferring pairs without a caution and confirmed ones. None if
    no pair saves more than its spread.
    """
    saving = [pair for pair in compared if pair.exceeds_spread and pair.saved_ms > 0]
    saving = [pair for pair in saving if pair.change not in CAUTIONS] or saving
    saving = [pair for pair in saving if pair.is_confirmed] or saving
    if not saving:
        return None
    most = max(saving, key=lambda pair: pair.saved_ms)
    sentences = [_comparison(most), _certainty(most), CAUTIONS.get(most.change, "")]
    return Finding(
        most.saved_ms,
        most.change,
        " ".join(filter(None, sentences)),
        command(most.after) if most.is_confirmed else command_in_turns(most),
        most.is_confirmed,
        (most.before, most.after),
    )


def _comparison(pair: Pair) -> str:
    return (
        f"A step takes {number(_ms(pair.before))} ms with {pair.instead_of} and "
        f"{number(_ms(pair.after))} ms with {pair.change}: {1 / pair.ratio:.2f} times as fast "
        f"({_label_without(pair.before, pair.change)})."
    )


def _certainty(pair: Pair) -> str:
    """Returns a sentence on how the two rows were measured."""
    if pair.is_confirmed:
        return f"Both were measured in turns, {pair.turns} times each."
    return (
        f"Each was measured only once, {_time_between(pair)}: the machine's speed may have changed "
        "in between."
    )


def _time_between(pair: Pair) -> str:
    first, last = sorted((pair.before.created, pair.after.created))
    if not first:
        return "one after the other"
    seconds = (datetime.fromisoformat(last) - datetime.fromisoformat(first)).total_seconds()
    return f"{duration(seconds)} apart"


def _label_without(record: Record, change: str) -> str:
    """Returns the row's `key=value` label without the fields that the change names."""
    changed = {each.partition("=")[0] for each in change.split()}
    parts = labels([record])[0].split()[1:]
    return " ".join(part for part in parts if part.partition("=")[0] not in changed)


def _idle(records: Sequence[Record]) -> Finding | None:
    """Returns the profile whose device waits longest for the host, which CUDA graphs may avoid.

    The profiler slows down the host, so idle time is computed from the step without the profiler:
    its time minus the time in which the device was busy in the profile.
    """
    waits = []
    for record in records:
        idle, profiled, step = (
            record.median(name) for name in ("idle_ms", "profiled_step_ms", "step_ms")
        )
        if record.kind == "profile" and idle and profiled and step:
            wait = step - (profiled - idle)
            waits += [(wait, step, record)] if wait > MIN_IDLE * step else []
    if not waits:
        return None
    wait, step, record = max(waits, key=lambda each: each[0])
    text = (
        f"The device is busy for {number(step - wait)} of the step's {number(step)} ms and waits for "
        f"the host for the rest ({_label_without(record, 'compile=')}). CUDA graphs launch all "
        "kernels at once, which can save up to this much."
    )
    modes = f"{flatten(record.spec).get('compile', 'off')} {GRAPHS}"
    compared = command(record, "bench step", compile=modes, turns=DEFAULT_TURNS)
    return Finding(wait, f"compile={GRAPHS}", text, compared, is_confirmed=False)


def command_in_turns(pair: Pair) -> str:
    """Returns the command that measures both rows of the pair in turns."""
    old, new = flatten(pair.before.spec), flatten(pair.after.spec)
    declared = {field.name: field for field in declared_fields(pair.after)}
    changed = [each.partition("=")[0] for each in pair.change.split()]
    both = {
        name: f"{written(declared[name], old[name])} {written(declared[name], new[name])}"
        for name in changed
    }
    return command(pair.after, **both, turns=DEFAULT_TURNS)


def command(record: Record, verb: str = "", **changed: Any) -> str:
    """Returns the command that measures the row. `changed` gives other values for some fields."""
    spec = flatten(record.spec)
    if record.kind in KERNELS:
        return f"stepgauge {COMMANDS[record.kind]}"
    options, replaced = _network_options(record)
    declared = {field.name: field for field in declared_fields(record)}
    own = [name for name in label_fields(record)[0] if name not in {*replaced, *changed}]
    values = {name: shlex.quote(written(declared[name], spec[name])) for name in own} | changed
    for name, value in values.items():
        flag = flag_of(declared[name]) if name in declared else name.replace("_", "-")
        options.append(f"--{flag}" + ("" if value == "true" else f" {value}"))
    return " ".join(["stepgauge", verb or COMMANDS[record.kind], *options])


def _network_options(record: Record) -> tuple[list[str], set[str]]:
    """Returns the option for a network that is not a preset, and the fields that it replaces."""
    network, size = record.spec.get("model", {}), record.spec.get("size", "custom")
    if network.get("network") == UserModel.network:
        return [f"--model {network['file']}:{network['factory']}"], {"size", "batch"}
    if size == "custom":  # not a value of --size: the options of the shape give it
        return [], {"size"}
    if size in SIZES:
        return [], set()
    # The record does not know the path of the user's file.
    return ["--hf-config CONFIG.json"], {"size", *network} - {"context_length"}
