"""Profiles how long each kernel of a step takes while a collective runs, and while none runs.

    python benchmarks/kernels_beside_collectives.py OUT           # 2.7b, 8 x 512 per rank, 30 s
    python benchmarks/kernels_beside_collectives.py OUT --trial   # on a CPU, to check that it runs
    python benchmarks/kernels_beside_collectives.py OUT --part context --layouts "cp2 zero2"
    python benchmarks/kernels_beside_collectives.py OUT --layouts tp2 \\
        --list benchmarks/validation/device_two_gpus.toml

The last two commands profile rows of a part of layout_rows.py, or of a list of `stepgauge validate`. Two
steps of each row are profiled, then two steps without its communication.

OUT/beside.jsonl has a line per layout, rank and kernel: the number of calls and their mean time in
µs `beside` a collective (more than 90 % of the kernel's time), `partly` beside one, and `alone`
(less than 10 %). OUT/timeline.jsonl has the times of both profiled steps (on a CPU, of the second), in µs since
their first kernel: collectives, gaps between compute kernels, and all kernels in their order. OUT/touched.jsonl has a
line per product or attention kernel that ran beside a collective, see `touched`.
"""

import argparse
import contextlib
import dataclasses
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from layout_rows import PARTS, Rows

from stepgauge.bench.build import LEARNING_RATE
from stepgauge.bench.layout import phases_of
from stepgauge.bench.traced import _align_hosts
from stepgauge.measure.profiler import ProfilerSchedule, profile_phases
from stepgauge.measure.timing import Phases, time_phases
from stepgauge.runtime.launch import launch
from stepgauge.runtime.world import joined_world
from stepgauge.spec.intervals import intersection, merged, total
from stepgauge.spec.layout import Layout
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec
from stepgauge.trace.attribution import Resolver, Work
from stepgauge.trace.events import load
from stepgauge.train.build import batch_for
from stepgauge.train.layout import build_layout_step, stages_of
from stepgauge.train.rank_share import RankShare
from stepgauge.train.step import TrainingStep
from stepgauge.validate.rows import read_list

LAYOUTS = ("dp2 bucketed", "tp2")
STEPS = 2
SHORTEST_GAP_US = 3.0


def spec_of(layout: str, *, trial: bool) -> LayoutSpec:
    """Returns the default step under a layout."""
    size, length = ("nano", 64) if trial else ("2.7b", 512)
    return LayoutSpec(
        model=ModelSpec.preset(size, context_length=length),
        size=size,
        layout=layout,
        batch=16,
        precision="fp32" if trial else "bf16",
        device="cpu" if trial else "cuda",
        warmup=4,
        steps=6,
    )


def specs_of(
    part: str, path: Path | None, layouts: Sequence[str], *, trial: bool
) -> list[LayoutSpec]:
    """Returns the steps to profile: rows of a list or of a part of layout_rows.py that have one of the
    layouts, or the default step under each if both are missing.
    """
    if path is not None:
        found = [as_layout(row.spec) for row in read_list(path, {})]
    elif part:
        found = getattr(Rows(gpus=2, small=trial), part)()
    else:
        return [spec_of(layout, trial=trial) for layout in layouts]
    wanted = [Layout.parse(layout) for layout in layouts]
    return [spec for spec in found if spec.parsed_layout in wanted]


def as_layout(spec: Any) -> LayoutSpec:
    """Returns the row of `bench layout` that does the same step as one of `bench data-parallel`."""
    if isinstance(spec, LayoutSpec):
        return spec
    shared = {field.name for field in dataclasses.fields(LayoutSpec)} - {"layout", "batch"}
    values = {name: getattr(spec, name) for name in shared if hasattr(spec, name)}
    layout = f"dp{spec.ranks} {spec.wrapper}"
    return LayoutSpec(**values, layout=layout, batch=spec.batch * spec.ranks)


def built(spec: LayoutSpec) -> tuple[torch.device, TrainingStep, Phases]:
    """Returns this rank's device, its step, and the phases of the step with its batch."""
    world = joined_world()
    assert world is not None
    device, place = world.device(spec.device), RankShare.of(spec.parsed_layout, world.rank)
    step = build_layout_step(
        spec,
        layout=spec.parsed_layout,
        device=device,
        recording=False,
        stages=stages_of(spec, spec.parsed_layout, device),
        lr=LEARNING_RATE,
    )
    batch = [part.to(device) for part in place.shares(batch_for(spec.network, spec.batch, 1))]
    return device, step, phases_of(step, [batch])


def profile_rank(spec: LayoutSpec) -> list[tuple[str, list[Work], list[float]]]:
    """Runs on each rank. Returns ("communicating" or "without", the work of the profiled steps, ms of
    the timed steps), once with and once without communication.
    """
    device, step, phases = built(spec)
    axes = step.parallel.without_axis.values()
    found = []
    with step.precision.matmul_mode():
        for how, contexts in (("communicating", []), ("without", axes)):
            with contextlib.ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                times = time_phases(phases, device, warmup=spec.warmup, steps=spec.steps)["step"]
                found.append((how, profiled(phases, device), times))
    return found


def profiled(phases: Phases, device) -> list[Work]:
    """Returns what ran on the host and the device in STEPS profiled steps."""
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = profile_phases(
            {"align": _align_hosts, **phases},
            device,
            Path(folder),
            schedule=ProfilerSchedule(wait=0, warmup=1, active=STEPS),
            kernels_only=True,
        )
        return list(Resolver(load(*paths)).work())


