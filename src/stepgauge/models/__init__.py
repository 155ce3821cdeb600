"""The networks that are measured. They contain nothing about parallelism, precision or measurement."""
