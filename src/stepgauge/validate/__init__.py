"""Predictions beside measurements: the only place that sees a modelled and a measured record of the
same spec.

predicted  which part of cost/ predicts which spec
before     predictions on disk before their rows are run
rows       a list of steps and layouts to validate
errors     how far predictions are off, term by term, and how they rank layouts
views      tables, plot and section of a report
"""
