"""Peak memory of a rank, from what it keeps for backward and how the allocator holds that."""
