"""Who holds memory when: every storage tracked from birth to death, on real tensors and on tensors
without memory.
"""
