"""Write a timeline as Trace Event JSON, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process with tracks: compute, communication, and its messages, from which arrows lead to the
receiver's. Times are multiples of 1/8 microsecond, which binary fractions hold exactly: no reader's rounding can make
slices overlap.
"""

import itertools
import json
import math
import os
from contextlib import contextmanager
from pathlib import Path

COMPUTE, COMMUNICATION, MESSAGES, STREAM = range(4)
TRACKS = ("compute", "communication", "messages", "communication stream")


def trace_events(timeline):
    """The timeline as a dict that json.dump can write."""
    events = []
    for rank in range(timeline.ranks):
        events.append(_name(rank, 0, "process_name", f"rank {rank}"))
        events.append({**_name(rank, 0, "process_sort_index", ""), "args": {"sort_index": rank}})
        tracks = TRACKS if len(timeline.streams) > 1 else TRACKS[:STREAM]
        events += [_name(rank, track, "thread_name", name) for track, name in enumerate(tracks)]
        for s in itertools.chain.from_iterable(timeline.flat(rank, stream) for stream in timeline.streams):
            if s.kind != "idle":
                track = COMMUNICATION if s.kind in ("communication", "wait") else COMPUTE
                track = track if s.stream == "compute" else STREAM
                name = s.name if track == COMPUTE or s.kind != "wait" else f"wait: {s.name}"
                events.append(_slice(rank, track, name, s.kind, _us(s.start), _us(s.end)))
        events += _message_slices(timeline.messages, rank)
    # The sort is stable, so each slice stays just ahead of the arrow that starts or ends in it.
    events.sort(key=lambda e: e.get("ts", -1))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _us(seconds):
    return max(0, round(seconds * 8e6)) / 8


def _name(rank, track, what, name):
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _slice(rank, track, name, kind, start, end, **args):
    return {
        "ph": "X", "pid": rank, "tid": track, "name": name, "cat": kind, "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def _message_slices(messages, rank):
    """A short slice for each message that the rank sends or receives, and the end of the arrow in it.

    Ends at one time nest: an arrow needs a slice that is longer than nothing.
    """
    ends = [(_us(m.sent), "s", m) for m in messages if m.source == rank]
    ends += [(max(_us(m.received), _us(m.sent)), "f", m) for m in messages if m.dest == rank]
    ends.sort(key=lambda end: (end[0], end[1] == "s", end[2].number))
    times = sorted({end[0] for end in ends})
    following = dict(itertools.pairwise([*times, math.inf]))
    for at, phase, m in ends:
        until = min(at + 1, following[at])
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
    """Put `data` (bytes) into the regular file `path` so that nobody ever sees half of it; links are followed."""
    path = Path(path).resolve()
    with _partial(path) as partial:
        partial.write_bytes(data)
        partial.replace(path)


def check_writable(path):
    """Before the work: OSError if write_atomically could put nothing at `path`; tried, since rights do not tell all."""
    with _partial(Path(path).resolve()) as partial:
        partial.touch()


@contextmanager
def _partial(path):
    """A name beside `path`, whose folder is made, for the `with` block; OSError if `path` is there but no file."""
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{str(path)!r} is no regular file")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
    finally:
        partial.unlink(missing_ok=True)


def validate(trace):
    """What is wrong with a trace, as sentences: bad times, slices that do not nest, arrows that do not pair up."""
    problems, named, open_slices, arrows, latest = [], set(), {}, {}, 0
    for e in trace["traceEvents"]:
        where = e["pid"], e["tid"]
        if e["ph"] == "M":
            named.add(where)
            continue
        if e["ph"] not in ("X", "s", "f"):
            problems.append(f"{e['name']} on {where} has the unknown phase {e['ph']!r}")
            continue
        if not (0 <= e["ts"] < math.inf and 0 <= e.get("dur", 0) < math.inf):
            problems.append(f"{e['name']} on {where} has a negative or endless time")
        if e["ts"] < latest:
            problems.append(f"{e['name']} on {where} comes after a later event")
        if where not in named:
            problems.append(f"track {where} has no name")
        latest = e["ts"]
        around = open_slices.setdefault(where, [])  # ends of the slices that are open now, outermost first
        while around and around[-1] <= latest:
            around.pop()
        if e["ph"] != "X":
            arrows.setdefault(e["id"], []).append((e["ph"], latest))
            if not around:
                problems.append(f"an arrow of message {e['id']} on {where} is in no slice")
        elif around and latest + e["dur"] > around[-1]:
            problems.append(f"slices overlap on track {where}: {e['name']}")
        else:
            around.append(latest + e["dur"])
    for number, ends in arrows.items():
        if sorted(phase for phase, _ in ends) != ["f", "s"] or dict(ends)["f"] < dict(ends)["s"]:
            problems.append(f"message {number} is not sent once and received once afterwards: {ends}")
    return problems
