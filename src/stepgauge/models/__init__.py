"""The networks that are measured. They know nothing of parallelism, precision or measurement."""
