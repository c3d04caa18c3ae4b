"""What a schedule does, without running a model: is it right, when does each action run, what is held in memory."""

from collections import Counter
from dataclasses import dataclass, field

from minipar.errors import ScheduleError
from minipar.parallel.pipeline.schedules import KINDS, Action
from minipar.trace import Message, Span, Timeline

OPEN = 3  # messages from one rank with one tag that a rank has room for before it uses them
SPAN_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight_gradient"}


def validate(schedule):
    """Raise ScheduleError unless `schedule` can run; returns {stage: most micro-batches whose activations it holds}.

    It must be complete: on every stage each micro-batch once F and once B, or I and W, and the stage's gradients said
    to be complete after that; all of a stage on one rank. It must come to an end whether a send is buffered, and
    returns at once, or waits until its receiver is ready for it, which has room for OPEN messages of each kind.
    """
    _check_complete(schedule)
    for blocking in (False, True):
        _check_progress(schedule, blocking)
    return peaks(schedule)


def _check_complete(schedule):
    stages, m = schedule.stages, schedule.microbatches
    if not stages or not m:
        raise ScheduleError(f"the schedule {schedule.name!r} has no forward.")
    owner = {}
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            kind, stage, microbatch = action
            if kind not in KINDS or stage < 0 or (microbatch is not None and not 0 <= microbatch < m):
                raise ScheduleError(f"rank {rank} cannot do {action}: there are micro-batches 0 to {m - 1}.")
            if owner.setdefault(stage, rank) != rank:
                raise ScheduleError(f"stage {stage} is on ranks {owner[stage]} and {rank}: {action} is on rank {rank}.")
    counts = Counter(a for actions in schedule.ranks for a in actions)
    for action, count in counts.items():
        if count > 1:
            raise ScheduleError(f"rank {owner[action.stage]} does {action} {count} times.")
    for stage in range(stages):
        where = f"rank {owner[stage]}" if stage in owner else "no rank"
        for k in range(m):
            split = Action("I", stage, k) in counts or Action("W", stage, k) in counts
            wanted = ["F", "I", "W"] if split else ["F", "B"]
            for kind in [*wanted, "STEP"] if schedule.asynchronous else wanted:
                if Action(kind, stage, k) not in counts:
                    raise ScheduleError(f"{Action(kind, stage, k)} is missing: {where} has stage {stage}.")
            if split and Action("B", stage, k) in counts:
                raise ScheduleError(f"{where} has {Action('B', stage, k)} beside its two halves I and W.")
        if not schedule.asynchronous and Action("REDUCE_GRAD", stage) not in counts:
            raise ScheduleError(f"{Action('REDUCE_GRAD', stage)} is missing: {where} has stage {stage}.")


def _check_progress(schedule, blocking):
    """Run the schedule without times; ScheduleError when no rank can go on."""
    at, done, sending = [0] * len(schedule.ranks), set(), {}  # sending: rank -> the reader that its send waits for

    def ready_to_receive(action):
        """Whether there is room for what `action` reads: at most OPEN messages before it that nobody has used."""
        line = schedule.channels[schedule.channel(action)]
        earlier = line[: line.index(action)]
        return sum(a not in done for a in earlier) < OPEN

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                if rank in sending and not ready_to_receive(sending[rank]):
                    break
                sending.pop(rank, None)
                action = actions[at[rank]]
                if schedule.why_not(action, done):
                    break
                done.add(action)
                at[rank] += 1
                moved = True
                reader = schedule.reader(action)
                if blocking and reader and schedule.rank_of[reader.stage] != rank:
                    sending[rank] = reader
    stuck = []
    for rank, actions in enumerate(schedule.ranks):
        if rank in sending and not ready_to_receive(sending[rank]):
            to = schedule.rank_of[sending[rank].stage]
            stuck.append(f"rank {rank} sends what {sending[rank]} reads, for which rank {to} is not ready.")
        elif at[rank] < len(actions):
            stuck.append(f"rank {rank}: {schedule.why_not(actions[at[rank]], done)}")
    if stuck:
        how = "sends wait for their receiver" if blocking else "sends are buffered"
        raise ScheduleError(f"schedule {schedule.name!r} comes to a standstill even if {how}: " + " ".join(stuck))


def peaks(schedule):
    """{stage: most micro-batches held at once}: from F until B, or until W where the backward is split."""
    peak = dict.fromkeys(range(schedule.stages), 0)
    held = Counter()
    for actions in schedule.ranks:
        for kind, stage, _ in actions:
            held[stage] += (kind == "F") - (kind in "BW")
            peak[stage] = max(peak[stage], held[stage])
    return peak


