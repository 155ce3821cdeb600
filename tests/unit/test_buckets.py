"""Plans of buckets, owners and launches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepgauge.spec.plan.buckets import MB, Bucket, Parameter, plan_buckets
from stepgauge.spec.plan.shards import plan_launches, plan_owners

parameters = st.lists(
    st.builds(
        Parameter,
        name=st.sampled_from([f"p{i}" for i in range(12)]),
        numel=st.integers(1, 2 * MB),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        device=st.sampled_from(["cpu", "cuda:0"]),
    ),
    max_size=20,
    unique_by=lambda parameter: parameter.name,
)
caps = st.one_of(st.none(), st.floats(0, 10))


def parameter(name, megabytes, **fields):
    return Parameter(name=name, numel=int(megabytes * MB / 4), **fields)


@given(parameters, caps, caps)
def test_every_parameter_is_in_one_bucket(order, cap, first):
    buckets = plan_buckets(order, cap_mb=cap, first_mb=first)
    planned = [name for bucket in buckets for name in bucket.names]
    assert sorted(planned) == sorted(p.name for p in order)


@given(parameters, caps)
def test_a_bucket_has_one_dtype_and_device_and_reaches_the_cap_with_its_last_gradient(order, cap):
    for bucket in plan_buckets(order, cap_mb=cap):
        assert len({(p.dtype, p.device) for p in bucket.parameters}) == 1
        if cap is not None and len(bucket.parameters) > 1:
            assert bucket.bytes - bucket.parameters[-1].bytes < cap * MB
            assert all(p.bytes < cap * MB for p in bucket.parameters)


@given(parameters, caps)
def test_buckets_are_ordered_by_their_last_gradient(order, cap):
    arrival = [p.name for p in reversed(order)]
    last = [max(map(arrival.index, bucket.names)) for bucket in plan_buckets(order, cap_mb=cap)]
    assert last == sorted(last)


def test_the_plan_of_a_small_network():
    order = [
        parameter("embedding", 8),
        parameter("norm", 0.1),
        parameter("a", 2),
        parameter("b", 1),
        parameter("c", 3),
    ]
    plan = plan_buckets(order, cap_mb=5, first_mb=1)
    assert [bucket.names for bucket in plan] == [("c",), ("b", "a", "norm"), ("embedding",)]


def test_no_cap_gives_one_bucket_per_dtype_and_a_cap_of_0_one_per_gradient():
    order = [parameter("a", 1), parameter("b", 2, dtype="bfloat16"), parameter("c", 3)]
    assert [b.names for b in plan_buckets(order, cap_mb=None)] == [("b",), ("c", "a")]
    assert [b.names for b in plan_buckets(order, cap_mb=0)] == [("c",), ("b",), ("a",)]


def test_gradients_of_different_owners_are_in_different_buckets():
    order = [parameter(name, 1) for name in "abcd"]
    plan = plan_buckets(order, cap_mb=None, owners={"a": 0, "b": 1, "c": 0, "d": 1})
    assert [(b.names, b.owner) for b in plan] == [(("d", "b"), 1), (("c", "a"), 0)]


@pytest.mark.parametrize("field", ["cap_mb", "first_mb"])
def test_a_negative_cap_is_refused(field):
    with pytest.raises(ValueError, match=f"{field} is -1; it must be at least 0"):
        plan_buckets([], **{"cap_mb": 1, field: -1})


@given(parameters, st.integers(1, 9))
def test_owners_are_balanced_by_elements(order, ranks):
    plan = plan_owners(order, ranks=ranks)
    unique = {p.name: p for p in order}
    assert set(plan.owners) == set(unique)
    assert sum(plan.elements) == sum(p.numel for p in unique.values())
    largest = max((p.numel for p in unique.values()), default=0)
    assert max(plan.elements) - min(plan.elements) <= largest
    for rank in range(ranks):
        assert plan.elements[rank] == sum(
            unique[n].numel for n, owner in plan.owners.items() if owner == rank
        )


def test_neighbours_have_different_owners():
    """At any time, what the ranks have received differs by at most the largest gradient, although
    assigning the largest first could give whole blocks to one rank.
    """
    names = [
        (f"{block}.{name}", size)
        for block in range(4)
        for name, size in (("a", 1), ("b", 3), ("c", 2))
    ]
    order = [parameter(name, size) for name, size in names]
    owners = plan_owners(order, ranks=2).owners
    received = [0, 0]
    for p in reversed(order):
        received[owners[p.name]] += p.bytes
        assert abs(received[0] - received[1]) <= 3 * MB


def test_buckets_for_different_owners_are_launched_together():
    def launches(*owners, devices="c" * 11):
        buckets = [
            Bucket((parameter("p", 1, device=d),), owner)
            for owner, d in zip(owners, devices, strict=False)
        ]
        places = {id(bucket): place for place, bucket in enumerate(buckets)}
        return [[places[id(bucket)] for bucket in launch] for launch in plan_launches(buckets)]

    assert launches(0, 1, 1, 0, 0, 0, 1) == [[0, 1], [2, 3], [4, 5, 6]]
    assert launches(0, 1, 2, 2, 2, 0) == [[0, 1, 2], [3, 4, 5]]
    assert launches(1, 0, 0, 0) == [[0, 1], [2], [3]]  # no other owner follows
    assert launches(*[0] * 10, 1) == [[*range(8)], [8, 9, 10]]  # at the limit of 4 per owner
    assert launches(0, 1, 1, 0, devices="cdcc") == [[0], [1], [2, 3]]
    assert launches(None, None) == [[0], [1]]
    assert launches() == []


@given(parameters, caps, st.integers(1, 5))
def test_every_bucket_is_launched_once_in_the_order_of_the_plan(order, cap, ranks):
    buckets = plan_buckets(order, cap_mb=cap, owners=plan_owners(order, ranks=ranks).owners)
    assert [bucket for launch in plan_launches(buckets) for bucket in launch] == [*buckets]


def test_a_later_group_goes_to_the_rank_that_owns_least():
    assert plan_owners([parameter("late", 1)], ranks=2, held=[10, 3]).owners == {"late": 1}
