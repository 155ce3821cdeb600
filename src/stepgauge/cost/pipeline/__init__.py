"""The step of a pipeline.

`stages` prices what each stage computes, `timeline` simulates any schedule with these durations,
`cuts` divides blocks among stages, and `fill` moves weight gradients into bubbles.
"""
