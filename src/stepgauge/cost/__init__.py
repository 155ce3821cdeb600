"""Predicts records from a spec and a hardware file, without torch.

`step`, `data_parallel`, `layout` and `pipeline.step` each predict one kind of record. How a matrix
product becomes microseconds of the step:

1. `operations/step_operations.py` lists the operations of a rank as terms, by formula. A term has a
   calibrated operation and its sizes: "matmul nt bf16" (m, n, k). For any other network,
   `traced/network.py` has the operators as terms.
2. `rates/prices.py` looks up each term, with `rates/machine.py` and `rates/grid.py` for operations and
   `rates/network.py` for collectives.
3. `streams/program.py` writes the terms down as work on streams; `data_axis` adds the communication
   of a data parallel wrapper.
4. `streams/events.py` simulates the streams, or `pipeline/timeline.py` the stages of a pipeline.
5. `step.modelled` makes the record, with the terms in a table and the peak memory from `memory`.

`planning` ranks layouts by these predictions.
"""
