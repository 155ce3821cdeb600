"""A spec and what a machine can do in, modelled figures out. Needs no torch.

`step`, `data_parallel`, `layout`, `pipeline.step` and `traced.step` predict the record of a spec each.
They write down its `operations`, look up their `rates`, add what `data_axis` sends, and simulate
the `streams` of a rank; `memory` gives its peak. `planning` ranks layouts by these.
"""
