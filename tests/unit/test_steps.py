"""Specs of the same step for different commands agree with each other."""

import dataclasses

import pytest

from stepgauge.spec.data_parallel import DataParallelSpec
from stepgauge.spec.kinds import completed
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import expand
from stepgauge.spec.record import Record
from stepgauge.spec.step import StepSpec
from stepgauge.spec.steps import as_layout_record, as_layout_step, kind_for, under, work_of

NANO = ModelSpec.preset("nano")
OVER_DATA = DataParallelSpec(model=NANO, ranks=2, wrapper="zero1", batch=3, precision="bf16")
IN_LAYOUT = LayoutSpec(model=NANO, layout="dp2 zero1", batch=6, precision="bf16")
ONE = StepSpec(model=NANO, batch=3, precision="bf16")
OPTIONS = {"size": ("nano",), "batch": (6,)}


def test_a_data_rank_does_the_work_of_one_process():
    assert work_of(OVER_DATA) == work_of(IN_LAYOUT) == work_of(ONE)
    assert OVER_DATA.tokens_per_step == IN_LAYOUT.tokens_per_step == 2 * ONE.tokens_per_step
    assert OVER_DATA.parsed_layout == IN_LAYOUT.parsed_layout
    accumulation = ONE.accumulation, OVER_DATA.accumulation, IN_LAYOUT.accumulation
    assert accumulation == (1, 1, 1)


def test_a_stage_of_a_pipeline_computes_a_micro_batch():
    spec = LayoutSpec(model=NANO, layout="dp2 pp2 1f1b m3", batch=12)
    assert work_of(spec).batch == 2


def test_every_step_converts_to_a_layout_step():
    assert as_layout_step(OVER_DATA) == as_layout_step(IN_LAYOUT) == IN_LAYOUT
    assert as_layout_step(ONE) == LayoutSpec(model=NANO, batch=3, precision="bf16")


@pytest.mark.parametrize("spec", [OVER_DATA, IN_LAYOUT, ONE])
def test_the_record_of_every_step_converts_as_its_spec_does(spec):
    record = as_layout_record(Record.of(spec, note="kept"))
    assert record.note == "kept"
    as_step = Record.of(as_layout_step(spec))
    assert (record.kind, completed(record.kind, record.spec)) == (as_step.kind, as_step.spec)


def test_a_record_keeps_what_no_layout_step_has():
    forward = as_layout_record(Record.of(StepSpec(model=NANO, phases="forward")))
    assert forward.spec["phases"] == "forward" and "data" not in forward.spec
    silent = Record.of(DataParallelSpec(model=NANO, ranks=2, wrapper="none"))
    assert as_layout_record(silent) == silent  # its ranks do not train one network


def test_a_record_of_an_older_version_may_lack_fields():
    for spec in (StepSpec(model=NANO), DataParallelSpec(model=NANO, ranks=2, wrapper="zero1")):
        record = Record.of(spec)
        for name in {"phases", "data", "bucket_mb"} & set(record.spec):
            older = {key: value for key, value in record.spec.items() if key != name}
            found = as_layout_record(dataclasses.replace(record, spec=older))
            assert found.spec["layout"] == as_layout_record(record).spec["layout"]


@pytest.mark.parametrize("text", ["none", "dp2 zero1", "dp2 tp2", "pp2 1f1b m3"])
def test_options_convert_to_the_command_that_measures_the_layout(text):
    layout = Layout.parse(text)
    (spec,) = expand(kind_for(layout), under(layout, kind_for(layout), OPTIONS))
    assert spec.parsed_layout == layout
    assert as_layout_step(spec).batch == 6


def test_a_batch_that_data_ranks_do_not_divide_is_refused():
    layout = Layout.parse("dp2")
    with pytest.raises(ValueError, match="batch is 5, which 2 data ranks do not divide"):
        under(layout, kind_for(layout), {"batch": (4, 5)})


@pytest.mark.parametrize("text", ["zero3", "torch-ddp", "pp1 zero1"])
def test_a_wrapper_without_a_data_axis_is_refused(text):
    """Its step was predicted and validated as that of one process."""
    layout = Layout.parse(text)
    wrapper = text.split()[-1]
    with pytest.raises(ValueError, match=f"{wrapper} needs a data axis; .*: add dp2"):
        under(layout, kind_for(layout), OPTIONS)


def test_options_that_only_bench_layout_has_select_a_layout_spec():
    assert {kind_for(Layout.parse(text), ["batch"]) for text in ("none", "dp2")} == {
        StepSpec, DataParallelSpec,
    }  # fmt: skip
    for option in ("accumulation", "balance"):
        assert {kind_for(Layout.parse(text), [option]) for text in ("none", "dp2")} == {LayoutSpec}
    assert kind_for(Layout.parse("dp2"), ["bucket_mb"]) is DataParallelSpec
