"""Tensor parallel plans: which rows each rank has, patterns of names, tables of stages."""

import pytest

from stepgauge.spec.model import ModelSpec
from stepgauge.spec.plan.tensor import Cut, Rule, Section, grouped, is_by_token, matched
from stepgauge.spec.plan.tensor_tables import table_of


def test_sections_are_cut_between_units():
    queries, keys = Section(32, unit=4), Section(8, unit=4, shared=True)
    cut = Cut(0, (queries, keys))
    assert cut.parts(40, 1, 2) == [slice(16, 32), slice(36, 40)]
    # With four ranks, each key head is on the two ranks whose query heads read it.
    assert [cut.parts(40, rank, 4) for rank in range(4)] == [
        [slice(0, 8), slice(32, 36)],
        [slice(8, 16), slice(32, 36)],
        [slice(16, 24), slice(36, 40)],
        [slice(24, 32), slice(36, 40)],
    ]
    assert (keys.copies(2), keys.copies(4), queries.copies(4)) == (1, 2, 1)


def test_without_sections_the_parts_differ_by_at_most_one_row():
    parts = [Cut(0).parts(11, rank, 4)[0] for rank in range(4)]
    assert [part.stop - part.start for part in parts] == [2, 3, 3, 3]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]


@pytest.mark.parametrize(
    ("cut", "ranks", "message"),
    [
        (Cut(0, (Section(12, unit=4),)), 2, "3 units of 4 rows cannot be cut into 2 equal parts"),
        (Cut(0, (Section(12, unit=4, shared=True),)), 4, "3 units of 4 rows"),
        (Cut(1, (Section(12),)), 5, "12 rows cannot be cut into 5 equal parts"),
        (Cut(0, (Section(8), Section(5))), 2, "its sections have 13 rows, and it has 12"),
        (Cut(0), 13, "12 rows cannot be cut into 13 parts"),
    ],
)
def test_a_dim_that_cannot_be_cut_is_refused(cut, ranks, message):
    with pytest.raises(ValueError, match=message):
        cut.parts(12, 0, ranks)


def test_a_star_in_a_pattern_matches_one_part_of_a_name():
    names = ["a", "a.0", "a.0.up", "a.1.up", "a.1.up.inner"]
    rules = matched({"a.*.up": Rule("column"), "a.0": Rule("split")}, names)
    assert [name for name, _ in rules] == ["a.0", "a.0.up", "a.1.up"]
    with pytest.raises(ValueError, match=r"'b\.\*' matches no module"):
        list(matched({"b.*": Rule("row")}, names))
    with pytest.raises(ValueError, match="kind is 'rows'; choose one of column, row"):
        Rule("rows")


def test_a_stage_has_the_rules_of_its_modules():
    spec = ModelSpec(num_layers=4, block="post-norm")
    assert table_of(spec, range(2))["blocks.0"] == Rule("split", by_token=True)
    assert "blocks.1" not in table_of(spec, range(1, 3)), "the stage receives pieces"
    assert not {"embedding", "head", "norm"} & table_of(spec, range(1, 3)).keys()
    assert "head" in table_of(spec, range(2, 4))
    experts = ModelSpec(num_experts=2, experts_per_token=1)
    with pytest.raises(ValueError, match="experts have no tensor parallel yet"):
        table_of(experts)


def test_small_pieces_of_neighbours_are_one_product_unless_the_step_is_replayed():
    senders = [0, 3, 2]  # to rank 1 of 4
    assert grouped(senders, rows=2048) == [range(1), range(2, 4)]
    assert grouped(senders, rows=4096) == [range(1), range(3, 4), range(2, 3)]
    assert grouped(senders, rows=2048, replayed=True) == grouped(senders, rows=4096)


def test_a_table_cuts_by_token_if_all_its_rules_of_the_stream_say_so():
    split, norm = Rule("split", by_token=True), Rule("sequence")
    assert is_by_token({"a": split}, {"b": Rule("row")})
    assert not is_by_token({"a": split}, {"b": norm}) and not is_by_token({"b": Rule("row")})
    with pytest.raises(ValueError, match="by_token is for the kinds split and sequence"):
        Rule("head", by_token=True)
