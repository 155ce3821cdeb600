"""Measures callables and modules: clocks, memory, operators, collectives, environment. Knows no model."""
