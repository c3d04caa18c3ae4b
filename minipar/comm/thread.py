"""Ranks that are threads of one process: notebooks, tests, laptops without MPI.

A message is one copy, from the sender's array into the receiver's, made by whichever side comes second. Small messages
are buffered; large ones wait for the receiver, as MPI does. So a program that deadlocks under MPI deadlocks here too,
and is told why: the ranks share a lock, so it is known when every one of them waits for another.
"""

import threading
from collections import defaultdict, deque

from minipar.comm.communicator import Communicator, Request, clock, mismatch
from minipar.context import current
from minipar.errors import CommunicationTimeout, DeadlockError, MessageMismatch, RankFailed

EAGER_BYTES = 64 * 1024  # up to this size a send completes at once, from a buffer


class ThreadWorld:
    """What the thread ranks of one world share: a lock, and the messages that wait for their other half."""

    def __init__(self, size):
        self.size = size
        self.lock = threading.Lock()
        self.wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.sends, self.receives = defaultdict(deque), defaultdict(deque)
        self.waiting = {}  # world rank -> the request that it is blocked in
        self.finished = set()
        self.failure = None  # (world rank, exception) of the first rank that raised

    def fail(self, rank, error):
        """Release every rank from its wait: `rank` has raised `error`."""
        with self.lock:
            self._fail(rank, error)

    def finish(self, rank):
        """`rank` has returned; whoever still waits for it waits forever."""
        with self.lock:
            self.finished.add(rank)
            self.look_for_deadlock(rank)

    def check_all_received(self):
        """After all ranks have returned: MessageMismatch if a message is left that nobody has received."""
        for (_, source, dest, _), sends in self.sends.items():
            raise MessageMismatch(
                f"rank {source} sent {sends[0].operation!r} ({sends[0].array.nbytes} bytes) to rank {dest}, which has "
                "ended without receiving it."
            )

    def _fail(self, rank, error):
        self.failure = self.failure or (rank, error)
        for wakeup in self.wakeups:
            wakeup.notify_all()

    def look_for_deadlock(self, rank):
        """Called with the lock held, when one rank more has stopped running."""
        stuck = [r for r in self.waiting.values() if not r.complete]
        if stuck and len(stuck) + len(self.finished) == self.size:
            lines = [r.describe() for r in stuck] + [f"rank {r} has finished" for r in sorted(self.finished)]
            self._fail(rank, DeadlockError("no rank can continue: " + "; ".join(lines) + "."))

    def raise_failure(self, rank):
        if self.failure:
            failed, error = self.failure
            if failed == rank or isinstance(error, DeadlockError):
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

    def _wait(self):
        comm = self.comm
        world, me = comm.world, comm.ranks[comm.rank]
        if not self.complete:
            deadline = clock() + comm.timeout
            with world.lock:
                world.waiting[me] = self
                try:
                    while not self.complete:
                        world.raise_failure(me)
                        world.look_for_deadlock(me)
                        world.raise_failure(me)
                        if not world.wakeups[me].wait(max(0, deadline - clock())) and clock() >= deadline:
                            raise CommunicationTimeout(f"{self.describe()}; nothing came in {comm.timeout:g} s.")
                finally:
                    del world.waiting[me]
        if self.error:
            raise self.error


class ThreadCommunicator(Communicator):
    """A rank of `world`. Messages are matched by group, ranks and tag, in order."""

    transport = "threads"

    def __init__(self, world, rank, timeout=60.0):
        super().__init__(rank, range(world.size), timeout)
        self.world = world

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
