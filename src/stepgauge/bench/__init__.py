"""Where a spec becomes a record: builds what the spec names, hands it to measure, sweeps over many."""
