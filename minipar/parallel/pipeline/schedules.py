"""Pipeline schedules as data: for each rank the list of what it does, in order. No arrays, no communicator.

    1F1B, 4 ranks, 4 micro-batches        F forward   B backward   . nothing to do

    rank 0   F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
    rank 1   .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
    rank 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3

The model is cut into stages; rank r has stage r, and with v chunks a rank also r + p, r + 2p, and so on. What a
schedule decides is the order, and with it how long ranks wait (the bubble) and how many micro-batches' activations
they hold meanwhile. All schedules below that update the weights once a step compute the same gradients.
"""

import itertools
import os
import runpy
from collections import namedtuple
from functools import cached_property

from minipar.errors import ScheduleError

KINDS = {  # in the notation of Qi et al. 2023, arXiv 2401.10241, B is the input gradient; here, as in PyTorch, it is I
    "F": "forward",
    "B": "backward, whole",
    "I": "gradient of the input",
    "W": "gradients of the weights, after I",
    "REDUCE_GRAD": "the stage's gradients are complete: data parallelism may add them up",
    "STEP": "update the stage's weights at once, without waiting for the other micro-batches (PipeDream)",
}


TAGS = 63  # tags of messages between stages; more stages than half of that share them


class Action(namedtuple("Action", "kind stage microbatch", defaults=[None])):
    """One thing that a rank does. Prints as in PyTorch: 2F0 is stage 2, forward, micro-batch 0."""

    __slots__ = ()

    def __str__(self):
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @classmethod
    def parse(cls, text):
        """The Action that prints as `text`; ScheduleError if none does."""
        whole, text = text, text if isinstance(text, str) else ""
        stage = text[: len(text) - len(text.lstrip("0123456789"))]
        kind = text[len(stage) :].rstrip("0123456789")
        number = text[len(stage) + len(kind) :]
        if not stage or kind not in KINDS or (kind != "REDUCE_GRAD") != bool(number):
            raise ScheduleError(f"{whole!r} is no action: write stage, kind ({', '.join(KINDS)}), micro-batch, as 2F0.")
        return cls(kind, int(stage), int(number) if number else None)


class Schedule:
    """`ranks`: a list of Actions, or of their texts, for each rank; name: what pictures call it.

    Where nobody says when a stage's gradients are complete, a REDUCE_GRAD is put after its last backward.
    """

    def __init__(self, name, ranks):
        self.name = name
        lists = [[a if isinstance(a, Action) else Action.parse(a) for a in actions] for actions in ranks]
        said = any(a.kind in ("REDUCE_GRAD", "STEP") for actions in lists for a in actions)
        self.ranks = tuple(tuple(actions if said else _with_reductions(actions)) for actions in lists)

    def __str__(self):
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @cached_property
    def rank_of(self):
        """stage -> the rank that has it."""
        return {a.stage: rank for rank, actions in enumerate(self.ranks) for a in actions}

    @cached_property
    def stages(self):
        return max(self.rank_of, default=-1) + 1

    @cached_property
    def microbatches(self):
        return max((a.microbatch for actions in self.ranks for a in actions if a.kind == "F"), default=-1) + 1

    @cached_property
    def actions(self):
        """All of them, of all ranks."""
        return frozenset(a for actions in self.ranks for a in actions)

    @property
    def asynchronous(self):
        """Whether weights change within a step."""
        return any(a.kind == "STEP" for a in self.actions)

    def gradient(self, stage, microbatch):
        """The action that gives stage's gradient to the stage before it: B, or I where the backward is split."""
        split = Action("I", stage, microbatch)
        return split if split in self.actions else Action("B", stage, microbatch)

    def source(self, action):
        """The action, usually another rank's, that makes what this one reads; None if it reads nothing."""
        kind, stage, microbatch = action
        if kind == "F" and stage > 0:
            return Action("F", stage - 1, microbatch)
        if kind in "BI" and stage < self.stages - 1:
            return self.gradient(stage + 1, microbatch)
        return None

    def reader(self, action):
        """The action that reads what this one makes; None if none does."""
        kind, stage, microbatch = action
        if kind == "F" and stage + 1 < self.stages:
            return Action("F", stage + 1, microbatch)
        if kind in "BI" and stage > 0:
            return self.gradient(stage - 1, microbatch)
        return None

    def channel(self, reader):
        """(source rank, rank, tag) of the message that this action reads."""
        tag = (2 * reader.stage + (reader.kind != "F")) % TAGS
        return self.rank_of[self.source(reader).stage], self.rank_of[reader.stage], tag

    @cached_property
    def channels(self):
        """{(source rank, rank, tag): the readers of the messages between the two with this tag, as they are sent}."""
        result = {}
        for actions in self.ranks:
            for reader in filter(None, map(self.reader, actions)):
                result.setdefault(self.channel(reader), []).append(reader)
        return result

    @cached_property
    def _backwards(self):
        """stage -> the actions that complete its gradients."""
        result = {}
        for action in sorted(a for a in self.actions if a.kind in "BW"):
            result.setdefault(action.stage, []).append(action)
        return result

    def needs(self, action):
        """The actions that must have run before this one, of this rank and others."""
        kind, stage, microbatch = action
        if kind == "REDUCE_GRAD":
            return self._backwards.get(stage, [])
        source = self.source(action)
        needed = [source] if source else []
        if kind in "BI":
            needed.append(Action("F", stage, microbatch))
        elif kind == "W":
            needed.append(Action("I", stage, microbatch))
        elif kind == "STEP":
            needed.append(Action("W" if Action("W", stage, microbatch) in self.actions else "B", stage, microbatch))
        return needed

    def why_not(self, action, done):
        """What `action` would wait for if just the actions in `done` had run: a sentence, or None if it can run."""
        for needed in self.needs(action):
            if needed not in done:
                what = {"F": "the activations", "B": "the gradient", "I": "the gradient", "W": "the weight gradients"}
                where = f"rank {self.rank_of[needed.stage]}" if needed.stage in self.rank_of else "no rank"
                return (
                    f"{action} waits for {what[needed.kind]} of micro-batch {needed.microbatch} from stage "
                    f"{needed.stage} ({needed} on {where}), which has not run."
                )
        return None


