"""Records in; tables, plots and one self-contained HTML page out. Knows specs and records, and
nothing that runs.
"""
