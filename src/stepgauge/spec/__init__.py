"""What is asked and what came out. Standard library only: no torch, no third-party package."""
