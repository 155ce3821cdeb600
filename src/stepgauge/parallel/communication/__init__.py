"""How ranks exchange data: torch's collectives, gradient means, and memory shared between peers."""
