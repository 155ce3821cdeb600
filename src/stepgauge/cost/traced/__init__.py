"""Networks without formulas, known by the operators that torch traced.

`traceable` decides which steps are traced, `network` has their terms, `memory` their peak, and `plan`
ranks layouts of a user's network.
"""
