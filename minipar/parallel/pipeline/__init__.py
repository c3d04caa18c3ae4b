"""Pipeline parallelism: schedules as data, what proves them right, and what runs them."""

from minipar.parallel.pipeline.executor import Pipeline, balance, measure
from minipar.parallel.pipeline.schedules import SCHEDULES, Action, Schedule, make
from minipar.parallel.pipeline.simulation import Bubble, Costs, simulate, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Bubble",
    "Costs",
    "Pipeline",
    "Schedule",
    "balance",
    "make",
    "measure",
    "simulate",
    "validate",
]
