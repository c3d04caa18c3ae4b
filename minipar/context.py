"""What belongs to one rank.

Ranks can be threads of one process, so nothing of theirs is a module-level global: it lives in one object that a
context variable holds, and every thread has its own.
"""

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RankContext:
    """One rank's world, recorder, random seed, training step and flags."""

    world: Any = None  # Communicator of all ranks; None when nothing runs in parallel
    recorder: Any = None  # trace.Recorder; None records nothing
    seed: int = 0
    step: int = 0  # the training step: random draws are keyed by it
    samples: tuple | None = None  # (first, total): which samples of the global batch this rank computes; None: all
    grad_enabled: bool = True
    after_backward: list = field(default_factory=list)  # functions to call when the backward pass that runs has ended
    stream: Any = None  # comm.Stream once a collective has been started on it


_current: ContextVar[RankContext] = ContextVar("minipar_rank")


def current():
    """The RankContext of the calling rank; a thread that has none gets a fresh one."""
    try:
        return _current.get()
    except LookupError:
        context = RankContext()
        _current.set(context)
        return context


@contextmanager
def activate(context):
    """Make `context` the calling rank's own for the length of a `with` block."""
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
