"""Pipeline parallel: runs any schedule of spec/plan/pipeline with any modules as stages.

Reading order: `interfaces` (tensors between stages), `split` (backward in two parts), `stage`,
`graphed` (a stage replayed from CUDA graphs); `groups`, `transfers`, `peer_transfers`; `tied`,
`clock`, `host_lead`, `step`, `pipeline`.
"""

from stepgauge.parallel.pipeline.pipeline import Pipeline
from stepgauge.parallel.pipeline.tied import Tie

__all__ = ["Pipeline", "Tie"]
