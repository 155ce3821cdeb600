"""Tests which candidates are measured, and the reported gain of each choice."""

import dataclasses

import pytest

from stepgauge.report.numbers import Doubtful
from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.record import Record, Sample
from stepgauge.spec.step import StepSpec
from stepgauge.spec.turns import BEGAN, STEP_MS
from stepgauge.tune import search
from stepgauge.tune.choices import ON_GPUS, Space, space
from stepgauge.tune.output import gain_table, sentence
from stepgauge.tune.search import predicted_candidates

# Speedup of a step by each value.
FASTER = {"bf16": 4.0, "on": 1.5, "triton": 0.9, "blocks": 0.75, 16: 1.2, 8: 1.1}
NANO = {"size": ("nano",), "precision": ("fp32", "bf16"), "compile": ("off", "on"),
        "batch": (4, 8, 16), "checkpointing": ("none", "blocks"), "device": ("cpu",)}  # fmt: skip


def made(spec, provenance="measured"):
    speed = 1000.0
    for value in (spec.precision, spec.compile, spec.batch, spec.checkpointing):
        speed *= FASTER.get(value, 1.0)
    out_of_memory = spec.batch == 16 and spec.precision == "fp32" and provenance == "measured"
    return Record(
        kind="step",
        spec=dataclasses.asdict(spec),
        metrics={} if out_of_memory else {"tokens_per_s": Sample.exact(speed, "tokens/s")},
        provenance=provenance,
        status="oom" if out_of_memory else "ok",
    )


def tuned_by(candidates, measure, predict, **settings):
    predicted = predicted_candidates(candidates, predict)
    return search.tune(candidates, predicted, measure, predict, **settings)


class Machine:
    """Measures steps with the speeds of FASTER, and records which ones."""

    def __init__(self):
        self.measured, self.told = [], []

    def measure(self, specs, what):
        self.told.append(what)
        self.measured += [spec for spec in specs if spec not in self.measured]
        return [made(spec) for spec in specs]


def test_without_predictions_one_choice_after_another_is_measured():
    machine, candidates = Machine(), Space(StepSpec, NANO)
    tuned = tuned_by(candidates, machine.measure, lambda spec: None, in_turns=machine.measure)
    won = tuned.winner.spec
    assert [won[n] for n in ("precision", "compile", "batch", "checkpointing")] == [
        "bf16",
        "on",
        16,
        "none",
    ]
    assert tuned.speedup == pytest.approx(4.0 * 1.5 * 1.2)
    assert len(machine.measured) <= 1 + 1 + 1 + 2 + 1 + 3 < tuned.candidates == 24
    gains = {gain.choice: gain.ratio for gain in tuned.gains}
    # bf16 at batch 16 cannot be compared with fp32, which did not fit
    assert gains == {"precision": None, "compile": pytest.approx(1.5), "batch": pytest.approx(1.2)}
    assert "None of 24 candidates could be predicted" in sentence(tuned)
    assert gain_table(tuned).rows[0] == ["precision", "bf16", "fp32", None]


def test_the_best_predictions_are_measured_and_a_wrong_one_does_not_win():
    machine, candidates = Machine(), Space(StepSpec, {**NANO, "precision": ("fp32",)})
    tuned = tuned_by(
        candidates, machine.measure, lambda spec: made(spec, "modelled"),
        in_turns=machine.measure, best=3,
    )  # fmt: skip
    # the two with the fastest predictions did not fit
    assert tuned.winner.spec["batch"] == 8 and tuned.winner.spec["compile"] == "on"
    assert tuned.predicted == tuned.candidates == 12
    assert "12 of 12 candidates were predicted" in sentence(tuned)
    assert {gain.choice for gain in tuned.gains} == {"compile", "batch"}


