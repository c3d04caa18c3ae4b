"""Pipeline parallelism: schedules as data, what proves them right, and what runs them."""

from minipar.parallel.pipeline.schedules import SCHEDULES, Action, Schedule
from minipar.parallel.pipeline.simulation import Costs, simulate, validate

__all__ = ["SCHEDULES", "Action", "Costs", "Schedule", "simulate", "validate"]
