"""bench comm's table has the columns of nccl-tests."""

import dataclasses

from stepgauge.cli.console import print_records
from stepgauge.report.comm import comm_table, fit_table, links
from stepgauge.report.kinds import answer, kind_of
from stepgauge.spec.comm import CommSpec
from stepgauge.spec.record import Record, Sample


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


def test_settings_are_columns_only_if_rows_differ_in_them():
    def table(*specs):
        return comm_table([Record(kind="comm", spec=dataclasses.asdict(spec)) for spec in specs])

    same = table(CommSpec(size_bytes=4096), CommSpec(size_bytes=8192))
    assert same.for_display().columns[:4] == ["op", "over", "ranks", "size B"]
    assert same.caption.startswith("type float32, timing pipelined; busbw")
    other = table(CommSpec(), CommSpec(dtype="bfloat16"))
    assert other.for_display().columns[:5] == ["op", "over", "ranks", "type", "size B"]
    assert other.caption.startswith("timing pipelined; busbw")


def test_requested_statistics_are_columns(capsys):
    metrics = {"time_ms": Sample.of([1.0, 2.0, 6.0], "ms")}
    row = Record(kind="comm", spec=dataclasses.asdict(CommSpec()), metrics=metrics)
    table = kind_of("comm").table([row], statistics=("mean",))
    assert dict(zip(table.columns, table.rows[0], strict=True))["time ms mean"] == 3.0
    those_of_files = kind_of("step").csv_statistics
    print_records([row], "csv", statistics=those_of_files)
    assert "time ms p90" in capsys.readouterr().out
    print_records([row], "csv")
    assert capsys.readouterr().out.strip() == comm_table([row]).to("csv").strip()


def fitted(times):
    """The table of a fit through {bytes: ms}, and a remark column."""
    records = []
    for size, ms in times.items():
        spec = dataclasses.asdict(CommSpec(op="all_reduce", ranks=2, size_bytes=size))
        metrics = {"time_ms": Sample.exact(ms, "ms")}
        records.append(Record(kind="comm", spec=spec, metrics=metrics))
    return fit_table(links(records))


def test_a_fit_warns_of_a_negative_alpha_and_of_an_error_from_one_size():
    sizes = [2**power for power in range(20, 26)]
    table = fitted({size: size / 2**20 - 0.5 for size in sizes})
    (row,) = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert row["α µs"] == 0 and "α is not positive" in row["remark"]
    (row, *_) = fitted({size: 1 + size / 2**20 for size in sizes[:4]}).rows
    assert row[-1] == "an error comes from a single size"


def test_the_answer_names_its_rows_and_ignores_disturbed_ones():
    def row(algorithm, size, time, busbw):
        spec = dataclasses.asdict(CommSpec(algorithm=algorithm, size_bytes=size))
        metrics = {"time_ms": Sample.of(time, "ms"), "busbw_gb_per_s": Sample.exact(busbw, "GB/s")}
        return Record(kind="comm", spec=spec, metrics=metrics)

    disturbed = row("ring", 10 * 2**20, [1.0, 5.0, 9.0], 2.079)
    rows = [row("library", 10 * 2**20, [8.8], 1.19), row("ring", 2**16, [0.3875], 0.17), disturbed]
    assert answer(rows) == (
        "Of the undisturbed rows, all_reduce reaches at most 1.190 GB/s of bus bandwidth (10 MiB over "
        "gloo, 2 ranks). The quickest row takes 387.5 µs (64 KiB over gloo (our ring), 2 ranks)."
    )
    assert answer([disturbed]) == ("No bandwidth of all_reduce is given: all rows were disturbed.")