def kernels(works: Sequence[Work]) -> list[dict[str, object]]:
    """Returns a row per kernel: calls and mean µs beside collectives, partly beside, and alone."""
    communicating = merged((w.start, w.end) for w in works if w.kind == "communication")
    found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work in works:
        length = max(work.end - work.start, 1e-3)
        share = total(intersection([(work.start, work.end)], communicating)) / length
        where = "beside" if share > 0.9 else "alone" if share < 0.1 else "partly"
        where = "alone" if work.kind == "communication" else where
        found[work.name[:120], work.kind][where].append(length)
    return [
        {"kernel": name, "kind": kind}
        | {f"{where}_calls": len(us) for where, us in places.items()}
        | {f"{where}_us": round(sum(us) / len(us), 2) for where, us in places.items()}
        for (name, kind), places in found.items()
    ]


def timeline(works: Sequence[Work]) -> dict[str, Any]:
    """Returns the collectives, the gaps between compute kernels, and all kernels as (index of the name,
    kind, start, end). On a GPU, the profiler does not mark steps, so that these are of all steps.
    """
    number = max(work.step for work in works)
    last = [work for work in works if work.step == number]
    begin = min(work.start for work in last)
    busy = merged(
        (w.start - begin, w.end - begin) for w in last if w.kind not in ("communication", "host")
    )
    gaps = zip((end for _, end in busy), (start for start, _ in busy[1:]), strict=False)
    names = list(dict.fromkeys(work.name[:80] for work in last))
    return {
        "collectives": [
            (round(w.start - begin, 1), round(w.end - begin, 1))
            for w in last
            if w.kind == "communication"
        ],
        "gaps": [(round(a, 1), round(b, 1)) for a, b in gaps if b - a > SHORTEST_GAP_US],
        "end": [(0.0, round(busy[-1][1], 1))],
        "names": names,
        "works": [
            (names.index(w.name[:80]), w.kind, round(w.start - begin, 1), round(w.end - begin, 1))
            for w in last
            if w.kind != "host"
        ],
    }


def touched(communicating: dict[str, Any], without: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Yields a row per product or attention kernel of a timeline that ran beside a collective.

    us          its time
    without_us  its time in the timeline without communication
    rest_us     how much longer the collective ran that ran when the kernel started; 0 if none did
    left        for each collective that started later, the share of the kernel's time that was left
    """
    ours, theirs = (
        [(t["names"][name], kind, start, end) for name, kind, start, end in t["works"]]
        for t in (communicating, without)
    )
    collectives = [(start, end) for _, kind, start, end in ours if kind == "communication"]
    kernels, others = (
        sorted((w for w in works if w[1] != "communication" and "Mem" not in w[0]), key=start_of)
        for works in (ours, theirs)
    )
    if [name for name, *_ in kernels] != [name for name, *_ in others]:
        print("without communication other kernels run, so touched.jsonl has none of this step")
        return
    for (name, kind, start, end), (*_, first, last) in zip(kernels, others, strict=True):
        beside = [(a, b) for a, b in collectives if a < end and b > start]
        if kind in ("matmul", "attention") and beside:
            yield {
                "kernel": name,
                "us": round(end - start, 1),
                "without_us": round(last - first, 1),
                "rest_us": round(max((b - start for a, b in beside if a <= start), default=0.0), 1),
                "left": [round((end - a) / (end - start), 2) for a, _ in beside if a > start],
            }


def start_of(work: tuple[str, str, float, float]) -> float:
    return work[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--trial", action="store_true", help="small, in two processes of a CPU")
    parser.add_argument(
        "--part",
        default="",
        choices=("", *PARTS),
        help="take the rows of this part of layout_rows.py",
    )
    parser.add_argument("--list", type=Path, help="take the rows of this list")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    arguments = parser.parse_args()
    try:
        specs = specs_of(arguments.part, arguments.list, arguments.layouts, trial=arguments.trial)
    except ValueError as error:
        parser.error(str(error))
    if not specs:
        parser.error(f"no row has one of the layouts {', '.join(arguments.layouts)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (
        (arguments.out / "beside.jsonl").open("w") as rows,
        (arguments.out / "timeline.jsonl").open("w") as lines,
        (arguments.out / "touched.jsonl").open("w") as touched_lines,
    ):
        for spec in specs:
            row = f"{spec.layout} {spec.size} {spec.model.context_length} x {spec.batch}"
            ranks = launch(profile_rank, spec, ranks=spec.ranks, device=spec.device)
            for rank, found in enumerate(ranks):
                timelines = [timeline(works) for _, works, _ in found]
                for kernel in touched(*timelines):
                    touched_lines.write(json.dumps({"row": row, "rank": rank} | kernel) + "\n")
                for (how, works, step_ms), times in zip(found, timelines, strict=True):
                    head = {"row": row, "rank": rank, "how": how}
                    for kernel in kernels(works):
                        rows.write(json.dumps(head | kernel) + "\n")
                    lines.write(json.dumps(head | {"step_ms": step_ms} | times) + "\n")
            print(row, [[how, *times] for how, _, times in ranks[0]])


if __name__ == "__main__":
    main()
