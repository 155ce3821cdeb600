"""What ranks send each other: torch's collectives, means over ranks, boxes that peers reach."""
