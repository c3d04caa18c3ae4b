"""Communicator: who the ranks are, and two verbs, isend and irecv. Everything else is written on top of them."""

import copy
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from minipar.context import current
from minipar.errors import DTypeError, LaunchError, MessageMismatch, ShapeError

clock = time.perf_counter  # one clock for all processes of a node
TAGS = 64  # tags of one group, 0 to 63; its number times this keeps groups apart where a transport knows tags only


@dataclass
class Traffic:
    """What a rank has sent so far, payload only."""

    messages: int = 0
    bytes: int = 0
    rounds: int = 0  # of the collectives: steps that wait for one another, each as long as a message takes

    def __add__(self, other):
        return Traffic(self.messages + other.messages, self.bytes + other.bytes, self.rounds + other.rounds)

    def since(self, earlier):
        """What was sent after `earlier`, a copy of this."""
        return Traffic(self.messages - earlier.messages, self.bytes - earlier.bytes, self.rounds - earlier.rounds)


class Request:
    """A message under way. `ready`: when the peer had done its part, on the clock; None until that is known."""

    __slots__ = ("array", "comm", "operation", "peer", "ready", "sends", "tag")

    def __init__(self, comm, array, peer, operation, tag, sends):
        self.comm, self.array, self.peer = comm, array, peer
        self.operation, self.tag, self.sends = operation, tag, sends
        self.ready = None

    def done(self):
        """Whether `wait` would return at once. Never blocks."""
        raise NotImplementedError

    def wait(self):
        """Return when the message has arrived (a receive) or the array may be reused (a send).

        Raises CommunicationTimeout after the communicator's time limit, MessageMismatch if the two sides disagree,
        RankFailed if another rank has raised.
        """
        recorder = current().recorder
        if recorder is None:
            self._wait()
            return
        start = clock()
        self._wait()
        end = clock()
        ready = min(max(self.ready or start, start), end)
        if ready > start:
            recorder.span("wait", self.operation, start, ready)
        recorder.span("communication", self.operation, ready, end)

    def describe(self):
        """What this rank waits for, in words."""
        verb, preposition = ("send", "to") if self.sends else ("recv", "from")
        return (
            f"rank {self.comm.ranks[self.comm.rank]} waits in {verb} ({self.operation}, {self.array.nbytes} bytes) "
            f"{preposition} rank {self.comm.ranks[self.peer]}"
        )


