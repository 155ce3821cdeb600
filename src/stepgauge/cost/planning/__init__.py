"""Every layout of a training run ranked, and whether communication of a layout can hide."""