def _with_reductions(actions):
    last = {a.stage: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
    for i, a in enumerate(actions):
        yield a
        if last.get(a.stage) == i:
            yield Action("REDUCE_GRAD", a.stage)


# --- one stage a rank ---


def naive(p, m):
    """One micro-batch at a time through all ranks and back: one rank works, the others wait. Bubble p - 1 of p."""
    return Schedule("naive", [[Action(kind, r, k) for k in range(m) for kind in "FB"] for r in range(p)])


def gpipe(p, m):
    """All forwards, then all backwards (Huang et al. 2019). Bubble (p-1)/m of the ideal time; m activations held."""
    return Schedule("GPipe", [[Action(kind, r, k) for kind in "FB" for k in range(m)] for r in range(p)])


def one_f_one_b(p, m):
    """1F1B, PipeDream-flush (Narayanan et al. 2021): a backward as soon as there is one.

    Rank r is p - 1 - r forwards ahead. Bubble (p-1)/m as in GPipe, not less; p - r activations held, not m.
    """
    return Schedule("1F1B", [_alternate(r, m, ahead=p - 1 - r) for r in range(p)])


def zb_h1(p, m):
    """ZB-H1 (Qi et al. 2023, section 2.3): 1F1B with split backwards; rank r keeps r of the W, to fill waits.

    Bubble (p-1)(F + I - W) where 1F1B has (p-1)(F + I + W), with as much memory.
    """
    return Schedule("ZB-H1", [_alternate(r, m, ahead=p - 1 - r, late=r) for r in range(p)])


def zb_h2(p, m):
    """ZB-H2 (the same paper): so many forwards ahead that nobody waits once begun, with twice the memory."""
    more = max(0, min(p - 1, m - p))  # fewer micro-batches than 2p - 1 do not fill so much
    ranks = [_alternate(r, m, p - 1 - r + min(p - 1 - r, more), r + min(r, more)) for r in range(p)]
    return Schedule("ZB-H2", ranks)


def _alternate(stage, m, ahead, late=None):
    """`ahead` forwards, then one forward, one backward; with `late`, W comes so many micro-batches after its I."""
    actions = [Action("F", stage, k) for k in range(min(ahead, m))]
    for k in range(m):
        if k + ahead < m:
            actions.append(Action("F", stage, k + ahead))
        actions.append(Action("B" if late is None else "I", stage, k))
        if late is not None and k >= late:
            actions.append(Action("W", stage, k - late))
    return actions + [Action("W", stage, k) for k in range(max(0, m - (late or 0)), m)]


def pipedream(p, m):
    """PipeDream (Narayanan et al. 2019): 1F1B whose weights change after each micro-batch, with no wait at the end.

    Not the same computation: rank r's gradients come from weights that are p - 1 - r updates old.
    """
    ranks = [_alternate(r, m, ahead=p - 1 - r) for r in range(p)]
    return Schedule(
        "PipeDream",
        [[b for a in actions for b in ((a, Action("STEP", *a[1:])) if a.kind == "B" else (a,))] for actions in ranks],
    )


# --- several stages a rank ---


def interleaved(p, m, v=2):
    """Interleaved 1F1B (Narayanan et al. 2021): rank r has the v stages r, r + p, ...: a bubble of (p-1)/(v m).

    Micro-batches pass in rounds: all of a round through one chunk, then through the next. Megatron needs rounds of p;
    here m is cut into rounds of p to 2p - 1, so that any m works. Fewer micro-batches than ranks are one round.
    """
    rounds = max(1, m // p)
    cuts = [-(-m * i // rounds) for i in range(rounds + 1)]
    groups = [range(a, b) for a, b in itertools.pairwise(cuts)]
    longest = max(map(len, groups))
    ranks = []
    for r in range(p):
        forward = [Action("F", r + c * p, k) for group in groups for c in range(v) for k in group]
        backward = [Action("B", r + c * p, k) for group in groups for c in reversed(range(v)) for k in group]
        ahead = min(m * v, (v - 1) * longest + 2 * (p - 1 - r))
        actions = forward[:ahead]
        for i, b in enumerate(backward):
            actions += [*forward[ahead + i : ahead + i + 1], b]
        ranks.append(actions)
    return Schedule(f"interleaved, v={v}", ranks)


def _v_shaped(name, ranks, m):
    """Rank r has stages r and 2p - 1 - r, so the last stage is where the first is. chunks: 0 on the way in, 1 back.

    ranks: for each the text of its actions, F0 or I1 say: kind and chunk. Micro-batches are counted here; those from m
    on are left out.
    """
    p = len(ranks)
    schedule = []
    for r, text in enumerate(ranks):
        actions, forwards, backwards, waiting = [], [0, 0], [0, 0], ([], [])
        for kind, chunk in text.split():
            c, counter = int(chunk), forwards if kind == "F" else backwards
            k = waiting[c].pop(0) if kind == "W" else counter[c]
            if kind != "W":
                counter[c] += 1
            if kind == "I":
                waiting[c].append(k)
            actions.append(Action(kind, r if c == 0 else 2 * p - 1 - r, k))
        schedule.append([a for a in actions if a.microbatch < m])
    return Schedule(name, schedule)


def zb_v(p, m):
    """ZB-V (Qi et al. 2023, section 6): no bubble between a rank's first and last action if F = I = W.

    As much memory as 1F1B: two chunks of half the size, and each micro-batch comes back to where it began.
    """
    n = max(m, 2 * p - 1)
    ranks = []
    for r in range(p):
        warm_up = 2 * (p - r) - 1 + r  # forwards of the first chunk before its first backward
        start = "F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 I1 W1 " * (p - r)
        steady = "F0 I0 W0 F1 I1 W1 " * (n - warm_up) + "I0 W0 F1 I1 W1 " * (warm_up - p)
        ranks.append(start + steady + "I0 I1 " * r + "I0 W0 " * (p - r) + "W1 " * r + "W0 " * r)
    return _v_shaped("ZB-V", ranks, m)


def dualpipe_v(p, m):
    """DualPipe (DeepSeek-V3, arXiv 2412.19437) folded in half, so that no rank needs a second copy of the weights.

    Its forward of one chunk beside the backward of the other leaves room for communication behind computation.
    ScheduleError for fewer than 2p micro-batches.
    """
    if m < 2 * p:
        raise ScheduleError(f"dualpipe-v on {p} ranks needs at least {2 * p} micro-batches, not {m}.")
    ranks = []
    for r in range(p):
        rest = p - 1 - r
        begin = "F0 " * (2 * rest) + "F0 F1 " * (r + 1) + "I1 W1 F1 " * rest
        main = "F0 B1 F1 B0 " * (m - 2 * p + r + 1) + "B1 F1 B0 " * rest
        whole, split = ("B1 B0 " * (r + 1)).split()[: r + 1], ("I1 I0 " * (r + 1)).split()[r + 1 :]
        waiting = [f"W{a[1]}" for a in split] + ["W0"] * rest  # first in, first out
        end = [*whole, *split, *(a for w in waiting[:rest] for a in (w, "I0")), *waiting[rest:]]
        ranks.append(begin + main + " ".join(end))
    return _v_shaped("DualPipe-V", ranks, m)


SCHEDULES = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "pipedream": pipedream,
}


def make(name, p, m, v=None):
    """The schedule `name` of SCHEDULES, or of a FILE.py that defines schedule(p, m), for p ranks and m micro-batches.

    schedule(p, m) returns for each rank a list of Actions or of their texts: [["0F0", "0B0"], ["1F0", "1B0"]]. v:
    stages a rank, for interleaved alone. Raises ScheduleError for anything else.
    """
    if p < 1 or m < 1 or (v is not None and v < 1):
        raise ScheduleError(f"p={p}, m={m}{'' if v is None else f', v={v}'}: each must be at least 1.")
    if v is not None and name != "interleaved":
        raise ScheduleError(f"v={v} is for interleaved alone, not for {name}.")
    if name in SCHEDULES:
        return SCHEDULES[name](p, m) if v is None else interleaved(p, m, v)
    if not name.endswith(".py"):
        raise ScheduleError(f"there is no schedule {name!r}: {', '.join(SCHEDULES)}, or a FILE.py.")
    try:
        function = runpy.run_path(name)["schedule"]
    except OSError as error:
        raise ScheduleError(f"{name} cannot be read: {error.strerror}.") from error
    except (KeyError, SyntaxError) as error:
        raise ScheduleError(f"{name} must define a function schedule(p, m): {error}.") from error
    ranks = function(p, m)
    if not isinstance(ranks, (list, tuple)) or not all(isinstance(actions, (list, tuple)) for actions in ranks):
        raise ScheduleError(f"schedule({p}, {m}) of {name} must return a list of a list of actions for each rank.")
    return Schedule(os.path.basename(name), ranks)
