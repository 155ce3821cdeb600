"""The study: a list of experiments, run where the machine can, and one report of all of them.

A new experiment is one file with an EXPERIMENT, of its name, and that name in spec/experiments.py.
"""

import importlib

from stepgauge.spec.experiments import EXPERIMENTS as NAMES
from stepgauge.study.experiment import Experiment


def _of_name(name: str) -> Experiment:
    experiment: Experiment = importlib.import_module(
        f"{__name__}.{name.replace('-', '_')}"
    ).EXPERIMENT
    return experiment


EXPERIMENTS = tuple(_of_name(name) for name in NAMES)
