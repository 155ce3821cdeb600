"""LayoutSpec: valid combinations, and the values that follow from the layout."""

import dataclasses
import re

import pytest

from stepgauge.report.names import labels
from stepgauge.spec.bert import BertSpec
from stepgauge.spec.kinds import completed
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.options import expand
from stepgauge.spec.plan.stages import PartTimes
from stepgauge.spec.record import Record
from stepgauge.spec.user_model import UserModel

NANO = ModelSpec.preset("nano", num_layers=4, num_heads=4, context_length=16)


def layout_spec(layout, **changes):
    model = dataclasses.replace(
        changes.pop("network", NANO),
        **{name: changes.pop(name) for name in list(changes) if name in vars(NANO)},
    )
    return LayoutSpec(model=model, layout=layout, **{"batch": 8, **changes})


def test_values_that_follow_from_a_layout():
    spec = layout_spec("tp2 m2 1f1b pp2 dp2 zero1", accumulation=3)
    assert spec.layout == "pp2 1f1b m2 dp2 zero1 tp2"
    assert (spec.ranks, spec.rank_batch, spec.micro_batch) == (8, 4, 2)
    assert spec.tokens_per_step == 8 * 3 * 16
    assert spec.stages() == [range(3), range(3, 4)], "the head has the FLOPs of two blocks"
    assert spec.schedule().num_micro_batches == 2
    # By time, the head may count as half a block, and the embedding as two.
    times = PartTimes(embedding=2.0, attention=0.4, feed_forward=0.6, head=0.5)
    assert layout_spec("pp2 1f1b m2", balance="time").stages(times) == [range(1), range(1, 4)]
    single = layout_spec("none")
    assert (single.ranks, single.stages(), single.schedule()) == (1, [range(4)], None)


def test_each_layout_is_a_row_with_its_own_name():
    values = {"size": ("nano",), "layout": ("none", "tp2 dp2", "dp2 tp2", "pp2 1f1b m4")}
    specs = list(dict.fromkeys(expand(LayoutSpec, values)))
    records = [Record(kind="layout", spec=dataclasses.asdict(spec)) for spec in specs]
    assert labels(records) == [
        "layout=none",
        "layout=dp2 bucketed tp2",
        "layout=pp2 1f1b m4",
    ]
    assert completed("layout", {"layout": "none"})["accumulation"] == 1
    assert layout_spec("tp2", bucket_mb=5.0).canonical() == layout_spec("tp2")


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("dp3", {}, "dp3 does not divide; choose a multiple of 3"),
        ("pp2 1f1b m4 dp4", {}, "data rank, and m4 does not divide them; choose a multiple of 16"),
        (
            "pp4 zbv m8",
            {},
            "zbv on 4 ranks has 8 stages; the network has 4 blocks, and each stage needs a whole one: "
            "choose num_layers 8 or fewer ranks",
        ),
        ("pp2 dualpipev m2", {}, "dualpipev needs at least 4 on 2 ranks"),
        ("tp8", {}, "tp8 needs a number of heads that 8 divides; the network has 4"),
        (
            "tp4",
            {"num_kv_heads": 3, "num_heads": 12, "d_model": 96},
            "key heads that 4 divides or that divides 4; the network has 3",
        ),
        ("tp2", {"d_ff": 255}, "feed_forward.gate_up: 255 rows cannot be cut into 2"),
        ("tp2", {"context_length": 15}, "context_length is 15, which tp2 does not divide"),
        ("cp2", {}, "needs triton. 'cp2 ulysses' works with every attention"),
        ("cp2", {"context_length": 18}, "18 tokens; context parallel over 2 ranks cuts it into 4"),
        ("cp2 ulysses", {"num_kv_heads": 1}, "num_kv_heads is 1, which the 2 tensor and context"),
        ("cp2 ulysses tp4", {}, "num_kv_heads is 4, which the 8 tensor and context"),
        ("cp2 ulysses", {"context_length": 17}, "17 tokens; 2 ranks that exchange heads have equal"),
        ("tp2 ulysses", {}, "ulysses needs a context axis: add cp2"),
        ("cp2 tp8", {"context_length": 24, "num_heads": 8}, "tp8 with cp2 does not divide"),
        ("tp2 torch-tp", {"tied_head": True}, "tied_head is True, which torch-tp does not support"),
        ("tp2 torch-tp", {"compile": "blocks"}, "fails under torch-tp in torch 2.13: choose off"),
        ("dp2 tp2 torch-tp", {}, "supports no other axis and no overlap: choose 'tp2 torch-tp'"),
        ("pp2 1f1b m2", {"cuda_graphs": True}, "cuda_graphs needs a GPU; device is 'cpu'"),
        (
            "tp2",
            {"cuda_graphs": True, "device": "cuda", "backend": "gloo"},
            "backend is 'gloo', which communicates on the host",
        ),
        ("dp2", {"cuda_graphs": True, "device": "cuda"}, "needs our tensor axis or a pipeline, besides"),
        (
            "tp2 dp2 zero2",
            {"cuda_graphs": True, "device": "cuda"},
            "only the communication of none, naive, overlapped, bucketed, zero1 in the",
        ),
        (
            "tp2",
            {"cuda_graphs": True, "device": "cuda", "accumulation": 2},
            "a recorded step of a tensor axis has one batch: choose 1",
        ),
        (
            "pp2 1f1b m2 dp2 zero3",
            {"cuda_graphs": True, "device": "cuda"},
            "zero3 frees them: choose zero1",
        ),
        ("pp2 zbv m4 tp2", {}, "(tp2) compute together with input gradients; choose 1f1b"),
        ("tp2", {"num_experts": 2, "experts_per_token": 1}, "experts have no tensor parallel yet"),
        ("tp2", {"precision": "fp16"}, "precision is 'fp16'"),
        ("tp2", {"compile": "on"}, "supports only off or blocks"),
        ("tp2 zero1", {}, "zero1 needs a data axis"),
        ("zero3", {}, "zero3 needs a data axis; layout is 'zero3': add dp2 (a comma separates layouts"),
        ("dp2 torch-ddp tp2", {}, "which supports only a data axis"),
        ("dp2 zero3", {"compile": "reduce-overhead"}, "zero3 unshards and frees them"),
        ("dp2 zero3 tp2", {"compile": "on"}, "layout 'dp2 zero3 tp2' supports only off"),
        ("pp2 zbv m4 dp2 zero3", {}, "zero3 needs input and weight gradients together"),
        ("xp2", {}, "layout has 'xp2'"),
    ],
)  # fmt: skip
def test_invalid_combinations_are_refused(layout, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        layout_spec(layout, **changes)


def test_a_step_of_a_users_model_is_not_recorded():
    model = UserModel(file="net.py", factory="make", content="")
    with pytest.raises(ValueError, match="can be recorded for presets only"):
        LayoutSpec(model=model, layout="tp2", device="cuda", cuda_graphs=True)


def test_delayed_weight_gradients_work_with_sharded_gradients():
    assert layout_spec("pp2 zbv m4 dp2 zero2").ranks == 4


def test_tensor_ranks_may_outnumber_key_heads_but_dropout_is_refused():
    assert layout_spec("tp4", num_kv_heads=2).ranks == 4
    bert = BertSpec.preset("bert-tiny", dropout=0.1)
    with pytest.raises(ValueError, match=r"dropout is 0\.1"):
        layout_spec("tp2", network=bert)
    assert layout_spec("dp2", network=bert).ranks == 2
