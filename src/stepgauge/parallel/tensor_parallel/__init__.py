"""Each rank has a part of every layer, by a table of names and rules (spec/plan/tensor).

The parts, in the order in which to read them: `tensor_parallel`, `rules`, `adapters`, `layer_types`,
`cuts`, `layers`, `residual_stream`, `gradient_sums`; `overlapped` with `exchange`;
`vocabulary_loss`; `by_torch`.
"""

from stepgauge.parallel.tensor_parallel.tensor_parallel import TensorParallel, parallelize_tensor

__all__ = ["TensorParallel", "parallelize_tensor"]
