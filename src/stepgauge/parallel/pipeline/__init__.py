"""Pipeline parallel: any checked schedule of spec/plan/pipeline, run by any modules as stages.

The parts, in the order in which to read them: `split` (backward in two), `stage`, `graphed`
(replayed from CUDA graphs); `between`, `groups`, `transfers`, `peer_transfers`; `tied`, `clock`,
`step`, `pipeline`.
"""

from stepgauge.parallel.pipeline.pipeline import Pipeline
from stepgauge.parallel.pipeline.tied import Tie

__all__ = ["Pipeline", "Tie"]
