"""Ranks that are threads of one process: notebooks, tests, laptops without MPI.

A message is one copy, from the sender's array into the receiver's, made by whichever side comes second. Small messages
are buffered; large ones wait for the receiver, as MPI does. So a program that deadlocks under MPI deadlocks here too,
and is told why: the ranks share a lock, so it is known when every one of them waits for another.
"""

import threading
from collections import defaultdict, deque

import numpy as np

from minipar.comm.communicator import Communicator, Request, clock, disagreement, mismatch
from minipar.context import current
from minipar.errors import CommunicationTimeout, DeadlockError, MessageMismatch, RankFailed

FOREVER = 1e9  # seconds: a handle's own collective has the limit
EAGER_BYTES = 64 * 1024  # up to this size a send completes at once, from a buffer


class ThreadWorld:
    """What the thread ranks of one world share: a lock, and the messages and meetings that wait for their other half.

    An actor is a thread that works for a rank: (rank, False) its own, (rank, True) its communication stream.
    """

    def __init__(self, size):
        self.size = size
        self.lock = threading.Lock()
        self.wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)
        self.calls, self.meetings = {}, {}  # collectives that not all members have come to, by group and number
        self.actors = {(rank, False) for rank in range(size)}  # those that have work to do
        self.waiting = {}  # actor -> what it is blocked in: complete, peers, describe()
        self.failure = None  # (world rank, exception) of the first rank that raised

    def fail(self, rank, error):
        """Release every rank from its wait: `rank` has raised `error`."""
        with self.lock:
            self._fail(rank, error)

    def finish(self, actor):
        """`actor` has no more to do; whoever still waits for it waits forever."""
        with self.lock:
            self.actors.discard(actor)
            self.look_for_deadlock(actor[0])

    def check_all_received(self):
        """After all ranks have returned: MessageMismatch if a message is left that nobody has received."""
        for (_, source, dest, _), sends in self.sends.items():
            raise MessageMismatch(
                f"rank {source} sent {sends[0].operation!r} ({sends[0].array.nbytes} bytes) to rank {dest}, which has "
                "ended without receiving it."
            )

    def block(self, actor, wait, timeout):
        """Return when `wait.complete`, which somebody sets who then notifies the actor's rank."""
        rank, deadline = actor[0], clock() + timeout
        with self.lock:
            self.waiting[actor] = wait
            try:
                while not wait.complete:
                    self.raise_failure(rank)
                    self.look_for_deadlock(rank)
                    self.raise_failure(rank)
                    if not self.wakeups[rank].wait(max(0, deadline - clock())) and clock() >= deadline:
                        others = "; ".join(w.describe() for a, w in self.waiting.items() if a != actor)
                        others = f" Meanwhile {others}." if others else ""
                        raise CommunicationTimeout(f"{wait.describe()}; nothing came in {timeout:g} s.{others}")
            finally:
                del self.waiting[actor]

    def _fail(self, rank, error):
        self.failure = self.failure or (rank, error)
        for wakeup in self.wakeups:
            wakeup.notify_all()

    def look_for_deadlock(self, rank):
        """Called with the lock held, when one actor more has stopped running: can those that wait ever go on?

        They can if every rank that they wait for has an actor that can; the others wait in a circle, or for the dead.
        """
        stuck = {actor: wait for actor, wait in self.waiting.items() if not wait.complete}
        live = {r for r, stream in self.actors if (r, stream) not in stuck}
        while movable := [actor for actor, wait in stuck.items() if wait.peers <= live]:
            for actor in movable:
                live.add(actor[0])
                del stuck[actor]
        if stuck:
            lines = [wait.describe() for _, wait in sorted(stuck.items())]
            working = {r for r, _ in self.actors}
            finished = sorted(set().union(*(wait.peers for wait in stuck.values())) - working)
            lines += [f"rank {r} has finished" for r in finished]
            self._fail(rank, DeadlockError("these ranks can never continue: " + "; ".join(lines) + "."))

    def raise_failure(self, rank):
        if self.failure:
            failed, error = self.failure
            if failed == rank or isinstance(error, DeadlockError | MessageMismatch):
                raise error
            raise RankFailed(f"rank {rank} was stopped because rank {failed} failed: {error!r}") from error


class ThreadRequest(Request):
    """`complete` once the copy is made; `error` if the two sides did not agree."""

    __slots__ = ("complete", "error", "number", "posted")

    def __init__(self, *args):
        super().__init__(*args)
        self.complete, self.error, self.posted = False, None, clock()

    def done(self):
        return self.complete

    @property
    def peers(self):
        return {self.comm.ranks[self.peer]}

    def _wait(self):
        if not self.complete:
            self.comm.world.block(self.comm.actor, self, self.comm.timeout)
        if self.error:
            raise self.error


