"""Layouts as text and as objects, and the table of wrappers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgauge.spec.layout import WRAPPERS, Layout, sent_bytes
from stepgauge.spec.layout_rules import schedule_of
from stepgauge.spec.plan.pipeline import SCHEDULES

sizes = st.integers(1, 64)


@given(
    sizes,
    sizes,
    sizes,
    sizes,
    sizes,
    st.sampled_from(list(WRAPPERS)),
    st.sampled_from(sorted(SCHEDULES)),
)
def test_a_layout_is_parsed_from_its_own_text(
    data, context, tensor, pipeline, parts, wrapper, schedule
):
    layout = Layout(
        data=data,
        context=context,
        ulysses=context > 2,
        wrapper="bucketed" if data * context > 1 and wrapper == "none" else wrapper,
        tensor=tensor,
        pipeline=pipeline,
        schedule=schedule if pipeline > 1 else "",
        microbatches=parts if pipeline > 1 else 1,
    )
    assert Layout.parse(str(layout)) == layout
    assert layout.ranks == data * context * tensor * pipeline
    places = [layout.place(rank) for rank in (0, layout.ranks - 1)]
    assert [sum(place.values()) for place in places] == [
        0,
        data + context + tensor + pipeline - 4,
    ]


def test_words_may_be_in_any_order_and_the_default_wrapper_is_bucketed():
    assert Layout.parse("tp2 zero3 dp2") == Layout(data=2, wrapper="zero3", tensor=2)
    assert str(Layout.parse("m8, 1F1B tp2 pp2")) == "pp2 1f1b m8 tp2"
    assert str(Layout.parse("dp4")) == "dp4 bucketed"
    assert str(Layout.parse("cp2 tp2")) == "bucketed cp2 tp2"
    assert Layout.parse("cp4 dp2 zero3").num_replicas == 8
    assert Layout.parse("none") == Layout() and str(Layout()) == "none"
    assert Layout.parse("pp2 zbv m4 dp2").sizes == {"pipeline": 2, "data": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp0", "layout has 'dp0'; the number must be at least 1"),
        ("dp2 none", "dp2 needs a wrapper"),
        ("cp2 none", "cp2 needs a wrapper"),
        ("pp2", "pp2 has no schedule: add one of gpipe, 1f1b, .* such as 'pp2 1f1b m2'"),
        ("pp4 m8", "such as 'pp4 1f1b m8'"),
        ("1f1b m4", "schedule 1f1b needs a pipeline: add pp2"),
        ("m8", "m8 needs a pipeline"),
        ("dp2 dp4", "gives data twice"),
        ("dp2 zero1 zero2", "gives wrapper twice"),
        ("pp2 1f1b v3 m4", "v3 needs a schedule with several stages per rank: interleaved or izb"),
        ("pp2 interleaved v0 m4", "layout has 'v0'; the number must be at least 1"),
        ("dp2 zer1", "layout has 'zer1'; did you mean zero1"),
        ("dp2 zero4", r"layout has 'zero4'; did you mean zero3 or zero2 or zero1\?"),
        ("pp2 dualpipe m4", r"layout has 'dualpipe'; did you mean dualpipev"),
        ("xp2", "layout has 'xp2'; choose dpN, cpN, tpN, ppN, mN, vN with a number"),
        ("dp", "layout has 'dp'"),
    ],
)
def test_invalid_layouts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


def test_each_zero_stage_shards_one_more_part():
    shards = {
        name: [part for part in ("optimizer state", "gradients", "weights") if w.shards(part)]
        for name, w in WRAPPERS.items()
    }
    assert shards["bucketed"] == []
    assert shards["zero1"] == shards["torch-zero1"] == ["optimizer state"]
    assert shards["zero2"] == ["optimizer state", "gradients"]
    assert shards["zero3"] == shards["torch-fsdp"] == ["optimizer state", "gradients", "weights"]


def test_one_rank_sends_nothing():
    for name in WRAPPERS:
        assert sent_bytes(name, gradient_bytes=8, weight_bytes=8, ranks=1) == 0
    assert sent_bytes("zero3", gradient_bytes=100, weight_bytes=50, ranks=4) == 0.75 * 200


def test_an_interleaved_schedule_has_the_requested_stages_per_rank():
    three = Layout.parse("pp2 interleaved v3 m4")
    assert str(three) == "pp2 interleaved v3 m4" and Layout.parse(str(three)) == three
    assert schedule_of(three).num_stages == 6
    assert Layout.parse("pp2 interleaved v2 m4") == Layout.parse("pp2 interleaved m4")
    assert schedule_of(Layout.parse("pp2 interleaved m4")).num_stages == 4
