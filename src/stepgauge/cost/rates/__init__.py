"""The time of each term on a machine, and how well that time is known.

`prices` looks up terms under a layout, `machine` single operations, `network` collectives, and
`contention` how much computation and communication slow each other down.
"""
