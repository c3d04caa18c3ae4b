"""What a rank writes down while it runs: spans of time, and the messages that reached it."""

import copy
import time
from contextlib import contextmanager
from typing import NamedTuple


class Span(NamedTuple):
    """`kind` of work from `start` to `end` (seconds on the recorder's clock).

    kind: forward, backward, weight_gradient, optimizer, other (compute regions, which may nest); communication, wait
    (inside them: moving a message, and waiting for a peer who has not come to it yet). stream: "compute" for what the
    rank itself does, "communication" for what its communication stream does meanwhile.
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    stream: str = "compute"


class Message(NamedTuple):
    """`nbytes` that left rank `source` at `sent` and had reached rank `dest` at `received`; `number` is its own."""

    number: int
    source: int
    dest: int
    nbytes: int
    sent: float
    received: float
    operation: str


class Recorder:
    """The record of one rank, kept in its context: `current().recorder = Recorder(rank)`."""

    def __init__(self, rank, clock=time.perf_counter, stream="compute"):
        self.rank, self.clock, self.stream = rank, clock, stream
        self.spans, self.messages = [], []

    def for_stream(self):
        """The same record, for the rank's communication stream to write in."""
        other = copy.copy(self)
        other.stream = "communication"
        return other

    def span(self, kind, name, start, end):
        self.spans.append(Span(self.rank, kind, name, start, end, self.stream))

    def message(self, *fields):
        self.messages.append(Message(*fields))

    @contextmanager
    def region(self, kind, name):
        """Record what happens in the `with` block as a span of `kind`, also when it raises."""
        start = self.clock()
        try:
            yield
        finally:
            self.span(kind, name, start, self.clock())
