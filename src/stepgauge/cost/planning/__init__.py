"""Ranks the layouts of a training run, and tells whether their communication can be hidden.

`planner` ranks layouts: `screen` estimates all of them by formula, and the best are simulated. `dense`
finds a network with formulas for one without. `hiding` and `overlap_ratios` compare communication with
computation.
"""
