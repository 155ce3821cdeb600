"""Compares predictions with measurements: the only room that sees both records of the same spec.

`predicted` picks the cost model of a spec, `planned` that of a plan, `predict_first` stores predictions
before their rows run, `rows` reads lists of steps to validate, `runnable` checks which layouts this
machine can run, and `kernels` compares the terms of a prediction with the kernels of a trace.
"""