def test_a_winner_that_is_slower_in_turns_than_the_default_does_not_win():
    machine, candidates = Machine(), Space(StepSpec, NANO)
    compared = []

    def in_turns(specs, what):  # here bf16 is slower: the machine was busy when fp32 was measured
        compared.extend(specs)
        speeds = {"fp32": 1000.0, "bf16": 900.0}
        return [
            dataclasses.replace(
                made(spec),
                metrics={"tokens_per_s": Sample.exact(speeds[spec.precision], "tokens/s")},
                series={STEP_MS: [1.0, 1.0, 1.0]}, environment={BEGAN: "now"},
            )
            for spec in specs
        ]  # fmt: skip

    tuned = tuned_by(candidates, machine.measure, lambda spec: None, in_turns=in_turns)
    assert [(spec.precision, spec.compile) for spec in compared] == [
        ("fp32", "off"),
        ("bf16", "on"),
    ]
    assert tuned.winner == tuned.default and tuned.speedup == 1 and not tuned.gains
    assert sentence(tuned).startswith("1,000 tokens/s (step size=nano")
    assert "This is the baseline. The search found a faster step (step size=nano" in sentence(tuned)
    assert "measured again, alternating: 900.0 tokens/s. " in sentence(tuned)
    never_faster = dataclasses.replace(tuned, overtaken=None)
    assert "Nothing that was measured is faster than the baseline. " in sentence(never_faster)


def test_the_gain_of_a_single_choice_is_measured_in_turns():
    candidates = Space(StepSpec, {**NANO, "precision": ("fp32",), "batch": (4,)})

    def in_turns(specs, what):
        speeds = {"off": 1000.0, "on": 1250.0}
        samples = [Sample.exact(speeds[spec.compile], "tokens/s") for spec in specs]
        return [
            dataclasses.replace(made(spec), metrics={"tokens_per_s": sample})
            for spec, sample in zip(specs, samples, strict=True)
        ]

    tuned = tuned_by(candidates, Machine().measure, lambda spec: None, in_turns=in_turns)
    assert tuned.speedup == 1.25 and [gain.ratio for gain in tuned.gains] == [1.25]


def test_values_without_a_prediction_are_measured_on_the_fastest():
    machine, candidates = Machine(), Space(StepSpec, NANO)
    tuned = tuned_by(
        candidates, machine.measure,
        lambda spec: made(spec, "modelled") if spec.compile == "off" else None,
        in_turns=machine.measure, best=1,
    )  # fmt: skip
    assert tuned.predicted == 12 and tuned.winner.spec["compile"] == "on"
    assert tuned.speedup == pytest.approx(4.0 * 1.5 * 1.2)
    assert tuned.measured_only == [("compile", "on")]
    assert machine.told == [
        "the baseline and the steps predicted to be fastest",
        "the fastest step with compile on, which cannot be predicted",
        "the baseline and the fastest step",
        "the fastest step without each of its choices",  # together, so that one bar has them all
        "the baseline and the fastest step again, alternating",
    ]
    assert "without a prediction: compile on, measured on the fastest" in sentence(tuned)


@pytest.mark.parametrize(("most", "total"), [(24, 24), (20, 3)])
def test_the_progress_of_predictions_counts_to_the_last(monkeypatch, most, total):
    monkeypatch.setattr(search, "MOST_PREDICTED", most)
    heard = []
    predicted = predicted_candidates(
        Space(StepSpec, NANO), made, lambda doing, done, of: heard.append((done, of))
    )
    assert heard == [(done, total) for done in range(total)] and len(predicted) == total


def test_of_many_candidates_the_best_for_each_value_of_the_longest_choice_are_predicted(
    monkeypatch,
):
    monkeypatch.setattr(search, "MOST_PREDICTED", 20)
    machine, candidates = Machine(), Space(StepSpec, NANO)
    requested = []

    def predict(spec):
        requested.append(spec)
        return made(spec, "modelled")

    tuned = tuned_by(candidates, machine.measure, predict, in_turns=machine.measure, best=2)
    assert tuned.winner.spec["batch"] == 16 and tuned.winner.spec["precision"] == "bf16"
    assert tuned.predicted == 3  # one per batch
    assert len({(s.batch, s.precision, s.compile, s.checkpointing) for s in requested}) < 24


