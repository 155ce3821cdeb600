"""`import stepgauge as sg`: modules measured in this process, runs, and results that display as
tables.
"""

import json
import re
import subprocess
import sys

import pytest
import torch
from torch import nn

import stepgauge as sg
from stepgauge.api import predictions
from stepgauge.api.runs import without_main
from stepgauge.api.show import Result
from stepgauge.spec.store import RunStore, StoreError

QUICK = {"device": "cpu"}


def net():
    return nn.Sequential(nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 3))


def batch():
    return torch.zeros(2, 4, dtype=torch.long), torch.tensor([0, 2])


def test_importing_loads_no_torch_and_dir_lists_all_names():
    code = (
        "import sys, stepgauge as sg; sg.ModelSpec.preset('nano'); print('torch' in sys.modules);"
        "print(all(name in dir(sg) for name in sg.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr
    for module in (sg, sg.kernels, sg.parallel):
        assert all(getattr(module, name) for name in dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'dance'"):
        _ = sg.dance


def test_predict_and_plan_give_the_commands_records_without_torch(stepgauge):
    code = """
import sys, stepgauge as sg
specs = sg.expand(sg.StepSpec, {"size": "nano", "batch": 4, "precision": ["fp32", "bf16"]})
run = sg.predict(specs, hardware="h100-sxm")
(spec,) = sg.expand(sg.PlanSpec, {"size": "nano", "gpus": 2, "global_batch": 8})
rows = sg.plan(spec, hardware="dgx-h100", top=2)
assert "torch" not in sys.modules and len(rows) == 2
for record in [*run, *rows]:
    print(record.to_json())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    nano = ("--size", "nano", "--format", "json", "--hardware")
    _, steps, _ = stepgauge(
        "predict", *nano, "h100-sxm", "--batch", 4, "--precision", "fp32", "bf16"
    )
    _, layouts, _ = stepgauge(
        "plan", *nano, "dgx-h100", "--gpus", 2, "--global-batch", 8, "--top", 2
    )
    assert found == [*json.loads(steps), *json.loads(layouts)]


def test_unpredictable_requests_are_refused():
    (spec,) = sg.expand(sg.StepSpec, {"size": "nano"})
    with pytest.raises(ValueError, match="no hardware file at h100: did you mean dgx-h100 or"):
        sg.predict(spec, hardware="h100")
    with pytest.raises(ValueError, match="has links only"):
        sg.predict(spec, hardware="h200-nvlink")
    (run,) = sg.expand(sg.PlanSpec, {"size": "nano"})
    with pytest.raises(ValueError, match="top is 0"):
        sg.plan(run, hardware="dgx-h100", top=0)
    with pytest.raises(TypeError, match="'small' is not a StepSpec or DataParallelSpec"):
        sg.predict("small", hardware="h100-sxm")
    with pytest.raises(TypeError, match="is not a PlanSpec"):
        sg.plan(spec, hardware="dgx-h100")


def test_timing_a_module_leaves_it_unchanged():
    module = net()
    before = [p.detach().clone() for p in module.parameters()]
    result = sg.time_step(
        module,
        batch(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        warmup=1,
        steps=2,
        seconds=0,
        **QUICK,
    )
    assert result.record.environment["optimizer"] == "user SGD"
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert result["step_ms"] == result.metrics["step_ms"] > 0
    assert result.record.spec["size"] == "Sequential" and result.record.metrics["step_ms"].n == 2
    assert "<td" in result._repr_html_() and "model=Sequential" in repr(result)
    with pytest.raises(ValueError, match="choose one of fp32"):
        sg.time_step(module, batch(), precision="fp7", **QUICK)
    with pytest.raises(ValueError, match="optimizer function returned NoneType"):
        sg.time_step(module, batch(), optimizer=lambda parameters: None, **QUICK)
    for given in (3, nn.Linear):
        with pytest.raises(ValueError, match="or a function that returns one"):
            sg.time_step(given, batch(), **QUICK)


def test_a_missing_loss_a_missing_batch_and_swapped_arguments_are_explained():
    with pytest.raises(TypeError, match=r"positional.*the batch is a pair.*give a loss"):
        sg.time_step(net(), batch(), warmup=0, steps=1, seconds=0, **QUICK)
    with pytest.raises(ValueError, match="give a batch for Sequential"):
        sg.time_step(net(), **QUICK)
    with pytest.raises(ValueError, match=r"^module is a tuple; give"):
        sg.time_step(batch(), net(), **QUICK)


def test_an_unknown_metric_suggests_the_nearest(record):
    timed = Result(record("nano"))
    with pytest.raises(KeyError, match="no metric 'stepms': did you mean 'step_ms'"):
        timed["stepms"]
    with pytest.raises(KeyError, match="it has step_ms, peak_bytes"):
        timed["loss"]


def test_memory_predictions_of_a_module_and_of_a_function_agree():
    """The module's real tensors must not be counted among the fake ones."""
    module = net()
    module[2].weight = nn.Parameter(module[2].weight.detach())
    loss = nn.CrossEntropyLoss()
    of_module = sg.predict_memory(module, batch(), loss=loss, on="cpu")
    of_function = sg.predict_memory(lambda: (net(), batch(), loss), on="cpu")
    assert "KiB" in str(of_module) and "GiB" not in str(of_module)
    assert of_module.record.provenance == "modelled"
    assert of_module["parameters_bytes"] == 4 * (50 * 8 + 32 * 3 + 3)
    for name in ("peak_bytes", "parameters_bytes", "gradients_bytes"):
        assert of_module[name] == of_function[name]
    there = sg.predict_memory(module, batch(), loss=loss, on="sm90")
    assert there["parameters_bytes"] == 2048 + 512 + 512  # as the CUDA allocator rounds
    measured = sg.profile_memory(module, batch(), loss=loss, **QUICK)
    assert measured.prediction.median("peak_bytes") == of_module["peak_bytes"]
    assert "predicted peak" in repr(measured)


def test_a_gpu_is_predicted_after_a_backward_for_functions_that_cannot_be_pickled():
    torch.ones(2, requires_grad=True).sum().backward()
    accelerator = torch.accelerator.current_accelerator()
    predicted = sg.predict_memory(
        net(),
        batch(),
        loss=lambda scores, targets: nn.functional.cross_entropy(scores, targets),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        on="sm90",
    )
    named = sg.predict_memory(net(), batch(), loss=nn.CrossEntropyLoss(), optimizer="sgd")
    assert predicted["peak_bytes"] == named["peak_bytes"] > 0
    assert torch.accelerator.current_accelerator() == accelerator, "the simulated GPU is gone"
    torch.ones(2, requires_grad=True).sum().backward()


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="on is 'h100'; choose one of cpu, sm80, sm90"):
        sg.predict_memory(net(), batch(), on="h100")


def test_a_module_on_the_meta_device_can_be_predicted_but_not_timed():
    loss = nn.CrossEntropyLoss()

    def on_meta():
        with torch.device("meta"):
            return net(), batch(), loss

    there = sg.predict_memory(lambda: (net(), batch(), loss), on="cpu")
    for given in ((on_meta,), (on_meta()[0], batch(), loss)):
        how = {"loss": given[2]} if given[2:] else {}
        found = sg.predict_memory(*given[:2], on="cpu", **how)
        assert found.record.status == "ok" and found["peak_bytes"] == there["peak_bytes"]
    with pytest.raises(ValueError, match="Sequential is on the meta device and has no values"):
        sg.time_step(on_meta, **QUICK)


class Noisy(nn.Linear):
    """Has a buffer, and a generator, which is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__(64, 64)
        self.register_buffer("kept", torch.ones(1000))
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        drawn = torch.rand(64, generator=self.generator) * torch.tensor([2.0] * 64)
        return (super().forward(x) * drawn).sum()


def test_tensors_of_before_the_step_are_not_counted_and_generators_are_copied():
    result = sg.profile_memory(Noisy(), torch.ones(4, 64), optimizer="sgd", **QUICK)
    assert result["parameters_bytes"] == 4 * (64 * 64 + 64)
    assert result["peak_bytes"] == result.prediction.median("peak_bytes")


def test_a_profile_writes_its_trace_and_has_tables(tmp_path):
    result = sg.profile_step(net(), batch(), loss=nn.CrossEntropyLoss(), active=1,
                             folder=tmp_path, **QUICK)  # fmt: skip
    assert (result.folder / "trace.json.gz").exists()
    assert "2 (Linear)" in repr(result)


def test_specs_are_run_opened_and_compared(tmp_path):
    specs = sg.expand(
        sg.StepSpec,
        {
            "size": ("nano",), "context_length": (16,), "batch": (1, 2), "steps": (2,),
            "warmup": (0,), "seconds": (0.0,),
        },
    )  # fmt: skip
    run = sg.run(specs, folder=tmp_path)
    assert [row["batch"] for row in run.rows()] == [1, 2]
    again = sg.open_run(tmp_path)
    assert list(again) == list(run) and again[1].median("step_ms") == again.rows()[1]["step_ms"]
    compared = sg.compare(tmp_path, run)
    assert {row["B / A"] for row in compared} == {1.0}
    assert "| batch |" in repr(run) and "<table>" in compared._repr_html_()
    partly = sg.compare(tmp_path, run[:1])
    assert (
        partly.notes and partly.notes[0] in repr(partly) and partly.notes[0] in partly._repr_html_()
    )
    RunStore(tmp_path / "none").prepare()
    with pytest.raises(ValueError, match="share no row"):
        sg.compare(run, sg.open_run(tmp_path)[:0])
    with pytest.raises(ValueError, match="str is not a spec"):
        sg.run(["step"], folder=tmp_path)


def test_measuring_keeps_the_callers_random_state():
    """The step's seed is set in this process; without a fork, draws after each call are equal."""
    module, inputs = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.ones(2, 4)
    torch.manual_seed(5)
    expected = torch.rand(3)
    calls = (
        lambda: sg.time_step(module, inputs, warmup=0, steps=1, seconds=0, **QUICK),
        lambda: sg.profile_memory(module, inputs, **QUICK),
        lambda: sg.predict_memory(module, inputs, on="cpu"),
    )
    for call in calls:
        torch.manual_seed(5)
        call()
        assert torch.equal(torch.rand(3), expected)


def test_overlapping_runs_restore_main():
    main = sys.modules["__main__"]
    first, second = without_main(), without_main()
    first.__enter__()
    stand_in = sys.modules["__main__"]
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.modules["__main__"] is stand_in is not main, "the second one still needs it"
    second.__exit__(None, None, None)
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize("function", ["predict", "plan"])
def test_a_script_without_a_guard_is_not_run_again(function, monkeypatch):
    """Networks without formulas are traced in another process, which would import the script."""
    main, seen = sys.modules["__main__"], []

    def note_main(*arguments, **options):
        seen.append(sys.modules["__main__"])
        raise ValueError("no prediction")

    monkeypatch.setattr(predictions, "planned" if function == "plan" else "predicted", note_main)
    (spec,) = sg.expand(sg.PlanSpec if function == "plan" else sg.StepSpec, {"size": "nano"})
    with pytest.raises(ValueError, match="no prediction"):
        getattr(sg, function)(spec, hardware="dgx-h100")
    assert seen[0] is not main and sys.modules["__main__"] is main


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("batch", 4.5, "a whole number"),
        ("batch", True, "a whole number"),
        ("batch", None, "a whole number"),
        ("batch", "4", "a whole number"),
        ("seconds", "1", "a number"),
        ("seconds", False, "a number"),
        ("context_length", 3.5, "a whole number"),
        ("qk_norm", 1, "True or False"),
        ("device", 3, "a text"),
        ("size", {"nano"}, "a text"),
        ("model", sg.ModelSpec.preset("nano"), "a text"),
        ("hf_config", 3, "a text"),
    ],
)
def test_values_of_another_type_are_refused(field, value, needed):
    network = {} if field in ("size", "model", "hf_config") else {"size": "nano"}
    with pytest.raises(ValueError, match=re.escape(f"{field} is ")) as refused:
        sg.expand(sg.StepSpec, {**network, field: value})
    assert f"it must be {needed}" in str(refused.value)


def test_whole_numbers_are_accepted_as_numbers():
    (spec,) = sg.expand(sg.StepSpec, {"size": "nano", "seconds": 2})
    assert spec.seconds == 2
    (run,) = sg.expand(sg.PlanSpec, {"size": "nano"})
    with pytest.raises(ValueError, match=re.escape("top is 1.5; it must be a whole number")):
        sg.plan(run, hardware="dgx-h100", top=1.5)


def test_a_loss_function_must_return_a_tensor():
    with pytest.raises(ValueError, match="the loss function returned float, not a tensor"):
        sg.time_step(
            nn.Linear(2, 1),
            (torch.ones(1, 2), torch.ones(1)),
            loss=lambda output, targets: output.sum().item(),
            **QUICK,
        )


def test_a_profile_is_not_started_if_its_folder_cannot_be_written():
    with pytest.raises(StoreError, match="cannot write to /dev/null/x: /dev/null is a file"):
        sg.profile_step(net(), batch(), loss=nn.CrossEntropyLoss(), folder="/dev/null/x", **QUICK)


def test_a_single_field_may_be_ignored_by_name(record):
    compared = sg.compare([record("nano", batch=1)], [record("nano", batch=2)], ignoring="batch")
    assert len(list(compared)) > 0
