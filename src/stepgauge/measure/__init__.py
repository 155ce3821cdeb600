"""Takes callables and modules, gives figures: clocks, memory, environment, isolation. Knows no
model.
"""
