"""Context parallel: each rank has some tokens of every sequence (`split_sequences`). For attention,
either keys and values are sent around a ring (`ring_attention`, with `ring_transport`), or ranks
exchange tokens of some heads for heads of some tokens (`head_exchange`).
"""
