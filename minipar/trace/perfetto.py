"""Write a timeline as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process with three tracks: compute, communication, and its messages, from which arrows lead to the
receiver's. Times are whole nanoseconds printed as microseconds, so that rounding cannot make slices overlap.
"""

import itertools
import json
import os
from pathlib import Path

COMPUTE, COMMUNICATION, MESSAGES = range(3)
TRACKS = ("compute", "communication", "messages")


def trace_events(timeline):
    """The timeline as a dict that json.dump can write."""
    events = []
    for rank in range(timeline.ranks):
        events.append(_name(rank, 0, "process_name", f"rank {rank}"))
        events += [_name(rank, track, "thread_name", name) for track, name in enumerate(TRACKS)]
        for s in timeline.flat(rank):
            if s.kind != "idle":
                track = COMMUNICATION if s.kind in ("communication", "wait") else COMPUTE
                name = s.name if track == COMPUTE or s.kind != "wait" else f"wait: {s.name}"
                events.append(_slice(rank, track, name, s.kind, _ns(s.start), _ns(s.end)))
        events += _message_slices(timeline.messages, rank)
    # A stable sort by time keeps each slice ahead of the arrow that starts or ends in it.
    events.sort(key=lambda e: (e.get("ts", -1), e["ph"] != "X"))
    for event in events:
        for key in ("ts", "dur"):
            if key in event:
                event[key] /= 1000
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _ns(seconds):
    return max(0, round(seconds * 1e9))


def _name(rank, track, what, name):
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _slice(rank, track, name, kind, start, end, **args):
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": kind, "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def _message_slices(messages, rank):
    """A short slice for each message that the rank sends or receives, and the end of the arrow in it."""
    ends = [(_ns(m.sent), "s", m) for m in messages if m.source == rank]
    ends += [(max(_ns(m.received), _ns(m.sent)), "f", m) for m in messages if m.dest == rank]
    ends.sort(key=lambda end: (end[0], end[1] == "s", end[2].number))
    for i, (at, phase, m) in enumerate(ends):
        until = min(at + 1000, ends[i + 1][0]) if i + 1 < len(ends) else at + 1000
        verb, peer = ("send to", m.dest) if phase == "s" else ("from", m.source)
        yield _slice(rank, MESSAGES, f"{verb} rank {peer}", "message", at, until, operation=m.operation, bytes=m.nbytes)
        arrow = {
            "ph": phase,
            "pid": rank,
            "tid": MESSAGES,
            "name": "message",
            "cat": "message",
            "id": m.number,
            "ts": at,
        }
        yield {**arrow, "bp": "e"} if phase == "f" else arrow


def write(timeline, path):
    """Write the trace to `path`, whole or not at all."""
    events = trace_events(timeline)
    problems = validate(events)
    if problems:
        raise ValueError(f"the trace is not valid: {problems[0]}")
    write_atomically(path, json.dumps(events, allow_nan=False).encode())


def write_atomically(path, data):
    """Put `data` (bytes) into `path` so that nobody ever sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(data)
    partial.replace(path)


def validate(trace):
    """What is wrong with a trace, as sentences: negative times, overlapping slices, arrows that do not pair up."""
    problems, tracks, arrows, named = [], {}, {}, set()
    for e in trace["traceEvents"]:
        where = e["pid"], e["tid"]
        if e["ph"] == "M":
            named.add(where)
            continue
        if e["ts"] < 0 or e.get("dur", 0) < 0:
            problems.append(f"{e['name']} on {where} has a negative time")
        if where not in named:
            problems.append(f"track {where} has no name")
        if e["ph"] == "X":
            tracks.setdefault(where, []).append((e["ts"], e["ts"] + e["dur"]))
        else:
            arrows.setdefault(e["id"], []).append((e["ph"], e["ts"]))
    for where, slices in tracks.items():
        slices.sort()
        overlaps = sum(b[0] < a[1] - 1e-6 for a, b in itertools.pairwise(slices))
        if overlaps:
            problems.append(f"{overlaps} slices overlap on track {where}")
    for number, ends in arrows.items():
        if sorted(phase for phase, _ in ends) != ["f", "s"] or dict(ends)["f"] < dict(ends)["s"]:
            problems.append(f"message {number} is not sent once and received once afterwards: {ends}")
    return problems
