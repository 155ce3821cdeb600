"""Each rank has some tokens of every sequence. For attention keys travel in a ring
(`ring_attention`), or tokens of some heads are exchanged for heads of some (`head_exchange`).
"""
