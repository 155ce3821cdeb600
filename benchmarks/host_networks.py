"""Compares the host's time of a step with the one that narrow networks predict.

    python benchmarks/host_networks.py OUT                     # a GPU, a minute
    python benchmarks/host_networks.py OUT --device cpu --seconds 1

`calibrate` times the host with networks of 2 and 10 narrow blocks and few tokens. Here these two, two
deeper ones, the network of a row with few tokens ("short") and the row itself take turns for some
seconds.

Appends one line per row to OUT/host_networks.jsonl: for each network and phase the host's ms of every
step, the device's ms of the row, and the time at which each turn began, in seconds.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from stepgauge.bench.build import LEARNING_RATE, build
from stepgauge.calibrate.host import LAYERS, LENGTH, host_times, narrow_network
from stepgauge.measure.environment import environment
from stepgauge.measure.timing import time_phases
from stepgauge.spec.model import ModelSpec
from stepgauge.spec.step import TRAINING_PHASES, StepSpec
from stepgauge.train.build import build_step
from stepgauge.train.data import random_batch

STEPS = 4  # of each network and turn
DEPTHS = (*LAYERS, 24, 40)


def rows(device: str) -> dict[str, StepSpec]:
    """Returns rows that the host bounds."""
    if device == "cpu":
        model = ModelSpec.preset("nano", context_length=64)
        return {
            "nano": StepSpec(model=model, size="nano", batch=2, precision="bf16", device=device)
        }

    def row(size: str, batch: int, context: int, **settings: str) -> StepSpec:
        model = ModelSpec.preset(size, context_length=context)
        return StepSpec(
            model=model, size=size, batch=batch, precision="bf16", device=device, **settings  # type: ignore[arg-type]
        )  # fmt: skip

    return {
        "medium": row("medium", 8, 384),
        "large selective": row("large", 4, 1280, checkpointing="selective"),
    }


def compare(spec: StepSpec, seconds: float) -> dict[str, object]:
    """Returns the times of the row's network and of those that predict it, in turns."""
    device = torch.device(spec.device)
    networks = {
        f"{layers} layers": dataclasses.replace(spec, model=narrow_network(layers), batch=1)
        for layers in DEPTHS
    }
    networks["short"] = dataclasses.replace(
        spec, model=dataclasses.replace(spec.model, context_length=LENGTH), batch=1
    )
    built = {}
    for name, each in networks.items():
        step = build_step(each, lr=LEARNING_RATE)
        vocabulary = each.model.vocab_size
        batch = [part.to(device) for part in random_batch(vocabulary, 1, LENGTH, 0)]
        built[name] = (step, step.phases(batch))
    row_step, batch = build(spec, device)
    built["row"] = (row_step, row_step.phases(batch))

    found: dict[str, dict[str, list[float]]] = {name: {} for name in (*built, "device")}
    turns: list[float] = []
    end = time.perf_counter() + seconds
    while not turns or time.perf_counter() < end:
        warmup = 1 if turns else 5
        turns.append(time.perf_counter())
        for name, (step, phases) in built.items():
            extend(found[name], host_times(step, phases, device, warmup=warmup, steps=STEPS))
        with row_step.precision.matmul_mode():
            extend(found["device"], time_phases(phases, device, warmup=1, steps=STEPS))
    return {"times": found, "turns": turns, "layers": spec.model.num_layers}


def extend(found: dict[str, list[float]], times: Mapping[str, list[float]]) -> None:
    for name, values in times.items():
        found.setdefault(name, []).extend(values)


def show(name: str, result: dict[str, object]) -> None:
    """Prints means by phase: predicted by two narrow networks, short, the row's host, its device."""
    times: dict[str, dict[str, list[float]]] = result["times"]  # type: ignore[assignment]
    few, *deeper = DEPTHS
    for phase in TRAINING_PHASES:
        ms = {key: statistics.fmean(each[phase]) for key, each in times.items()}
        shown = {}
        for many in deeper:
            block = (ms[f"{many} layers"] - ms[f"{few} layers"]) / (many - few)
            shown[f"by {many}"] = ms[f"{few} layers"] + block * (result["layers"] - few)  # type: ignore[operator]
        shown |= {key: ms[key] for key in ("short", "row", "device")}
        print(name, phase, {key: round(value, 3) for key, value in shown.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=12, help="for each row")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "host_networks.jsonl").open("a") as file:
        for name, spec in rows(arguments.device).items():
            result = compare(spec, arguments.seconds)
            show(name, result)
            where = {
                "seconds": arguments.seconds,
                "environment": environment(torch.device(spec.device)),
            }
            file.write(json.dumps({"row": name, **where, **result}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
