"""Measures the peak memory of each step of torch's DDP, from the first on.

    python benchmarks/ddp_peak.py OUT            # on two GPUs, three times 6 steps, about 30 s
    python benchmarks/ddp_peak.py OUT --trial    # in two processes of a CPU, to check that it runs

DDP divides its gradients into new buckets in the second step. Are the old ones still there then?

Appends a line per run and rank to OUT/ddp_peak.jsonl, with the peak of each step in GiB.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from kernels_beside_collectives import built
from versions import versions

from stepgauge.measure import devices
from stepgauge.runtime.launch import launch
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.model import ModelSpec

RUNS, STEPS = 3, 6


def spec_of(*, trial: bool) -> LayoutSpec:
    """Returns a step whose predicted peak was too low: 20 blocks 2304 wide, 3 x 4096 tokens per rank."""
    model = ModelSpec.preset("small", context_length=4096)
    model = dataclasses.replace(model, d_model=2304, d_ff=6144, num_layers=20, num_heads=18)
    return LayoutSpec(
        model=ModelSpec.preset("nano", context_length=64) if trial else model,
        size="nano" if trial else "custom",
        layout="dp2 torch-ddp",
        batch=6,
        precision="fp32" if trial else "bf16",
        device="cpu" if trial else "cuda",
    )


def peaks(spec: LayoutSpec) -> list[float]:
    """Runs on each rank. Returns the peak of each step in GiB."""
    device, _, phases = built(spec)
    found = []
    for _ in range(STEPS):
        devices.reset_peak_memory(device)
        for phase in phases.values():
            phase()
        devices.synchronize(device)
        found.append(next(iter(devices.peak_memory(device).values())) / 2**30)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--trial", action="store_true", help="small, in two processes of a CPU")
    arguments = parser.parse_args()
    if not arguments.trial and torch.cuda.device_count() < 2:
        parser.error("it needs two GPUs")
    arguments.out.mkdir(parents=True, exist_ok=True)
    spec = spec_of(trial=arguments.trial)
    with (arguments.out / "ddp_peak.jsonl").open("a") as lines:
        for run in range(RUNS):
            for rank, found in enumerate(launch(peaks, spec, ranks=2, device=spec.device)):
                row = {"run": run, "rank": rank, "peak_gib": [round(peak, 2) for peak in found]}
                row |= versions(trial=arguments.trial)
                print(row)
                lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