def test_no_candidate_that_runs_is_an_error():
    candidates = Space(StepSpec, NANO)
    default = made(candidates.require(candidates.defaults))
    broken = dataclasses.replace(default, status="failed", note="no")

    def fails(specs, what):
        return [broken] * len(specs)

    with pytest.raises(ValueError, match="no candidate ran: no"):
        tuned_by(candidates, fails, lambda spec: None, in_turns=fails)


def test_given_values_override_the_candidates_of_the_device():
    found = space({"size": ("small",), "precision": ("bf16",), "batch": (2, 32)}, device="cuda")
    assert "precision" not in found.choices and found.choices["batch"] == (2, 32)
    assert found.choices["attention"] == ON_GPUS["attention"] and "wrapper" not in found.values
    over = space({"size": ("small",)}, device="cuda", ranks=4)
    assert over.defaults["layout"] == "dp4 bucketed" and over.require(over.defaults).ranks == 4
    assert {"tp4", "tp4 overlap", "pp4 1f1b m16", "dp2 zero3 tp2"} < set(over.choices["layout"])
    assert over.choices["batch"] == (16, 32, 64)  # of all ranks
    # impossible, because fp16's loss scale needs whole gradients
    assert over.spec({**over.defaults, "layout": "dp4 zero3", "precision": "fp16"}) is None
    data = space({"size": ("small",), "wrapper": ("zero1", "zero2")}, device="cuda", ranks=4)
    assert data.kind is DataParallelSpec and "layout" not in data.values
    given = space({"size": ("small",), "layout": ("tp2", "dp2 bucketed")}, device="cpu")
    assert given.choices["layout"] == ("tp2", "dp2 bucketed")
    with pytest.raises(ValueError, match="seconds is no option of a step over 4 ranks"):
        space({"seconds": (1.0,)}, device="cuda", ranks=4)


def test_with_nothing_to_choose_the_sentence_says_so():
    machine = Machine()
    only = {name: values[:1] for name, values in NANO.items()}
    tuned = tuned_by(
        Space(StepSpec, only), machine.measure, lambda spec: None, in_turns=machine.measure
    )
    assert sentence(tuned).endswith("There was nothing to choose: every option has one value.")
    assert "times" not in sentence(tuned)


@pytest.mark.parametrize(
    ("default_ms", "winner_ms", "who"),
    [
        ([2.0, 2.0, 9.0], [1.0, 1.0, 6.0], "the baseline and this step were disturbed"),
        ([2.0, 2.0, 9.0], [1.0] * 3, "the baseline was disturbed"),
        ([2.0] * 3, [1.0, 1.0, 6.0], "this step was disturbed"),
        ([2.0] * 3, [1.0] * 3, ""),
    ],
)
def test_a_gain_over_disturbed_rows_is_not_confirmed(default_ms, winner_ms, who):
    candidates = Space(StepSpec, {**NANO, "precision": ("fp32",), "batch": (4,)})

    def in_turns(specs, what):
        samples = [Sample.of(ms, "ms") for ms in (default_ms, winner_ms)]
        return [
            dataclasses.replace(made(spec), metrics={"step_ms": sample})
            for spec, sample in zip(specs, samples, strict=True)
        ]

    tuned = tuned_by(candidates, Machine().measure, lambda spec: None, in_turns=in_turns)
    text, ((*_, ratio),) = sentence(tuned), gain_table(tuned).rows
    assert isinstance(ratio, Doubtful) == bool(who)
    assert ("times the baseline's (step size" in text) == (not who)
    assert (f"No gain is confirmed (measured: {tuned.speedup:.2f} times the" in text) == bool(who)
    assert who in text
