"""bench comm's table has the columns of nccl-tests."""

import dataclasses

from stepgauge.report.comm import comm_table
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.record import Record


def test_count_root_and_place_are_as_nccl_tests_prints_them():
    wanted = {
        "all_reduce": (1024, -1, "in"),
        "all_gather": (256, -1, "out"),  # of 1024 elements, the part of one of 4 ranks
        "reduce_scatter": (256, -1, "out"),
        "broadcast": (1024, 0, "in"),
        "gather": (256, 0, "out"),
    }
    specs = [CommSpec(op=op, ranks=4, size_bytes=4096) for op in wanted]
    table = comm_table([Record(kind="comm", spec=dataclasses.asdict(spec)) for spec in specs])
    places = [list(table.columns).index(name) for name in ("op", "count", "root", "place")]
    found = {row[places[0]]: tuple(row[place] for place in places[1:]) for row in table.rows}
    assert found == wanted