class Meeting:
    """One rank's wait for all members of its group; offers: what each has brought, shared by all of them."""

    def __init__(self, comm, operation, offers):
        self.comm, self.operation, self.offers = comm, operation, offers

    @property
    def complete(self):
        return len(self.offers) == self.comm.size

    @property
    def peers(self):
        return {rank for r, rank in enumerate(self.comm.ranks) if r not in self.offers}

    def describe(self):
        missing = ", ".join(map(str, sorted(self.peers)))
        return f"rank {self.comm.actor[0]} waits in {self.operation} for rank {missing}"


class ThreadCommunicator(Communicator):
    """A rank of `world`. Messages are matched by group, ranks and tag, in order."""

    transport, sees_objects = "threads", True

    def __init__(self, world, rank, timeout=60.0):
        super().__init__(rank, range(world.size), timeout)
        self.world, self.actor = world, (rank, False)

    def for_stream(self):
        twin = super().for_stream()
        twin.actor = (self.actor[0], True)
        return twin

    def agree(self, claim):
        if not self.check_headers:
            return
        self.calls += 1
        key, me, world = (self.context, self.ranks, self.calls), self.actor[0], self.world
        with world.lock:
            world.raise_failure(me)
            calls = world.calls.setdefault(key, {})
            calls[me] = claim
            if any(other != claim for other in calls.values()):
                world._fail(me, disagreement(calls))
            elif len(calls) == self.size:
                del world.calls[key]
            world.raise_failure(me)

    def meet(self, operation, offer=None):
        self.meetings += 1
        key, world = (self.context, self.ranks, self.meetings), self.world
        with world.lock:
            world.raise_failure(self.actor[0])
            offers = world.meetings.setdefault(key, {})
            offers[self.rank] = offer
            if len(offers) == self.size:
                del world.meetings[key]
                for rank in self.ranks:
                    world.wakeups[rank].notify_all()
        if len(offers) < self.size:
            world.block(self.actor, Meeting(self, operation, offers), self.timeout)
        return [offers[r] for r in range(self.size)]

    def share(self, nbytes, operation):
        return self.meet(operation, np.zeros(nbytes, np.uint8))

    def hold(self, handle):
        self.world.block(self.actor, handle, FOREVER)

    def begin(self, handle):
        with self.world.lock:
            self.world.actors.add((self.actor[0], True))

    def end(self, handle, idle):
        world, rank = self.world, self.actor[0]
        with world.lock:
            handle.complete = True
            if handle.error:
                world._fail(rank, handle.error)
            if idle:
                world.actors.discard((rank, True))
            world.wakeups[rank].notify_all()
            world.look_for_deadlock(rank)

    def isend(self, array, dest, operation="send", tag=0):
        self._check(array, dest, tag)
        send = ThreadRequest(self, array, dest, operation, tag, True)
        self.sent.messages += 1
        self.sent.bytes += array.nbytes
        send.number = self.sent.messages
        key = (self.context, self.ranks[self.rank], self.ranks[dest], tag)
        with self.world.lock:
            self.world.raise_failure(self.ranks[self.rank])
            receive = _pop(self.world.receives, key)
            if receive is None:
                if array.nbytes <= EAGER_BYTES:
                    send.array, send.complete = array.copy(), True
                self.world.sends[key].append(send)
        if receive is not None:
            deliver(send, receive)
        return send

    def irecv(self, array, source, operation="recv", tag=0):
        self._check(array, source, tag, receives=True)
        receive = ThreadRequest(self, array, source, operation, tag, False)
        key = (self.context, self.ranks[source], self.ranks[self.rank], tag)
        with self.world.lock:
            self.world.raise_failure(self.ranks[self.rank])
            send = _pop(self.world.sends, key)
            if send is None:
                self.world.receives[key].append(receive)
        if send is not None:
            deliver(send, receive)
        return receive


def _pop(queues, key):
    queue = queues.get(key)
    if not queue:
        return None
    first = queue.popleft()
    if not queue:
        del queues[key]
    return first


def deliver(send, receive):
    """Copy a matched message, outside the lock, and wake whoever waits for it."""
    world = send.comm.world
    source, dest = send.comm.ranks[send.comm.rank], receive.comm.ranks[receive.comm.rank]
    theirs = send.operation, send.array.dtype, send.array.nbytes
    ours = receive.operation, receive.array.dtype, receive.array.nbytes
    start, error = clock(), None
    if theirs == ours:
        receive.array[...] = send.array.reshape(receive.array.shape)
    else:
        error = mismatch(receive.comm, source, theirs, ours)
    recorder = current().recorder
    if recorder is not None and error is None:
        end = clock()
        if send.array.nbytes > EAGER_BYTES:
            recorder.span("communication", send.operation, start, end)
        recorder.message(source << 40 | send.number, source, dest, send.array.nbytes, send.posted, end, send.operation)
    with world.lock:
        send.ready, receive.ready = receive.posted, send.posted
        send.error, receive.error = error, error
        send.complete = receive.complete = True
        world.wakeups[source].notify_all()
        world.wakeups[dest].notify_all()
