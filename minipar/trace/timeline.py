"""The records of all ranks put together: one time axis, no overlaps, shares of compute, communication and waiting."""

import json

import numpy as np

from minipar.trace.recorder import Message, Span

INNER = ("communication", "wait")  # these happen inside compute regions
WAITING = ("wait", "idle")


class Timeline:
    """spans and messages of all ranks, in seconds; `ranks` of them."""

    def __init__(self, ranks, spans, messages=()):
        self.ranks, self.spans, self.messages = ranks, list(spans), list(messages)

    @classmethod
    def gather(cls, comm, recorder):
        """The aligned Timeline of all ranks' records on rank 0 of `comm`, None elsewhere."""
        record = np.frombuffer(json.dumps([recorder.spans, recorder.messages]).encode(), np.uint8)
        if comm.rank:
            comm.send(np.array([record.size]), 0, "trace size")
            comm.send(record, 0, "trace")
            return None
        spans, messages = list(recorder.spans), list(recorder.messages)
        for source in range(1, comm.size):
            size = np.empty(1, np.int64)
            comm.recv(size, source, "trace size")
            record = np.empty(int(size[0]), np.uint8)
            comm.recv(record, source, "trace")
            theirs = json.loads(record.tobytes())
            spans += [Span(*fields) for fields in theirs[0]]
            messages += [Message(*fields) for fields in theirs[1]]
        return cls(comm.size, spans, messages).aligned()

    def aligned(self):
        """The same with every rank's clock shifted onto rank 0's, and time 0 at the first start."""
        shift = self.clock_offsets()
        spans = [s._replace(start=s.start - shift[s.rank], end=s.end - shift[s.rank]) for s in self.spans]
        first = min((s.start for s in spans), default=0.0)
        spans = [s._replace(start=s.start - first, end=s.end - first) for s in spans]
        messages = []
        for m in self.messages:
            sent = max(0.0, m.sent - shift[m.source] - first)
            messages.append(m._replace(sent=sent, received=max(sent, m.received - shift[m.dest] - first)))
        return Timeline(self.ranks, spans, messages)

    def clock_offsets(self):
        """How far each rank's clock is ahead of rank 0's, in seconds; zeros where no message contradicts that.

        No message arrives before it was sent, so offset[dest] - offset[source] is at most the fastest trip between the
        two. Shortest paths over these bounds are the bounds on every offset; the middle of them is taken, as NTP does,
        or the bound itself where messages went one way only.
        """
        bound = np.full((self.ranks, self.ranks), np.inf)
        for m in self.messages:
            bound[m.source, m.dest] = min(bound[m.source, m.dest], m.received - m.sent)
        if not (bound < 0).any():
            return np.zeros(self.ranks)
        for via in range(self.ranks):
            bound = np.minimum(bound, bound[:, via : via + 1] + bound[via : via + 1, :])
        highest, lowest = bound[0], -bound[:, 0]
        highest = np.where(np.isfinite(highest), highest, lowest)
        lowest = np.where(np.isfinite(lowest), lowest, highest)
        known = np.isfinite(highest)
        known[0] = False  # rank 0's clock is the one that counts
        return np.add(highest, lowest, out=np.zeros(self.ranks), where=known) / 2

    @property
    def end(self):
        return max((s.end for s in self.spans), default=0.0)

    @property
    def streams(self):
        """Those that anything was recorded on, "compute" first."""
        return ["compute", *{s.stream for s in self.spans} - {"compute"}]

    def flat(self, rank, stream="compute"):
        """The rank's spans in order without overlaps: at each moment the innermost one, and "idle" where none runs."""
        own = [s for s in self.spans if s.rank == rank and s.stream == stream and s.end > s.start]
        own.sort(key=lambda s: (s.start, -s.end, s.kind in INNER))  # an outer span comes before what is inside it
        pieces, running, at = [], [], 0.0

        def fill(until):
            nonlocal at
            while at < until:
                while running and running[-1].end <= at:
                    running.pop()
                innermost = running[-1] if running else Span(rank, "idle", "idle", at, until, stream)
                pieces.append(innermost._replace(start=at, end=min(until, innermost.end)))
                at = pieces[-1].end

        for s in own:
            fill(s.start)
            running.append(s)
        fill(self.end)
        return pieces

    def seconds(self, rank):
        """kind -> seconds of the rank, summing to the length of the timeline."""
        total = {}
        for s in self.flat(rank):
            total[s.kind] = total.get(s.kind, 0.0) + s.end - s.start
        return total

    def shares(self, rank):
        """The rank's shares of "compute", "communication" and "waiting"; they sum to 1."""
        seconds, length = self.seconds(rank), self.end or 1.0
        communication = seconds.get("communication", 0.0) / length
        waiting = sum(seconds.get(kind, 0.0) for kind in WAITING) / length
        return {"compute": 1 - communication - waiting, "communication": communication, "waiting": waiting}
