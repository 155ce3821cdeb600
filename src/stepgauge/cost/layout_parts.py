"""What the step of a layout consists of: the operations of each stage, their prices and their launches."""

import dataclasses
import functools
from collections.abc import Sequence

from stepgauge.cost.data_axis.buckets import Sending
from stepgauge.cost.operations.rank_sizes import NetworkPart
from stepgauge.cost.operations.step_operations import StepOperations
from stepgauge.cost.pipeline.cuts import blocks_of
from stepgauge.cost.pipeline.stages import Halves
from stepgauge.cost.rank import (
    at_step_share,
    launch_costs_of,
    operations_of,
    with_block_times,
)
from stepgauge.cost.rates.machine import CalibratedMachine
from stepgauge.cost.rates.prices import Prices, library_of
from stepgauge.cost.streams.program import LaunchCost, Operations, RankStep
from stepgauge.cost.timed_blocks import as_timed
from stepgauge.cost.traced.network import TracedNetwork
from stepgauge.spec.layout_step import LayoutSpec
from stepgauge.spec.steps import work_of


@dataclasses.dataclass(frozen=True)
class LayoutParts:
    """What a layout's step consists of: the operations of each stage, and their prices.

    stages  one if there is no pipeline
    """

    spec: LayoutSpec
    stages: Sequence[Operations]
    prices: Prices

    @classmethod
    def of(
        cls,
        spec: LayoutSpec,
        machine: CalibratedMachine,
        traced: Sequence[TracedNetwork] = (),
    ) -> "LayoutParts":
        """Returns the parts of a layout's step. Raises ValueError for what is not modelled."""
        layout, work = spec.parsed_layout, work_of(spec)
        if layout.torch_tensor:
            raise ValueError(f"layout is {spec.layout!r}; torch's tensor parallel is not predicted")
        share, prices = share_of(spec), Prices(machine, layout, library_of(spec))
        if traced:
            stages = [operations_of(work, share, stage) for stage in traced]
            prices = at_step_share(prices, stages)
        else:
            network = StepOperations(work, share)
            if layout.overlap and not network.overlapped:  # its messages are plain collectives
                layout = dataclasses.replace(layout, overlap=False)
                prices = Prices(machine, layout, library_of(spec))
            prices = at_step_share(prices, [network])
            times = None
            if spec.needs_times:
                times = Halves.of(as_timed(network, prices)).times(prices)
            cuts = blocks_of(spec, layout, times)
            shares = [dataclasses.replace(share, blocks=blocks) for blocks in cuts]
            stages = [operations_of(work, each) for each in shares]
        stages = [with_block_times(stage, prices) for stage in stages]
        return cls(spec, stages, prices)

    @functools.cached_property
    def host(self) -> dict[str, LaunchCost]:
        """The host's time by phase."""
        machine, replayed = self.prices.machine, self.spec.cuda_graphs
        return launch_costs_of(self.stages[0], machine, self.prices.host_layout, replayed=replayed)

    @property
    def sending(self) -> Sending:
        layout = self.spec.parsed_layout
        return Sending(
            wrapper=layout.wrapper,
            ranks=layout.num_replicas,
            bucket_mb=self.spec.bucket_mb,
            reduce_dtype=self.spec.reduce_dtype,
        )

    def rank_step(self, stage: int) -> RankStep:
        return RankStep(self.stages[stage], self.prices, self.host)

    def without(self, axis: str) -> "LayoutParts":
        """Returns the same step with communication on the axis taking no time."""
        return dataclasses.replace(self, prices=self.prices.without(axis))


def share_of(spec: LayoutSpec) -> NetworkPart:
    """Returns the share of the network that a rank of the layout has."""
    layout = spec.parsed_layout
    return NetworkPart(
        batch=spec.micro_batch,
        tensor=layout.tensor,
        overlap=layout.overlap,
        replayed=spec.cuda_graphs,
        context=layout.context,
        ulysses=layout.ulysses,
        gathered=layout.gathers_weights,
        passes=spec.accumulation * (layout.microbatches if layout.pipeline > 1 else 1),
        averaged=layout.num_replicas > 1,
    )