@dataclass
class Costs:
    """Times of one action, any unit: f forward, b input gradient, w weight gradients, c moving one message.

    A whole backward B costs b + w. Each of f, b, w is a number, or a list of one for each stage. Memory: a micro-batch
    holds 1 from F until B or I, and then `kept` until W.
    """

    f: float | list = 1.0
    b: float | list = 1.0
    w: float | list = 1.0
    c: float = 0.0
    kept: float = 1.0

    def of(self, action):
        f, b, w = (x[action.stage] if isinstance(x, (list, tuple)) else x for x in (self.f, self.b, self.w))
        return {"F": f, "B": b + w, "I": b, "W": w}.get(action.kind, 0.0)


@dataclass
class Bubble:
    """The three things that are called a bubble; means over the ranks. They are not the same number."""

    ratio_to_ideal: float  # idle / busy, as in "(p-1)/m"
    share_of_makespan: float  # idle / whole time, as in "(p-1)/(m+p-1)"
    internal_share: float  # idle between a rank's own first and last action / whole time

    @classmethod
    def of(cls, busy, first, last, makespan):
        """busy, first, last: seconds at work, start and end of each rank."""
        mean = sum(busy) / len(busy)
        inside = sum(b - a - t for t, a, b in zip(busy, first, last, strict=True)) / len(busy)
        return cls(
            (makespan - mean) / mean if mean else 0.0,
            (makespan - mean) / makespan if makespan else 0.0,
            max(0.0, inside / makespan) if makespan else 0.0,
        )


@dataclass
class Simulation:
    """times: {action: (start, end)}; memory: {stage: [(time, held from then on)]}, in activations of a micro-batch."""

    schedule: object
    costs: Costs
    times: dict
    makespan: float
    bubble: Bubble
    memory: dict = field(repr=False)

    @property
    def peak_memory(self):
        """[most that each rank holds, in activations of one micro-batch of one stage]"""
        result = []
        for actions in self.schedule.ranks:
            stages = {a.stage for a in actions}
            events = sorted((t, held - before) for s in stages for (t, held), before in _steps(self.memory[s]))
            total = peak = 0.0
            for _, change in events:
                total += change
                peak = max(peak, total)
            result.append(peak)
        return result

    def timeline(self, unit=1.0):
        """The simulation as a Timeline; unit: seconds that a time of 1 stands for."""
        spans, messages = [], []
        for action, (start, end) in self.times.items():
            rank = self.schedule.rank_of[action.stage]
            if action.kind in SPAN_KINDS:
                spans.append(Span(rank, SPAN_KINDS[action.kind], str(action), start * unit, end * unit))
            source = self.schedule.source(action)
            if source and self.schedule.rank_of[source.stage] != rank:
                sent = self.times[source][1]
                sender = self.schedule.rank_of[source.stage]
                arrival = (sent + self.costs.c) * unit
                messages.append(Message(len(messages), sender, rank, 0, sent * unit, arrival, str(action)))
        return Timeline(len(self.schedule.ranks), spans, messages)


def _steps(curve):
    return zip(curve, [0.0, *(held for _, held in curve[:-1])], strict=True)


def simulate(schedule, costs=None):
    """When each action runs if every rank does its list in order, each as soon as what it needs has come."""
    costs = costs or Costs()
    times, free, at = {}, [0.0] * len(schedule.ranks), [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions) and not schedule.why_not(actions[at[rank]], times):
                action = actions[at[rank]]
                start = free[rank]
                for needed in schedule.needs(action):
                    far = schedule.rank_of[needed.stage] != rank
                    start = max(start, times[needed][1] + (costs.c if far else 0.0))
                free[rank] = start + costs.of(action)
                times[action] = start, free[rank]
                at[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.ranks):
        if at[rank] < len(actions):
            raise ScheduleError(f"rank {rank}: {schedule.why_not(actions[at[rank]], times)}")
    busy = [sum(costs.of(a) for a in actions) for actions in schedule.ranks]
    first = [min((times[a][0] for a in actions), default=0.0) for actions in schedule.ranks]
    last = [max((times[a][1] for a in actions), default=0.0) for actions in schedule.ranks]
    makespan = max(last)
    memory = {s: _memory(schedule, s, times, costs.kept) for s in range(schedule.stages)}
    return Simulation(schedule, costs, times, makespan, Bubble.of(busy, first, last, makespan), memory)


def _memory(schedule, stage, times, kept):
    """[(time, activations held from then on)]: they grow when F begins, and go when the last use has ended."""
    curve, held = [(0.0, 0.0)], 0.0
    for action in schedule.ranks[schedule.rank_of[stage]]:
        if action.stage == stage and action.kind in SPAN_KINDS:
            start, end = times[action]
            held += {"F": 1.0, "B": -1.0, "I": kept - 1.0, "W": -kept}[action.kind]
            curve.append((start if action.kind == "F" else end, held))
    return curve
