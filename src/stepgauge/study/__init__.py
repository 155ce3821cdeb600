"""The study: a list of experiments. Those that the machine can run are run, and one report shows all.

To add an experiment, add a file with an EXPERIMENT, and its name to spec/experiments.py.
"""

import importlib

from stepgauge.spec.experiments import EXPERIMENTS as NAMES
from stepgauge.study.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = tuple(
    importlib.import_module(f"{__name__}.{name.replace('-', '_')}").EXPERIMENT for name in NAMES
)
