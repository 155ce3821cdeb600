"""Who holds memory when: every storage followed from birth to death, on real tensors and on tensors
without memory.
"""
