"""stepgauge measures a Transformer training step, explains it, makes it faster and predicts it.

Importing the package costs nothing: torch is loaded by the rooms that run something.
"""

__version__ = "0.1.0"