class Communicator:
    """A group of ranks that can exchange arrays.

    rank: this rank's number in the group; size: how many there are; ranks: the members' numbers in the world;
    timeout: seconds that any wait may take; sent: Traffic of this rank, shared by all groups of one world; nodes: the
    node of each member, a number. check_headers: whether both sides of a message, and all callers of a collective,
    compare what they are about.
    A transport gives isend and irecv; `array` must be contiguous, and stay as it is until the request is done.
    """

    transport = "none"
    sees_objects = False  # whether ranks can reach each other's arrays, wherever they lie
    moves_nothing = False

    def __init__(self, rank, ranks, timeout, nodes=None, check_headers=True):
        self.rank, self.ranks, self.timeout, self.check_headers = rank, tuple(ranks), timeout, check_headers
        self.size = len(self.ranks)
        self.nodes = tuple(nodes or [0] * self.size)
        self.sent = Traffic()
        # This group's number, and the last one that this rank has seen, shared; odd ones belong to streams.
        self.context, self.contexts = 0, [0]
        self.preferred = {}  # operation -> the algorithm that "auto" means here and in groups split off later
        self.buffers = []  # every SymmetricBuffer of this world
        self._begin()

    def _begin(self):
        """A group starts with no calls, meetings or memory of its own."""
        self.calls, self.meetings, self.call, self.twin, self.arena = 0, 0, None, None, None
        self.plans = {}  # what collectives have prepared

    def isend(self, array, dest, operation="send", tag=0):
        """Start to send `array` to rank `dest`. `operation` names what it is for; the receiver must say the same."""
        raise NotImplementedError

    def irecv(self, array, source, operation="recv", tag=0):
        """Start to receive into `array` from rank `source`."""
        raise NotImplementedError

    def send(self, array, dest, operation="send", tag=0):
        self.isend(array, dest, operation, tag).wait()

    def recv(self, array, source, operation="recv", tag=0):
        self.irecv(array, source, operation, tag).wait()

    def barrier(self, operation="barrier"):
        """Return when every rank has called it: ceil(log2 size) rounds of empty messages, each twice as far."""
        self.agree(operation)
        nothing, distance = np.empty(0, np.uint8), 1
        while distance < self.size:
            arrival = self.irecv(np.empty(0, np.uint8), (self.rank - distance) % self.size, operation)
            self.send(nothing, (self.rank + distance) % self.size, operation)
            arrival.wait()
            distance *= 2

    def split(self, color, key=0):
        """The group of all ranks with the same `color`, ordered by (key, rank); None for a rank whose color is None.

        Every rank of this communicator must call it; color and key are integers, color at least 0.
        """
        if color is not None and color < 0:
            raise ShapeError(f"color {color} is not allowed: at least 0, or None for a rank that is in no group.")
        self.agree("split")
        mine = np.array([-1 if color is None else color, key, self.contexts[0]], np.int64)
        table = self._everyones(mine)
        # A number that no member has used yet keeps the messages of this group apart from all others.
        self.contexts[0] = int(table[:, 2].max(initial=0)) + 2
        if color is None:
            return None
        members = sorted((int(table[r, 1]), r) for r in range(self.size) if table[r, 0] == color)
        group = self.subgroup([r for _, r in members])
        group.context = self.contexts[0]
        return group

    def subgroup(self, members):
        """These members alone, this rank among them, as a group whose messages count as messages of this one.

        Nothing is sent for it. It suits algorithms in which all members agree on who talks to whom, and when.
        """
        group = copy.copy(self)
        group.ranks = tuple(self.ranks[r] for r in members)
        group.nodes = tuple(self.nodes[r] for r in members)
        group.size, group.rank = len(members), members.index(self.rank)
        group._begin()
        return group

    def for_stream(self):
        """The same group for this rank's communication stream, whose messages never mix with those of this one."""
        if self.twin is None:
            twin = copy.copy(self)
            twin._begin()
            twin.context, self.twin = self.context + 1, twin
        return self.twin

    def agree(self, claim):
        """Note that this rank calls the collective that `claim`, a text, describes, and compare with the others.

        Nobody waits: whoever comes to a call later finds the difference, and the earlier ones learn of it. Raises
        MessageMismatch, on every rank that this group's transport can reach.
        """

    def meet(self, operation, offer=None):
        """Return when all ranks have come, with everybody's offers: integers, or anything where `sees_objects`."""
        raise NotImplementedError

    def share(self, nbytes, operation):
        """Every rank's `nbytes` of new memory that all ranks can read and write, as uint8 arrays. All must call it."""
        raise NotImplementedError

    def hold(self, handle):
        """Block until the stream has finished `handle`."""
        handle.finished.wait()

    def begin(self, handle):
        """The stream has been given `handle`."""

    def end(self, handle, idle):
        """The stream has finished `handle`; idle: it has nothing else to do."""
        handle.complete = True
        handle.finished.set()

    @contextmanager
    def overseen(self, operation, nbytes):
        """End the job if what is done in the `with` block, which no limit of ours reaches, takes too long."""
        yield

    def native(self):
        """The transport's own communicator for this group, whose collectives are the `native` algorithm."""
        raise LaunchError(f"algorithm 'native' is the MPI library's own: start with mpirun (here: {self.transport}).")

    def _everyones(self, row):
        """The rows of all ranks, by way of rank 0."""
        table = np.empty((self.size, len(row)), row.dtype)
        table[self.rank] = row
        if self.rank == 0:
            for r in range(1, self.size):
                self.recv(table[r], r, "split")
            for r in range(1, self.size):
                self.send(table, r, "split")
        else:
            self.send(row, 0, "split")
            self.recv(table, 0, "split")
        return table

    def _check(self, array, peer, tag, receives=False):
        if not 0 <= peer < self.size:
            raise ShapeError(f"rank {peer} is not in this group of {self.size} ranks: 0 to {self.size - 1}.")
        if array.dtype.hasobject:
            raise DTypeError(f"{array.dtype} arrays hold addresses, which mean nothing to another rank: send numbers.")
        if not 0 <= tag < TAGS:
            raise ShapeError(f"tag {tag} is not allowed: 0 to {TAGS - 1}.")
        if not array.flags.c_contiguous:
            raise ShapeError(f"messages need contiguous arrays: send ascontiguousarray(x) of this {array.shape} array.")
        if receives and not getattr(array.flags, "writeable", True):  # CuPy has no such flag
            raise ShapeError(f"a message cannot be received into this read-only {array.shape} array: copy it first.")


class NullCommunicator(Communicator):
    """Moves nothing and waits for nobody: a training step on it costs its computation alone.

    Its numbers are wrong: whatever is received is all ones, so that they stay finite.
    """

    moves_nothing = True

    def __init__(self, rank, size):
        super().__init__(rank, range(size), timeout=0, check_headers=False)

    def meet(self, operation, offer=None):
        return [offer] * self.size

    def share(self, nbytes, operation):
        own = np.zeros(nbytes, np.uint8)
        return [own] * self.size

    def isend(self, array, dest, operation="send", tag=0):
        return _Done(self, array, dest, operation, tag, True)

    def irecv(self, array, source, operation="recv", tag=0):
        array[...] = 1
        return _Done(self, array, source, operation, tag, False)


class _Done(Request):
    __slots__ = ()

    def done(self):
        return True

    def _wait(self):
        pass


def disagreement(calls):
    """The error for ranks that call different collectives; calls: {world rank: claim}."""
    said = "; ".join(f"rank {rank} called {claim}" for rank, claim in sorted(calls.items()))
    return MessageMismatch(f"every rank must call the same collectives in the same order, but {said}.")


def mismatch(comm, source, theirs, ours):
    """The error for a message whose two sides disagree; each side is (operation, dtype, bytes)."""
    return MessageMismatch(
        "rank {} sent {!r} ({}, {} bytes) but rank {} expected {!r} ({}, {} bytes): "
        "every rank must call the same operations in the same order with the same sizes.".format(
            source, *theirs, comm.ranks[comm.rank], *ours
        )
    )
