"""Tensor parallel: each rank has a part of every layer, by a table of names and rules
(spec/plan/tensor.py).

Reading order: `tensor_parallel` (cuts a module), `layers` and `residual_stream` (the path of an
activation), `rules`, `adapters`, `layer_types`, `cuts`, `gradient_sums`, `partial_gradients`;
`check` (compares a cut module with the whole one); `overlapped` with `exchange`; `vocabulary_loss`;
`by_torch` (torch's own tensor parallel, to compare with).
"""

from stepgauge.parallel.tensor_parallel.check import check_tensor_parallel
from stepgauge.parallel.tensor_parallel.tensor_parallel import TensorParallel, parallelize_tensor

__all__ = ["TensorParallel", "check_tensor_parallel", "parallelize_tensor"]
